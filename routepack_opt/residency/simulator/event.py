"""Event-level simulator: every token group of a window through its seven stages, with contention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.simulator import event_kernels
from routepack_opt.residency.simulator.event_kernels import NUM_BUCKETS, EventScratch, EventTotals
from routepack_opt.residency.simulator.stage import STAGES, stage_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.stage import MigrationTraffic


@dataclass(frozen=True)
class EventResult:
    """One window at event level.

    ``stages`` [L, 7] are those of the last group of each layer and add up to ``layer_s`` [L]; ``totals`` is what
    passed through links, regions and chiplets.
    """

    stages: NDArray[np.float64]
    layer_s: NDArray[np.float64]
    totals: EventTotals

    @property
    def routed_s(self) -> float:
        """Routed-FFN time of the window: the sum over layers."""
        return float(self.layer_s.sum())


class EventModel:
    """The event-level simulator of one scene; owns its scratch memory, so one object per thread.

    Parameters
    ----------
    scene
        Model and machine.
    num_blocks
        Token blocks a source chiplet's tokens are cut into. A token group is one (block, layer, expert, source).
    """

    def __init__(self, scene: Scene, num_blocks: int = 1) -> None:
        """Allocates for the largest layer."""
        if num_blocks < 1:
            raise InvalidInput(f"num_blocks: {num_blocks} is not at least 1")
        self.scene, self.num_blocks = scene, num_blocks
        self.tables = stage_tables(scene)
        hardware, chiplets, experts = scene.hardware, scene.num_chiplets, scene.num_experts
        groups = num_blocks * experts * chiplets
        counts = [np.zeros(groups, dtype=np.int32) for _ in range(5)]
        seconds = [np.zeros(groups) for _ in range(6)]
        order, buckets = np.zeros(groups, dtype=np.int32), np.zeros(NUM_BUCKETS + 1, dtype=np.int64)
        free = [np.zeros(n) for n in (hardware.num_links, hardware.num_regions, chiplets, chiplets)]
        gate_ready, weights_ready = np.zeros((num_blocks, chiplets)), np.zeros((experts, scene.r_max))
        self.scratch = EventScratch._make((*counts, *seconds, order, buckets, gate_ready, *free, weights_ready))

    def new_totals(self) -> EventTotals:
        """Zeros."""
        hardware, chiplets = self.scene.hardware, self.scene.num_chiplets
        sizes = hardware.num_links, hardware.num_regions, chiplets, chiplets
        return EventTotals._make(np.zeros(n) for n in sizes)

    def simulate(
        self,
        layout: Layout,
        demand: NDArray[np.int32],
        slots: NDArray[np.int8],
        migration: MigrationTraffic | None = None,
    ) -> EventResult:
        """Simulate a window; arguments as :meth:`~routepack_opt.residency.simulator.stage.StageModel.evaluate`.

        Every layer begins with its even share of the migration traffic on links and banks.
        """
        scene, totals = self.scene, self.new_totals()
        links, regions = np.zeros(scene.hardware.num_links), np.zeros(scene.hardware.num_regions)
        if migration is not None:
            links, regions = migration.links / scene.num_layers, migration.regions / scene.num_layers
        stages, times = np.zeros((scene.num_layers, len(STAGES))), np.zeros(scene.num_layers)
        event_kernels.event_window(
            self.tables, self.scratch, totals, demand, layout.tier, layout.chiplet, slots, self.num_blocks, links,
            regions, stages, times,
        )  # fmt: skip
        return EventResult(stages, times, totals)

    def num_groups(self, demand: NDArray[np.int32]) -> int:
        """Token-group events of a window: records of (block, layer, expert, source) with tokens."""
        return int(np.minimum(demand, self.num_blocks).sum())


def warmup() -> None:
    """Compile (or load from the cache) the event kernel."""
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import scene_of
    from routepack_opt.residency.simulator.layout import Layout

    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=1, top_k=1, expert_bytes=1024.0)
    demand = np.ones((1, 1, scene.num_chiplets), dtype=np.int32)
    EventModel(scene).simulate(Layout.from_replicas(scene, [(0, 0, 1, 0)]), demand, np.zeros(demand.shape, np.int8))
