"""From a sealed window to experts in place: plan, agree, move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel
from routepack_opt.integrations.torch_moe.grpo.planning import (
    StepLayout,
    agree_on_layout,
    contiguous_slots,
    first_fit_cells,
    layout_facts,
)
from routepack_opt.integrations.torch_moe.materialise import materialise
from routepack_opt.integrations.torch_moe.slot_tensors import expert_slot_tensors

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.grpo.job import Job
    from routepack_opt.integrations.torch_moe.grpo.timeline import Timeline
    from routepack_opt.window import Window


@dataclass(frozen=True)
class Movement:
    """What moved in a step; bytes are of one EDP shard."""

    planned_bytes: int = 0
    moved_bytes: int = 0
    moved_experts: int = 0
    exposed_s: float = 0.0


class Placer:
    """Plans every step of a job and brings experts to their places."""

    def __init__(self, job: Job) -> None:
        """Compiles the planner's kernels on the ranks that plan."""
        from routepack_opt.planner import warmup

        self.job = job
        self.tensors = expert_slot_tensors(job.model, job.optimizer)
        plan = job.config.plan
        if job.mesh.rank == 0 or plan.planner == "every-rank":
            warmup()

    def place(self, window: Window, step: int, timeline: Timeline) -> tuple[StepLayout, Movement]:
        """The step's layout; when this returns, experts stand where it says. Every rank calls it."""
        job, plan = self.job, self.job.config.plan
        make = (lambda: self._plan(window, step)) if plan.routepack else (lambda: self._plain(window))
        with timeline.span("plan"):
            layout = agree_on_layout(make, window, job.mesh, every_rank=plan.planner == "every-rank")
        with timeline.span("move"):
            movement = self._move(layout)
        return layout, movement

    def _cost(self, window: Window) -> CostModel:
        return CostModel.default(window.num_layers, self.job.config.plan.token_cap)

    def _plan(self, window: Window, step: int) -> StepLayout:
        from routepack_opt.planner import plan_window

        job, settings = self.job, self.job.config.plan
        cost = self._cost(window)
        plan = plan_window(
            window,
            job.mesh.topology,
            token_cap=settings.token_cap,
            cost=cost,
            budget_s=settings.budget_s,
            budget_steps=settings.budget_steps,
            seed=settings.seed + step,
            previous=job.slot_map.logical_to_slot.cpu().numpy(),
            constraints=Constraints(max_moved=settings.max_moved),
        )
        facts: dict[str, Any] = layout_facts(
            window, job.mesh.topology, settings.token_cap, cost, plan.cells, plan.logical_to_slot
        )
        return StepLayout(plan.cells, plan.logical_to_slot, facts | {"plan_gap": plan.gap})

    def _plain(self, window: Window) -> StepLayout:
        job, cap = self.job, self.job.config.plan.token_cap
        cells = first_fit_cells(window, job.mesh.topology, cap)
        slots = contiguous_slots(window.num_layers, window.num_experts)
        return StepLayout(cells, slots, layout_facts(window, job.mesh.topology, cap, self._cost(window), cells, slots))

    def _move(self, layout: StepLayout) -> Movement:
        job = self.job
        if (job.slot_map.logical_to_slot.cpu().numpy() == layout.logical_to_slot).all():
            return Movement()
        report = materialise(
            self.tensors,
            job.slot_map,
            layout.logical_to_slot,
            job.mesh,
            version=job.slot_map.version + 1,
            chunk_bytes=int(job.config.plan.chunk_mib * (1 << 20)),
            timeout_s=job.config.parallel.timeout_s,
        )
        return Movement(report.planned_bytes, report.moved_bytes, report.num_moved, report.seconds)
