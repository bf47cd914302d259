"""Hotness: what the windows so far say about the next one's demand; the same for every policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control import hotness_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEEP = 0.5  # of the old value a window (the a of new = a * old + (1 - a) * now)
SCALE = 16  # forecasts count in sixteenths of a token, so that kernels work on whole numbers


class Hotness:
    """Running means of demand.

    Attributes
    ----------
    demand
        float32 [L, E, C] EWMA of token assignments by source chiplet: the forecast of the next window.
    hot, volatility
        float64 [L, E] EWMA of an expert's assignments, and of their distance from that mean.
    last_used
        int64 [L, E] latest window with tokens, -1 never.
    """

    def __init__(self, shape: tuple[int, int, int], *, keep: float = KEEP) -> None:
        """``shape`` is (L, E, C); ``keep`` in [0, 1).

        Raises
        ------
        InvalidInput
            ``keep`` outside.
        """
        if not 0.0 <= keep < 1.0:
            raise InvalidInput(f"hotness.keep: {keep!r}; expected a number in [0, 1)")
        self.keep = keep
        self.demand: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        self.hot: NDArray[np.float64] = np.zeros(shape[:2])
        self.volatility: NDArray[np.float64] = np.zeros(shape[:2])
        self.last_used: NDArray[np.int64] = np.full(shape[:2], -1, dtype=np.int64)
        self._first = True

    def start(self, profile: NDArray[np.float64]) -> None:
        """Begin with the mean demand [L, E, C] of a profile, window -1."""
        self.demand[:] = profile
        self.hot[:] = profile.sum(axis=2)
        self._first = False

    def update(self, demand: NDArray[np.int32], window: int) -> None:
        """Take in the demand [L, E, C] of a window that ended."""
        hotness_kernels.blend(
            demand, window, self.keep, self._first, self.demand, self.hot, self.volatility, self.last_used
        )
        self._first = False

    def entropy(self, layer: int) -> NDArray[np.float64]:
        """[E] source entropy in [0, 1]: 0 when one chiplet sends all tokens, 1 when all send as many."""
        demand = self.demand[layer].astype(np.float64)
        share = demand / np.maximum(demand.sum(axis=1, keepdims=True), 1e-12)
        logs = np.log(np.where(share > 0, share, 1.0))
        return np.asarray(-(share * logs).sum(axis=1) / np.log(max(share.shape[1], 2)))

    def forecast(self, layer: int) -> NDArray[np.int32]:
        """int32 [E, C] forecast of a layer in units of 1 / SCALE tokens."""
        return np.asarray(np.rint(self.demand[layer] * SCALE), dtype=np.int32)
