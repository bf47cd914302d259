"""From a sealed window to experts in place: RoutePack's two waves, or nothing at all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel
from routepack_opt.integrations.torch_moe.grpo.planning import Cells, contiguous_slots, first_fit_cells, layout_facts
from routepack_opt.integrations.torch_moe.movement.wave_settings import WaveSettings
from routepack_opt.integrations.torch_moe.movement.waves import PlacementWaves
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.grpo.job import Job
    from routepack_opt.integrations.torch_moe.grpo.timeline import Timeline
    from routepack_opt.integrations.torch_moe.movement.report import StepMovement
    from routepack_opt.plan import Plan
    from routepack_opt.window import Window

_PLANNERS = {"rank0": "first", "every-rank": "every"}


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a step's samples run; experts stand where they are wanted.

    Attributes
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices.
    plan
        RoutePack's, or None without it.
    facts
        For the metrics: movement, and (rank 0) what the layout gains over contiguous experts with first-fit rows.
    """

    cells: Cells
    plan: Plan | None
    facts: dict[str, Any]


class Placer:
    """Plans every step of a job and brings experts to their places."""

    def __init__(self, job: Job) -> None:
        """Compiles the planner's kernels on the ranks that plan, before the first step's clock starts."""
        from routepack_opt.planner import warmup

        self.job = job
        settings, sizes = job.config.plan, job.model.config
        self.cost = CostModel.default(sizes.num_moe_layers, settings.token_cap)
        self.waves: PlacementWaves | None = None
        if settings.routepack:
            self.waves = PlacementWaves(
                expert_slot_tensors(job.model, job.optimizer), job.slot_map, job.mesh, self._wave_settings()
            )
            if self.waves.plans_here:
                warmup()

    def _wave_settings(self) -> WaveSettings:
        plan, timeout_s = self.job.config.plan, self.job.config.parallel.timeout_s
        return WaveSettings(
            token_cap=plan.token_cap,
            cost=self.cost,
            constraints=Constraints(max_moved=plan.max_moved),
            budget_s=plan.budget_s,
            budget_steps=plan.budget_steps,
            overlap=plan.overlap,
            planner=_PLANNERS[plan.planner],  # type: ignore[arg-type]
            late_moves=plan.late_moves,
            seconds_per_cost_unit=plan.seconds_per_unit,
            seconds_per_expert=plan.seconds_per_expert,
            chunk_bytes=int(plan.chunk_mib * (1 << 20)),
            timeout_s=timeout_s,
            plan_timeout_s=timeout_s,
        )

    def place(self, window: Window, step: int, timeline: Timeline) -> Placement:
        """The step's cells; when this returns, experts stand where the plan says. Every rank calls it."""
        job = self.job
        with timeline.span("plan and move"):
            if self.waves is None:
                cells, plan, facts = first_fit_cells(window, job.mesh.topology, job.config.plan.token_cap), None, {}
            else:
                start_s = time.time()
                plan, movement = self.waves.run(window, seed=job.config.plan.seed + step)
                cells, facts = plan.cells, movement_facts(movement) | {"plan_gap": plan.gap}
                _show(movement, start_s, timeline)
        if job.mesh.rank == 0:
            with timeline.span("facts"):
                contiguous = contiguous_slots(window.num_layers, window.num_experts)
                slots = contiguous if plan is None else plan.logical_to_slot
                cap = job.config.plan.token_cap
                facts |= layout_facts(window, job.mesh.topology, cap, self.cost, cells, slots)
        return Placement(cells, plan, facts)

    def observe(self, placement: Placement, step_s: float) -> None:
        """Tell the waves how long the planned step took; they weigh late moves with it."""
        # ranks that all plan would need one common time; without it they keep every late change that helps
        if self.waves is not None and placement.plan is not None and self.job.config.plan.planner == "rank0":
            self.waves.observe_step(placement.plan, step_s)


def movement_facts(movement: StepMovement) -> dict[str, Any]:
    """The numbers of a step's waves that go into its metrics; bytes are of one EDP shard."""
    return {
        "planned_bytes": movement.planned_bytes,
        "moved_bytes": movement.moved_bytes,
        "moved_experts": movement.num_moved,
        "late_experts": sum(wave.movement.num_moved for wave in movement.waves if wave.name == "late"),
        "dropped_moves": movement.dropped_moves,
        "exposed_s": movement.exposed_s,
        "overlapped_s": movement.overlapped_s,
        "peak_extra_bytes": max((wave.movement.peak_extra_bytes for wave in movement.waves), default=0),
        "place_s": movement.place_s,
        "pack_s": movement.pack_s,
    }


def _show(movement: StepMovement, start_s: float, timeline: Timeline) -> None:
    """Parts of the waves in the trace, as far as their lengths tell: the first wave lies beside packing."""
    after_place = start_s + movement.place_s
    timeline.add("place", start_s, movement.place_s)
    timeline.add("pack", after_place, movement.pack_s, lane=1)
    end_s = start_s + movement.total_s
    for wave in movement.waves:
        begin = after_place if wave.name == "first" else end_s - wave.movement.seconds
        timeline.add(f"move ({wave.name})", begin, wave.movement.seconds)
