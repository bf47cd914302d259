"""Book of one layer: expected service times of chiplets and regions while replicas are placed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout

_POWER = 6.0  # p-norm of service times: near the maximum, yet every chiplet and region counts


class LayerBook:
    """Expected service seconds of one layer's chiplets and regions while replicas are placed.

    Demand of an expert is split evenly over its replicas; every replica streams once.

    Attributes
    ----------
    chiplet_s, region_s
        [C] and [G] of what is placed so far.
    """

    def __init__(self, scene: Scene, layer: int, demand: NDArray[np.float64]) -> None:
        """``demand`` [E, C] token assignments of one window."""
        hardware = scene.hardware
        self.scene, self.layer = scene, layer
        self.demand = demand
        self.work = demand.sum(axis=1)
        self.token_s = scene.expert_ops / hardware.chiplet_ops
        self.stream_s = hardware.region_latency_s + scene.expert_bytes[layer] / hardware.region_bandwidth
        self.chiplet_s: NDArray[np.float64] = np.zeros(scene.num_chiplets)
        self.region_s: NDArray[np.float64] = np.zeros(hardware.num_regions)
        # seconds a token travels from each source to each chiplet and back
        chiplets = scene.num_chiplets
        inverse = hardware.route_inverse_bandwidth[:chiplets, :chiplets]
        self.path_s = scene.token_bytes * (inverse + inverse.T)

    @classmethod
    def of_layout(cls, layout: Layout, layer: int, demand: NDArray[np.float64]) -> LayerBook:
        """All replicas of a layer as they are."""
        book = cls(layout.scene, layer, demand)
        count = layout.count[layer].astype(np.int64)
        expert = np.repeat(np.arange(len(count)), count)
        resident = layout.tier[layer] >= 0
        tier, chiplet = layout.tier[layer][resident], layout.chiplet[layer][resident]
        np.add.at(book.chiplet_s, chiplet, book.work[expert] / count[expert] * book.token_s[chiplet])
        region = layout.scene.hardware.region_of[tier, chiplet]
        np.add.at(book.region_s, region, book.stream_s[region])
        return book

    def cost(self, expert: int, placed: NDArray[np.int64]) -> NDArray[np.float64]:
        """[num_tiers, C] growth of the p-norm potential if the expert's next replica goes there.

        ``placed`` are the chiplets of its other replicas. No legality is looked at; unserved places cost infinity.
        """
        before, after = self.work[expert] / max(len(placed), 1), self.work[expert] / (len(placed) + 1)
        chips = self.chiplet_s.copy()
        np.subtract.at(chips, placed, (before - after) * self.token_s[placed])
        grown = np.maximum(chips, 0.0) + after * self.token_s
        load = _potential(grown) - _potential(chips)
        region_of = self.scene.hardware.region_of
        bank = _potential(self.region_s + self.stream_s) - _potential(self.region_s)
        cost = np.where(region_of >= 0, bank[region_of], np.inf) + load[None, :]
        # ties (an expert nobody asked for) go to the emptier chiplet
        return np.asarray(cost * (1.0 + 1e-9 * np.arange(self.scene.num_chiplets)[None, :]))

    def distance(self, expert: int) -> NDArray[np.float64]:
        """[C] mean travel seconds of the expert's tokens to each chiplet and back."""
        return np.asarray(self.demand[expert] @ self.path_s / max(self.work[expert], 1e-12))

    def take_out(self, expert: int, tier: int, chiplet: int, count: int) -> None:
        """Forget one of an expert's ``count`` replicas; the others are not given its share."""
        self.chiplet_s[chiplet] -= self.work[expert] / count * self.token_s[chiplet]
        region = self.scene.hardware.region_of[tier, chiplet]
        self.region_s[region] -= self.stream_s[region]

    def place(self, expert: int, tier: int, chiplet: int, placed: NDArray[np.int64]) -> None:
        """Count a replica; ``placed`` as in :meth:`cost`."""
        before, after = self.work[expert] / max(len(placed), 1), self.work[expert] / (len(placed) + 1)
        np.subtract.at(self.chiplet_s, placed, (before - after) * self.token_s[placed])
        self.chiplet_s[chiplet] += after * self.token_s[chiplet]
        region = self.scene.hardware.region_of[tier, chiplet]
        self.region_s[region] += self.stream_s[region]


def _potential(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.maximum(seconds, 0.0) ** _POWER)
