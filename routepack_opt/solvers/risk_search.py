"""Rank balancing over several windows: minimise the largest mean + z * standard deviation of a rank's load.

Knows arrays only: ``weight[l, e, t]`` is the weight of item e in window t of instance l. The measure is not a sum over
items, so exchanges are evaluated on the ranks' window sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from routepack_opt.solvers.local_search import run_in_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LESS = 1.0 - 1e-12


@njit(cache=True, nogil=True)
def _risk(total, out, back, num_sigmas):  # type: ignore[no-untyped-def]
    """Mean + z * population standard deviation over windows of ``total - out + back``."""
    num_windows = len(total)
    mean = 0.0
    for t in range(num_windows):
        mean += total[t] - out[t] + back[t]
    mean /= num_windows
    square = 0.0
    for t in range(num_windows):
        square += (total[t] - out[t] + back[t] - mean) ** 2
    return mean + num_sigmas * np.sqrt(square / num_windows)


@njit(cache=True, nogil=True)
def _exchange(weight, item, total, a, i, b, j):  # type: ignore[no-untyped-def]
    x, y = item[a, i], item[b, j]
    for t in range(weight.shape[1]):
        shift = weight[x, t] - weight[y, t]
        total[a, t] -= shift
        total[b, t] += shift
    item[a, i], item[b, j] = y, x


@njit(cache=True, nogil=True)
def _descend(weight, item, total, risk, num_sigmas):  # type: ignore[no-untyped-def]
    """Best one-for-one exchange of the rank with the largest measure, while it lowers that; returns the largest."""
    num_ranks, capacity = item.shape
    none = weight[0]
    for rank in range(num_ranks):
        risk[rank] = _risk(total[rank], none, none, num_sigmas)
    while True:
        full = 0
        for rank in range(1, num_ranks):
            if risk[rank] > risk[full]:
                full = rank
        top = risk[full]
        best, other, best_i, best_j = top * _LESS, -1, 0, 0
        for rank in range(num_ranks):
            if rank == full:
                continue
            for i in range(capacity):
                x = weight[item[full, i]]
                for j in range(capacity):
                    y = weight[item[rank, j]]
                    value = _risk(total[full], x, y, num_sigmas)
                    if value < best:
                        value = max(value, _risk(total[rank], y, x, num_sigmas))
                        if value < best:
                            best, other, best_i, best_j = value, rank, i, j
        if other < 0:
            return top
        _exchange(weight, item, total, full, best_i, other, best_j)
        none = weight[0]
        risk[full] = _risk(total[full], none, none, num_sigmas)
        risk[other] = _risk(total[other], none, none, num_sigmas)


@njit(cache=True, nogil=True)
def risk_instances(weight, rank_of, chosen, num_sigmas, kicks, seed, num_ranks, reached):  # type: ignore[no-untyped-def]
    """Iterated descent on the instances ``chosen``; improves ``rank_of`` [L, E], fills ``reached`` [L]."""
    num_items, num_windows = weight.shape[1], weight.shape[2]
    capacity = num_items // num_ranks
    item = np.empty((num_ranks, capacity), np.int64)
    total = np.empty((num_ranks, num_windows), np.float64)
    risk = np.empty(num_ranks, np.float64)
    count = np.empty(num_ranks, np.int64)
    for inst in chosen:
        w = weight[inst]
        best = np.inf
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(inst + 1) * np.uint64(0xD1B54A32D192ED03)
        state |= np.uint64(1)
        for attempt in range(kicks + 1):
            for rank in range(num_ranks):
                count[rank] = 0
                for t in range(num_windows):
                    total[rank, t] = 0.0
            for e in range(num_items):
                where = rank_of[inst, e]
                item[where, count[where]] = e
                count[where] += 1
                for t in range(num_windows):
                    total[where, t] += w[e, t]
            if attempt > 0:
                a = np.int64(0)
                for rank in range(1, num_ranks):
                    if risk[rank] > risk[a]:
                        a = np.int64(rank)
                for _ in range(2):
                    state ^= state << np.uint64(13)
                    state ^= state >> np.uint64(7)
                    state ^= state << np.uint64(17)
                    b = np.int64((state >> np.uint64(11)) % np.uint64(num_ranks))
                    if a != b:
                        i = np.int64((state >> np.uint64(30)) % np.uint64(capacity))
                        j = np.int64((state >> np.uint64(45)) % np.uint64(capacity))
                        _exchange(w, item, total, a, i, b, j)
                        a = b
            value = _descend(w, item, total, risk, num_sigmas)
            if value <= best:
                best = value
                for rank in range(num_ranks):
                    for k in range(capacity):
                        rank_of[inst, item[rank, k]] = rank
        reached[inst] = best


def lower_risk(
    weight: NDArray[np.float64],
    rank_of: NDArray[np.int64],
    num_ranks: int,
    num_sigmas: float,
    *,
    kicks: int = 0,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Improve ``rank_of`` [L, E] in place; returns the largest mean + z * sigma of each instance, float64 [L].

    Parameters
    ----------
    weight
        float64 [L, E, T], contiguous.
    """
    reached = np.zeros(len(weight), dtype=np.float64)

    def work(part: NDArray[np.int64]) -> None:
        risk_instances(weight, rank_of, part, num_sigmas, kicks, seed % (1 << 62), num_ranks, reached)

    run_in_threads(work, np.arange(len(weight), dtype=np.int64))
    return reached


def warmup() -> None:
    """Compile every kernel of this module on tiny arrays."""
    weight = np.arange(8, dtype=np.float64).reshape(1, 4, 2)
    lower_risk(weight, np.array([[0, 0, 1, 1]], dtype=np.int64), 2, 1.0, kicks=1)
