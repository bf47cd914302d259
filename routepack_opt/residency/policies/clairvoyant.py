"""Clairvoyant: the look-ahead that knows the next window's demand and copies for nothing. A reference, no policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.control.hotness import Hotness
from routepack_opt.residency.policies.look_ahead import LookAhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.traces.windows import Workload


@dataclass
class Clairvoyant(LookAhead):
    """Plans every layer with the demand to come; edits cost nothing in its eyes (copying still takes its time).

    Parameters
    ----------
    windows
        All demand.
    span
        Windows ahead it plans for: a copy stays A_min windows at least, the next window alone misleads.
    """

    windows: Workload | Sequence[NDArray[np.int32]] = ()
    span: int = 6
    max_edits: int | None = 64
    mu1: float = 0.0
    mu2: float = 0.0
    layers: int = 10**6
    rest: int = 0
    name: str = "clairvoyant"

    def decide(self, view: PolicyView) -> list[Edit]:
        """Edits for the next window."""
        if view.window + 1 >= len(self.windows):
            return []
        last = min(view.window + 1 + self.span, len(self.windows))
        coming = [self.windows[window] for window in range(view.window + 1, last)]
        future = Hotness(view.demand.shape)
        future.start(np.mean(coming, axis=0))
        return super().decide(replace(view, hotness=future))
