"""Stage-level model: the time of every layer of a window from its loads; policies and bounds are compared on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from routepack_opt.residency.mapping.mapping import FAST, MapWeights
from routepack_opt.residency.simulator import stage_kernels
from routepack_opt.residency.simulator.stage_kernels import StageTables, WindowState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout

STAGES = ("gate", "dispatch", "queue", "memory", "compute", "gather", "combine")


class MigrationTraffic(NamedTuple):
    """Bytes that migration moves in one window: links [U], regions [G] (read at the source, written at the target)."""

    links: NDArray[np.float64]
    regions: NDArray[np.float64]


@dataclass(frozen=True)
class StageResult:
    """One window under the stage-level model.

    ``stages`` [L, 7] in the order of :data:`STAGES`, ``layer_s`` [L], ``slots`` int8 [L, E, C] the assignment served,
    ``state`` the loads, which :meth:`StageModel.score_edits` reads.
    """

    stages: NDArray[np.float64]
    layer_s: NDArray[np.float64]
    slots: NDArray[np.int8]
    state: WindowState

    @property
    def routed_s(self) -> float:
        """Routed-FFN time of the window: the sum over layers."""
        return float(self.layer_s.sum())


class StageModel:
    """The stage-level model of one scene; owns its scratch memory, so one object per thread."""

    def __init__(self, scene: Scene) -> None:
        """Tables of ``scene``; compiles nothing (see :func:`warmup`)."""
        self.scene = scene
        self.tables = stage_tables(scene)
        hardware = scene.hardware
        self._tokens = np.zeros(scene.num_chiplets)
        self._region_bytes = np.zeros(hardware.num_regions)
        self._slots = np.zeros(scene.num_chiplets, dtype=np.int8)

    def new_state(self) -> WindowState:
        """Zero loads."""
        scene, hardware = self.scene, self.scene.hardware
        layers, links, regions = scene.num_layers, hardware.num_links, hardware.num_regions
        zeros = [np.zeros((layers, n)) for n in (links, links, links, scene.num_chiplets, regions, regions)]
        zeros += [np.zeros((layers, n)) for n in (*(scene.num_experts,) * 3, 2)]
        return WindowState._make((*zeros, np.zeros(links), np.zeros(regions)))

    def evaluate(
        self,
        layout: Layout,
        demand: NDArray[np.int32],
        slots: NDArray[np.int8],
        migration: MigrationTraffic | None = None,
    ) -> StageResult:
        """Times of a window.

        Parameters
        ----------
        layout
            Published replicas.
        demand
            int32 [L, E, C] token assignments by source chiplet.
        slots
            int8 [L, E, C] slot that serves each group; see ``mapping.assign``.
        migration
            Traffic of the window; every layer carries an even share.
        """
        state = self.new_state()
        if migration is not None:
            state.migration_links[:] = migration.links / self.scene.num_layers
            state.migration_regions[:] = migration.regions / self.scene.num_layers
        stages, times = np.zeros((self.scene.num_layers, len(STAGES))), np.zeros(self.scene.num_layers)
        stage_kernels.window_stages(
            self.tables, state, demand, layout.tier, layout.chiplet, slots, stages, times
        )  # fmt: skip
        return StageResult(stages, times, slots, state)

    def without_migration(self, base: StageResult) -> float:
        """Routed time of an evaluated window had nothing been migrated."""
        zeros = np.zeros_like(base.state.migration_links), np.zeros_like(base.state.migration_regions)
        state = base.state._replace(migration_links=zeros[0], migration_regions=zeros[1])
        stages = np.empty(len(STAGES))
        return float(sum(stage_kernels.layer_stages(self.tables, state, k, stages) for k in range(len(base.layer_s))))

    def score_edits(
        self,
        layout: Layout,
        demand: NDArray[np.int32],
        base: StageResult,
        layers: NDArray[np.int64],
        experts: NDArray[np.int64],
        tiers: NDArray[np.int8],
        chiplets: NDArray[np.int16],
        weights: MapWeights = FAST,
    ) -> NDArray[np.float64]:
        """Layer time after each of K single-expert edits, the other experts served as in ``base``.

        Parameters
        ----------
        layout, demand, base
            The window and its evaluation, :meth:`evaluate`.
        layers, experts
            int64 [K].
        tiers, chiplets
            int8 and int16 [K, R_max]: all replicas the expert would have (-1 in free slots, packed).
        weights
            Of the fast map, which serves the edited expert.

        Returns
        -------
        float64 [K]; subtract ``base.layer_s[layers]`` for the change of the window.
        """
        times = np.empty(len(layers))
        stage_kernels.score_edits(
            self.tables, base.state, demand, layout.tier, layout.chiplet, base.slots, layers, experts, tiers, chiplets,
            weights.array(), weights.block_groups, self._tokens, self._region_bytes, self._slots, np.empty(len(STAGES)),
            times,
        )  # fmt: skip
        return times


def stage_tables(scene: Scene) -> StageTables:
    """The kernels' view of a scene."""
    hardware = scene.hardware
    return StageTables(
        route_offsets=hardware.route_offsets,
        route_links=hardware.route_links,
        route_latency=hardware.route_latency_s,
        route_inverse=hardware.route_inverse_bandwidth,
        link_bandwidth=hardware.link_bandwidth,
        link_latency=hardware.link_latency_s,
        chiplet_ops=hardware.chiplet_ops,
        region_bandwidth=hardware.region_bandwidth,
        region_latency=hardware.region_latency_s,
        region_of=hardware.region_of,
        memory_node=hardware.memory_node,
        expert_bytes=scene.expert_bytes,
        expert_ops=scene.expert_ops,
        token_bytes=scene.token_bytes,
        gate_ops=scene.gate_ops,
        combine_ops=scene.combine_ops,
        gate_constant=scene.hardware.package.rules.gate_constant_s,
        top_k=float(scene.top_k),
    )


def warmup() -> None:
    """Compile (or load from the cache) every kernel of the stage-level model and of the fast map."""
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import scene_of
    from routepack_opt.residency.mapping.mapping import assign
    from routepack_opt.residency.simulator.layout import Layout

    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=2, top_k=1, expert_bytes=1024.0)
    layout = Layout.from_replicas(scene, [(0, 0, 0, 0), (0, 1, 1, 1)])
    model, demand = StageModel(scene), np.ones((1, 2, scene.num_chiplets), dtype=np.int32)
    base = model.evaluate(layout, demand, assign(model.tables, layout, demand, FAST))
    one = np.zeros(1, dtype=np.int64)
    model.score_edits(layout, demand, base, one, one, layout.tier[0, :1], layout.chiplet[0, :1])
    model.without_migration(base)
