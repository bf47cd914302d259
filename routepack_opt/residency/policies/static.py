"""Single static copy: the primaries of the start layout, never changed. The denominator of all comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.residency.directory import Edit
    from routepack_opt.residency.layout import Layout
    from routepack_opt.residency.observation import PolicyView
    from routepack_opt.residency.scene import Scene


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
