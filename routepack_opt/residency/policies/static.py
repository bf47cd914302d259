"""Single static copy: the primaries of the start layout, never changed. The denominator of all comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class Static:
    """One copy of every expert; each group goes to it."""

    name: str = "static"
    mapping: str = "primary"
    max_edits: int | None = 0

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The primaries."""
        return start_layout.primaries()

    def decide(self, view: PolicyView) -> list[Edit]:
        """Nothing."""
        return []
