"""What every policy sees after a window, and the shape of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from routepack_opt.residency.simulator.simulate_window import Observation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.residency.control.hotness import Hotness
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.mapping.mapping import MapWeights
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass(frozen=True)
class PolicyView(Observation):
    """An :class:`~routepack_opt.residency.simulator.simulate_window.Observation` with the running means.

    Parameters
    ----------
    hotness
        EWMA demand, hotness, volatility, source entropy, up to this window; read only.
    """

    hotness: Hotness


class Policy(Protocol):
    """A residency policy. One object serves one run."""

    @property
    def name(self) -> str:
        """As results print it."""

    @property
    def mapping(self) -> str | MapWeights:
        """Rule of the fast loop: one of ``mapping.RULES``, weights of the fast map, or "balance"."""

    @property
    def max_edits(self) -> int | None:
        """U_max: edits a window that take effect; None: no limit."""

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The policy's layout before the first window.

        Parameters
        ----------
        scene
            Model and machine.
        start_layout
            The common popularity layout; not to be changed (one-copy policies return ``start_layout.primaries()``).
        profile
            [L, E, C] mean demand of a window of the first tenth.
        """

    def decide(self, view: PolicyView) -> list[Edit]:
        """Edits after a window, most wanted first; illegal ones and those over U_max do nothing."""
