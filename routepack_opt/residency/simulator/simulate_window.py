"""One decision window on one machine: times, pressures, energy, traffic, and what policies may see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.mapping.mapping import FAST, MapWeights, assign
from routepack_opt.residency.simulator.energy import Energy, other_seconds, throttle_of, window_energy
from routepack_opt.residency.simulator.event import EventModel
from routepack_opt.residency.simulator.migration import MigrationStep
from routepack_opt.residency.simulator.stage import MigrationTraffic, StageModel, StageResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Directory
    from routepack_opt.residency.simulator.layout import Layout

Level = Literal["stage", "event"]


class Pressures(NamedTuple):
    """The pressure state P of a window.

    ``load``, ``link``, ``bank``: service time of the busiest chiplet, link and region as a share of the window;
    ``tier``: used share of each tier's room; ``migration``: exposed migration as a share of the window.
    """

    load: float
    link: float
    bank: float
    tier: tuple[float, ...]
    migration: float


@dataclass(frozen=True)
class WindowResult:
    """What happened in one window.

    Parameters
    ----------
    level
        "stage" or "event": what ``stages`` [L, 7] (order of ``stage.STAGES``) and ``layer_s`` [L] come from, in s.
        The power throttle is in neither: it multiplies the totals.
    routed_s, other_s, end_to_end_s
        Routed FFN over all layers, non-routed events, their sum; throttled.
    throttle, next_throttle
        Factor on this window's times, and on the next one's.
    slots
        int8 [L, E, C]: replica slot that served each group.
    accesses, reads
        Replica reads of the window in all, and by tier: a used replica streams once per layer and window.
    streamed_bytes
        [num_tiers] bytes of weights read, by tier.
    link_bytes, region_bytes, chiplet_tokens
        [U], [G], [C] foreground traffic summed over layers.
    link_utilisation, region_utilisation, chiplet_utilisation
        The same as shares of ``routed_s`` (service time over window time).
    migration
        What migration moved; its ``traffic`` is in the times, not in the arrays above.
    exposed_migration_s
        Routed time less what it would be without migration (same assignment).
    base
        The stage-level evaluation, for :meth:`~routepack_opt.residency.simulator.stage.StageModel.score_edits`.
    """

    level: Level
    stages: NDArray[np.float64]
    layer_s: NDArray[np.float64]
    routed_s: float
    other_s: float
    throttle: float
    next_throttle: float
    slots: NDArray[np.int8]
    reads: tuple[int, ...]
    streamed_bytes: tuple[float, ...]
    link_bytes: NDArray[np.float64]
    region_bytes: NDArray[np.float64]
    chiplet_tokens: NDArray[np.float64]
    link_utilisation: NDArray[np.float64]
    region_utilisation: NDArray[np.float64]
    chiplet_utilisation: NDArray[np.float64]
    migration: MigrationStep
    exposed_migration_s: float
    pressures: Pressures
    energy: Energy
    base: StageResult

    @property
    def end_to_end_s(self) -> float:
        """Routed and non-routed time."""
        return self.routed_s + self.other_s

    @property
    def accesses(self) -> int:
        """Replica reads."""
        return sum(self.reads)

    @property
    def hits(self) -> int:
        """Reads that a tier faster than the slowest served."""
        return sum(self.reads[:-1])

    @property
    def edp(self) -> float:
        """Energy-delay product of the window, J s, end to end."""
        return self.energy.total_j * self.end_to_end_s


@dataclass(frozen=True)
class Observation:
    """What every policy sees after a window, and all it sees.

    Parameters
    ----------
    scene, window
        The machine and model, and the number of the window that just ended.
    demand
        int32 [L, E, C] of that window.
    result
        Its times, utilisations and pressures.
    directory
        Published layout, copies under way, legality; read only (policies return edits).
    """

    scene: Scene
    window: int
    demand: NDArray[np.int32]
    result: WindowResult
    directory: Directory

    @property
    def layout(self) -> Layout:
        """The layout the next window starts with."""
        return self.directory.layout


class WindowSimulator:
    """Simulates windows of one scene; holds the compiled models' scratch memory, so one object per thread."""

    def __init__(self, scene: Scene, *, num_blocks: int = 1) -> None:
        """``num_blocks``: see :class:`~routepack_opt.residency.simulator.event.EventModel`."""
        self.scene = scene
        self.stage = StageModel(scene)
        self.num_blocks = num_blocks
        self._event: EventModel | None = None

    def assign(self, layout: Layout, demand: NDArray[np.int32], rule: str | MapWeights = FAST) -> NDArray[np.int8]:
        """Slots [L, E, C] under a mapping rule, see :func:`~routepack_opt.residency.mapping.mapping.assign`."""
        return assign(self.stage.tables, layout, demand, rule)

    def simulate(
        self,
        layout: Layout,
        demand: NDArray[np.int32],
        mapping: str | MapWeights | NDArray[np.int8] = FAST,
        migration: MigrationStep | None = None,
        level: Level = "stage",
        *,
        throttle: float = 1.0,
    ) -> WindowResult:
        """One window.

        Parameters
        ----------
        layout
            Published replicas; unchanged.
        demand
            int32 [L, E, C] token assignments by source chiplet (tokens return there).
        mapping
            Rule of the fast loop, or the slots themselves, int8 [L, E, C].
        migration
            What :meth:`~routepack_opt.residency.simulator.migration.Migrator.advance` moved in this window.
        level
            "stage" or "event".
        throttle
            ``next_throttle`` of the window before.

        Raises
        ------
        InvalidInput
            Wrong shapes, negative demand, an unknown rule or level, slots without a replica.
        """
        scene = self.scene
        _check_demand(scene, demand)
        slots = mapping if isinstance(mapping, np.ndarray) else self.assign(layout, demand, mapping)
        _check_slots(layout, demand, slots)
        step = migration or no_migration(scene)
        base = self.stage.evaluate(layout, demand, slots, step.traffic)
        calm_s = self.stage.without_migration(base) if step.bytes_moved else base.routed_s
        stages, layer_s = base.stages, base.layer_s
        if level == "event":
            if self._event is None:
                self._event = EventModel(scene, self.num_blocks)
            event = self._event.simulate(layout, demand, slots, step.traffic)
            stages, layer_s = event.stages, event.layer_s
            calm_s = self._event.simulate(layout, demand, slots).routed_s if step.bytes_moved else event.routed_s
        elif level != "stage":
            raise InvalidInput(f"level: {level!r} is unknown; expected 'stage' or 'event'")
        return self._result(layout, demand, base, stages, layer_s, calm_s, step, level, throttle)

    def _result(
        self,
        layout: Layout,
        demand: NDArray[np.int32],
        base: StageResult,
        stages: NDArray[np.float64],
        layer_s: NDArray[np.float64],
        calm_s: float,
        step: MigrationStep,
        level: Level,
        throttle: float,
    ) -> WindowResult:
        scene, hardware, state = self.scene, self.scene.hardware, base.state
        window_s = float(layer_s.sum())
        num_assignments = float(demand.sum())
        routed_s = window_s * throttle
        other_s = throttle * other_seconds(scene, num_assignments / scene.top_k / scene.num_layers)
        link_bytes = (state.dispatch_links + state.gather_links + state.memory_links).sum(axis=0)
        region_bytes, chiplet_tokens = state.region_bytes.sum(axis=0), state.chiplet_tokens.sum(axis=0)
        share = 1.0 / window_s if window_s > 0 else 0.0
        link_use = link_bytes / hardware.link_bandwidth * share
        region_use = region_bytes / hardware.region_bandwidth * share
        chiplet_use = chiplet_tokens * scene.expert_ops / hardware.chiplet_ops * share
        exposed_s = max(0.0, window_s - calm_s)
        tiers = hardware.region_tier
        room = np.bincount(tiers, weights=scene.region_room, minlength=scene.num_tiers)
        held = np.bincount(tiers, weights=layout.region_bytes + layout.pending_bytes, minlength=scene.num_tiers)
        used = held / np.maximum(room, 1.0)
        energy = window_energy(scene, state, num_assignments, step.energy_j, routed_s + other_s)
        reads = np.bincount(tiers, weights=state.region_reads.sum(axis=0), minlength=scene.num_tiers)
        streamed = np.bincount(tiers, weights=region_bytes, minlength=scene.num_tiers)
        return WindowResult(
            level=level,
            stages=stages,
            layer_s=layer_s,
            routed_s=routed_s,
            other_s=other_s,
            throttle=throttle,
            next_throttle=throttle_of(scene, energy, routed_s + other_s),
            slots=base.slots,
            reads=tuple(int(n) for n in reads),
            streamed_bytes=tuple(float(n) for n in streamed),
            link_bytes=link_bytes,
            region_bytes=region_bytes,
            chiplet_tokens=chiplet_tokens,
            link_utilisation=link_use,
            region_utilisation=region_use,
            chiplet_utilisation=chiplet_use,
            migration=step,
            exposed_migration_s=exposed_s * throttle,
            pressures=Pressures(
                float(chiplet_use.max()),
                float(link_use.max(initial=0.0)),
                float(region_use.max()),
                tuple(float(x) for x in used),
                exposed_s * share,
            ),
            energy=energy,
            base=base,
        )


def simulate(
    scene: Scene,
    layout: Layout,
    demand: NDArray[np.int32],
    mapping: str | MapWeights | NDArray[np.int8] = FAST,
    migrations: MigrationStep | None = None,
    level: Level = "stage",
    *,
    throttle: float = 1.0,
) -> WindowResult:
    """One window, see :meth:`WindowSimulator.simulate`; for many windows keep one WindowSimulator."""
    return WindowSimulator(scene).simulate(layout, demand, mapping, migrations, level, throttle=throttle)


def no_migration(scene: Scene) -> MigrationStep:
    """A window that moves nothing."""
    hardware = scene.hardware
    traffic = MigrationTraffic(np.zeros(hardware.num_links), np.zeros(hardware.num_regions))
    return MigrationStep(traffic, 0.0, 0.0, 0)


def _check_demand(scene: Scene, demand: NDArray[np.int32]) -> None:
    shape = scene.num_layers, scene.num_experts, scene.num_chiplets
    if demand.shape != shape or demand.dtype != np.int32:
        raise InvalidInput(f"demand: {demand.dtype} {demand.shape}; expected int32 {shape}")
    if demand.size and demand.min() < 0:
        where = tuple(int(i) for i in np.argwhere(demand < 0)[0])
        raise InvalidInput(f"demand{list(where)}: {demand[where]} is negative; expected a count of tokens")


def _check_slots(layout: Layout, demand: NDArray[np.int32], slots: NDArray[np.int8]) -> None:
    if slots.shape != demand.shape or slots.dtype != np.int8:
        raise InvalidInput(f"slots: {slots.dtype} {slots.shape}; expected int8 {demand.shape}")
    wrong = (demand > 0) & ((slots < 0) | (slots >= layout.count[:, :, None]))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = int(layout.count[where[:2]])
        raise InvalidInput(f"slots{list(where)}: {slots[where]} is no published replica; expected 0..{count - 1}")


def warmup() -> None:
    """Compile (or load from the cache) all kernels of the simulator."""
    from routepack_opt.residency.simulator import event, stage

    stage.warmup()
    event.warmup()
