"""Placement for loads that change from window to window: smallest largest mean + z * sigma of a rank's load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import relabel_ranks
from routepack_opt.models.placement import check_load, check_ranks, placement_bounds, solve_placement
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_KICKS = 20


@dataclass(frozen=True)
class RobustPlacement:
    """A placement measured over several windows.

    Attributes
    ----------
    rank_of
        int64 [L, E].
    reached
        float64 [L], largest over ranks of mean + z * population standard deviation over windows of the rank's load.
    bound
        float64 [L], lower bound on ``reached`` for every placement: that of the mean load (sigma is never negative).
    """

    rank_of: NDArray[np.int64]
    reached: NDArray[np.float64]
    bound: NDArray[np.float64]


def solve_robust_placement(
    windows: ArrayLike,
    num_ranks: int,
    *,
    num_sigmas: float = 1.0,
    standing: ArrayLike | None = None,
    seed: int = 0,
) -> RobustPlacement:
    """Place for several recorded windows at once.

    Experts whose loads rise and fall together are kept apart: the spread of a rank's load depends on how its experts
    move with one another, which no per-expert summary shows.

    Parameters
    ----------
    windows
        int [T, L, E], loads of T windows.
    num_sigmas
        z; 0 balances the mean load alone.
    standing
        int [L, E], EP ranks in force; ranks are renamed so that fewest experts move.
    """
    array = integer_array(windows, "windows", 3, low=0, high=(1 << 60) // max(1, np.shape(windows)[0]))
    if not array.size:
        raise InvalidInput(f"windows: shape {array.shape} is empty; expected [windows, layers, experts]")
    if not (isinstance(num_sigmas, (int, float)) and 0 <= num_sigmas < 1e6):
        raise InvalidInput(f"num_sigmas: {num_sigmas!r} is not a number of standard deviations, zero or more")
    total = check_load(array.sum(axis=0, dtype=np.int64), num_ranks, "windows")
    from routepack_opt.solvers.risk_search import lower_risk

    rank_of = solve_placement(total, num_ranks, seed=seed).rank_of
    weight = np.ascontiguousarray(array.transpose(1, 2, 0), dtype=np.float64)
    reached = lower_risk(weight, rank_of, num_ranks, float(num_sigmas), kicks=_KICKS, seed=seed)
    if standing is not None:
        rank_of = relabel_ranks(rank_of, check_ranks(standing, total.shape, num_ranks, "standing"), num_ranks)
    bound = placement_bounds(total, num_ranks)[0] / len(array)
    return RobustPlacement(rank_of, reached, bound)


def rank_risk(
    windows: NDArray[np.int64], rank_of: NDArray[np.int64], num_ranks: int, num_sigmas: float
) -> NDArray[np.float64]:
    """float64 [L, P], mean + z * sigma over windows of each rank's load: the exact evaluator of this problem."""
    num_windows, num_layers, _ = windows.shape
    loads = np.zeros((num_windows, num_layers, num_ranks), dtype=np.int64)
    steps, layers = np.arange(num_windows)[:, None, None], np.arange(num_layers)[None, :, None]
    np.add.at(loads, (steps, layers, rank_of[None]), windows)
    risk: NDArray[np.float64] = loads.mean(axis=0) + num_sigmas * loads.std(axis=0)
    return risk
