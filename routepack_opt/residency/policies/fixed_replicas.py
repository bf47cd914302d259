"""Fixed replicas by popularity: the whole budget from the start, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from routepack_opt.residency.control.start_layout import Location, replicate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.mapping.mapping import MapWeights
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class FixedReplicas:
    """Primaries of the start layout and the replicas the profile asks for, at ``location``.

    Parameters
    ----------
    location
        See :func:`~routepack_opt.residency.control.start_layout.popularity_layout`.
    mapping
        Rule that picks a replica.
    """

    location: Location = "balanced"
    mapping: str | MapWeights = "balance"
    name: str = "fixed-replicas"
    max_edits: int | None = 0

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """Replicas by popularity; "balanced" is the start layout itself."""
        if self.location == "balanced":
            return start_layout.copy()
        return replicate(start_layout.primaries(), profile, self.location)

    def decide(self, view: PolicyView) -> list[Edit]:
        """Nothing."""
        return []
