"""One step's planning and movement in two waves (routepack.md section 7).

First wave: the placement of the window totals is known long before the layout, so it is agreed and its state moves
while a background thread packs (the kernels release the interpreter lock). Second wave: what co-refinement changed on
top, before admission, only where the predicted gain exceeds the time the step waits for it. Without overlap everything
moves after the plan.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.cost import score
from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.late_plan import late_share, with_placement
from routepack_opt.integrations.torch_moe.movement.materialise import materialise
from routepack_opt.integrations.torch_moe.movement.report import MovementReport, StepMovement, WaveReport
from routepack_opt.integrations.torch_moe.movement.shared_plan import Background, Decision, PlanningFailed, share
from routepack_opt.integrations.torch_moe.movement.wave_settings import WaveSettings
from routepack_opt.models.late_moves import choose_late_moves
from routepack_opt.planner import place_window, plan_window, warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
    from routepack_opt.plan import Plan
    from routepack_opt.window import Window

__all__ = ["PlacementWaves", "PlanningFailed", "WaveSettings"]

_PLACE_SHARE = 0.03  # of the time budget, as in plan_window


class PlacementWaves:
    """Plans every step of a job and moves its experts; one instance a rank, all ranks call :meth:`run` together.

    Parameters
    ----------
    slot_tensors
        All per-expert state, see :func:`~routepack_opt.integrations.torch_moe.movement.materialise.materialise`.

    Attributes
    ----------
    seconds_per_cost_unit, seconds_per_expert
        As given by the settings, or as last measured: by :meth:`observe_step` and by the waves.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self, slot_tensors: Sequence[Any], slot_map: SlotMap, mesh: ParallelMesh, settings: WaveSettings
    ) -> None:
        self.slot_tensors, self.slot_map, self.mesh, self.settings = slot_tensors, slot_map, mesh, settings
        self.plans_here = settings.planner == "every" or mesh.rank == 0
        self.seconds_per_cost_unit = settings.seconds_per_cost_unit
        self.seconds_per_expert = settings.seconds_per_expert
        self._warm = False

    def observe_step(self, plan: Plan, step_s: float) -> None:
        """Learn how long a unit of the score takes; with ``planner="every"`` all ranks must pass the same time."""
        if self.settings.seconds_per_cost_unit is None and plan.score.slowest_shard > 0:
            self.seconds_per_cost_unit = step_s / plan.score.slowest_shard

    def run(self, window: Window | None, *, seed: int = 0) -> tuple[Plan, StepMovement]:
        """Plan the window and put its placement in force.

        Parameters
        ----------
        window
            Sealed; None will do on ranks that do not plan.

        Returns
        -------
        The plan, its placement in force, and what it took. The plan verifies; ``moved_experts`` counts from the
        placement before the step, whatever the waves.

        Raises
        ------
        PlanningFailed
            On the ranks that wait for a plan that cannot be made (the planning rank raises the reason itself, such as
            InvalidInput for a window of another model).
        PlacementDisagreement, MovementFailed
            See :func:`~routepack_opt.integrations.torch_moe.movement.materialise.materialise`; the first also where
            ranks that all plan made different plans.
        """
        if self.plans_here and not self._warm:
            warmup()
            self._warm = True
        start = time.perf_counter()
        previous = self.slot_map.logical_to_slot.cpu().numpy().copy()
        run = self._two_waves if self.settings.overlap else self._one_wave
        plan, movement = run(window, previous, seed)
        return plan, replace(movement, total_s=time.perf_counter() - start)

    def _one_wave(self, window: Window | None, previous: NDArray[np.int64], seed: int) -> tuple[Plan, StepMovement]:
        def decide() -> bytes:
            self._check(window)
            assert window is not None
            start = time.perf_counter()
            plan = self._plan(window, previous, self.settings.constraints, seed, None)
            pack_s = time.perf_counter() - start
            return Decision(plan, pack_s, (_gain(window, plan, previous, plan.logical_to_slot), 0.0), 0).to_bytes()

        decision = Decision.from_bytes(self._share(decide, Decision.without_times, "the plan"))
        report = self._move(decision.plan.logical_to_slot)
        wave = self._wave("all", report, report.seconds, decision.gains[0])
        return decision.plan, StepMovement((wave,), 0.0, decision.pack_s, 0.0, 0)

    def _two_waves(self, window: Window | None, previous: NDArray[np.int64], seed: int) -> tuple[Plan, StepMovement]:
        first, place_s = self._place(window, previous, seed)
        stop = threading.Event()
        packing = self._pack(window, previous, first, seed, stop) if self.plans_here else None
        try:
            report = self._move(first)
        except BaseException:
            stop.set()  # nobody wants its plan any more; the thread ends by itself
            raise

        def decide() -> bytes:
            assert window is not None and packing is not None
            return self._decide(window, previous, first, packing).to_bytes()

        decision = Decision.from_bytes(self._share(decide, Decision.without_times, "the plan"))
        exposed_s = max(0.0, report.seconds - decision.pack_s)
        waves = [self._wave("first", report, exposed_s, decision.gains[0])]
        if (decision.plan.logical_to_slot != first).any():
            late = self._move(decision.plan.logical_to_slot)
            waves.append(self._wave("late", late, late.seconds, decision.gains[1]))
        return decision.plan, StepMovement(tuple(waves), place_s, decision.pack_s, 0.0, decision.dropped)

    def _place(self, window: Window | None, previous: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], float]:
        """The placement of the window totals on all ranks, and how long it took."""
        settings = self.settings

        def place() -> bytes:
            self._check(window)
            assert window is not None
            start = time.perf_counter()
            slots = place_window(
                window,
                self.mesh.topology,
                previous=previous,
                max_moved=settings.constraints.max_moved,
                time_limit_s=_PLACE_SHARE * settings.budget_s if settings.budget_steps is None else None,
                seed=seed,
            )
            return struct.pack("<d", time.perf_counter() - start) + slots.astype("<i8").tobytes()

        payload = self._share(place, lambda made: made[8:], "the placement")
        slots = np.frombuffer(payload, dtype="<i8", offset=8).astype(np.int64).reshape(previous.shape)
        return slots, float(struct.unpack_from("<d", payload)[0])

    def _pack(
        self,
        window: Window | None,
        previous: NDArray[np.int64],
        first: NDArray[np.int64],
        seed: int,
        stop: threading.Event,
    ) -> Background:
        """Start on the layout, from the placement that is about to stand."""
        assert window is not None
        per_rank = self.mesh.topology.experts_per_rank(window.num_experts)
        moved = (first // per_rank != previous // per_rank).sum(axis=1)
        given = self.settings.constraints
        late = replace(given, max_moved=late_share(given, self.settings.late_moves, moved, window.num_experts))
        return Background(lambda: self._plan(window, first, late, seed, stop))

    def _plan(
        self,
        window: Window,
        previous: NDArray[np.int64],
        constraints: Constraints,
        seed: int,
        stop: threading.Event | None,
    ) -> Plan:
        settings = self.settings
        return plan_window(
            window,
            self.mesh.topology,
            token_cap=settings.token_cap,
            cost=settings.cost,
            budget_s=settings.budget_s,
            budget_steps=settings.budget_steps,
            seed=seed,
            device=settings.device,
            previous=previous,
            constraints=constraints,
            stop=stop,
        )

    def _decide(
        self, window: Window, previous: NDArray[np.int64], first: NDArray[np.int64], packing: Background
    ) -> Decision:
        """Keep the late changes that pay, and make the plan that goes with them."""
        plan = packing.result()
        unit_s, expert_s = self.seconds_per_cost_unit, self.seconds_per_expert
        if unit_s is None or expert_s is None:  # nothing to weigh with: whatever lowers the score
            unit_s, expert_s = 1.0, 0.0
        late = choose_late_moves(
            window,
            plan.cells,
            plan.topology,
            plan.token_cap,
            plan.cost,
            placement_a=first,
            placement_b=plan.logical_to_slot,
            seconds_per_cost_unit=unit_s,
            seconds_per_expert=expert_s,
            late_moves=self.settings.late_moves,
        )
        dropped = int(plan.moved_experts.sum() - late.moved_experts.sum())
        notes = (f"late moves: {dropped} left out, not worth the wait",) if dropped else ()
        final = with_placement(plan, window, late.logical_to_slot, previous, self.settings.constraints, notes)
        return Decision(final, packing.seconds, (_gain(window, plan, previous, first), late.gain), dropped)

    def _check(self, window: Window | None) -> None:
        if window is None:
            raise InvalidInput(f"window: rank {self.mesh.rank} plans and has none; expected the step's window")
        found, wanted = window.demand.shape[1:], (self.slot_map.num_layers, self.slot_map.num_experts)
        if tuple(found) != wanted:
            raise InvalidInput(f"window: {tuple(found)} MoE layers and experts, the placement in force has {wanted}")

    def _move(self, slots: NDArray[np.int64]) -> MovementReport:
        report: MovementReport = materialise(
            self.slot_tensors,
            self.slot_map,
            slots,
            self.mesh,
            version=self.slot_map.version + 1,
            chunk_bytes=self.settings.chunk_bytes,
            timeout_s=self.settings.timeout_s,
        )
        if self.settings.seconds_per_expert is None and report.num_moved:
            self.seconds_per_expert = report.seconds / report.num_moved  # the slowest rank's: the same on all ranks
        return report

    def _wave(self, name: str, report: MovementReport, exposed_s: float, gain: float) -> WaveReport:
        unit_s = self.seconds_per_cost_unit
        gain_s = None if unit_s is None else gain * unit_s
        return WaveReport(name, report, exposed_s, report.seconds - exposed_s, gain, gain_s)

    def _share(self, make: Callable[[], bytes], key: Callable[[bytes], bytes], what: str) -> bytes:
        every, wait_s = self.settings.planner == "every", self.settings.plan_timeout_s
        return share(make, self.mesh, every=every, key=key, timeout_s=wait_s, what=what)


def _gain(window: Window, plan: Plan, before: NDArray[np.int64], after: NDArray[np.int64]) -> float:
    """Score units that a change of placement saves under the plan's layout."""
    old, new = (
        score(window, plan.cells, slots, plan.topology, plan.token_cap, plan.cost).slowest_shard
        for slots in (before, after)
    )
    return old - new
