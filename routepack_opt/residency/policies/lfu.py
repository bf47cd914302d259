"""LFU residency: replicas for the experts with the most tokens since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.policies.cached_replicas import CachedReplicas

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class Lfu(CachedReplicas):
    """Rank: token assignments so far, the profile included; ``decay`` a window (1: never forgets)."""

    decay: float = 0.98
    name: str = "lfu"

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """Counts begin with one window of the profile."""
        self._counts = profile.sum(axis=2)
        return start_layout

    def decide(self, view: PolicyView) -> list[Edit]:
        """Count, then replace."""
        self._counts = self._counts * self.decay + view.demand.sum(axis=2)
        return super().decide(view)

    def rank(self, view: PolicyView, layer: int) -> NDArray[np.float64]:
        """See the class."""
        return np.asarray(self._counts[layer] + 1e-9)
