"""Rank balancing by exchanges: equal numbers of weighted items on every rank, smallest possible largest rank load.

Knows arrays only: ``weight[l, e]`` is the weight of item e in instance l, ``rank_of[l, e]`` the rank that holds it.
An instance never loses the equal number of items a rank: every move exchanges one or two items of the fullest rank
for as many of another rank; where no exchange helps, random exchanges kick the search out (iterated local search).
Weights are int64, at most 2^60 in sum, and every sum is exact.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PAIR_WINDOW = 16
"""Items of a rank that two-for-two exchanges look at: with more items a rank, one-for-one is already fine-grained."""
MAX_PAIRS = PAIR_WINDOW * (PAIR_WINDOW - 1) // 2


@njit(cache=True, nogil=True)
def lpt_instances(weight, order, num_ranks, rank_of):  # type: ignore[no-untyped-def]
    """Items in ``order``, each to the open rank with the smallest (rank load, rank); fills ``rank_of`` [L, E]."""
    num_instances, num_items = weight.shape
    capacity = num_items // num_ranks
    rank_load = np.empty(num_ranks, np.int64)
    count = np.empty(num_ranks, np.int64)
    for inst in range(num_instances):
        for rank in range(num_ranks):
            rank_load[rank] = count[rank] = 0
        for k in range(num_items):
            item = order[inst, k]
            best = -1
            for rank in range(num_ranks):
                if count[rank] < capacity and (best < 0 or rank_load[rank] < rank_load[best]):
                    best = rank
            rank_of[inst, item] = best
            rank_load[best] += weight[inst, item]
            count[best] += 1


@njit(cache=True, nogil=True)
def _nearest(out, num_out, back, num_back, gap):  # type: ignore[no-untyped-def]
    """Smallest ``|2 * (out[i] - back[j]) - gap|``: how far the best exchange stays from levelling two ranks."""
    best = np.int64(1) << 62
    for i in range(num_out):
        wanted = 2 * out[i] - gap
        for j in range(num_back):
            best = min(best, abs(wanted - 2 * back[j]))
    return best


@njit(cache=True, nogil=True)
def _pair_sums(size, window, sums):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(1, window):
        for k in range(i):
            sums[n] = size[i] + size[k]
            n += 1
    return n


@njit(cache=True, nogil=True)
def _exchange(size, item, rank_load, a, i, b, j):  # type: ignore[no-untyped-def]
    shift = size[a, i] - size[b, j]
    size[a, i], size[b, j] = size[b, j], size[a, i]
    item[a, i], item[b, j] = item[b, j], item[a, i]
    rank_load[a] -= shift
    rank_load[b] += shift


@njit(cache=True, nogil=True)
def _copy(size, item, rank_load, to_size, to_item, to_load):  # type: ignore[no-untyped-def]
    # loops: numba spends seconds compiling the shape errors of slice assignments
    for rank in range(len(rank_load)):
        to_load[rank] = rank_load[rank]
        for k in range(size.shape[1]):
            to_size[rank, k] = size[rank, k]
            to_item[rank, k] = item[rank, k]


@njit(cache=True, nogil=True)
def _fullest(rank_load):  # type: ignore[no-untyped-def]
    full = 0
    for rank in range(1, len(rank_load)):
        if rank_load[rank] > rank_load[full]:
            full = rank
    return full


@njit(cache=True, nogil=True)
def _descend(size, item, rank_load, target, out, back):  # type: ignore[no-untyped-def]
    """Best exchange of the fullest rank, again and again, while it lowers that rank; returns the largest load.

    ``size`` and ``item`` [P, H] list what each rank holds. Levelling ranks a and b by ``shift`` leaves the larger at
    (load a + load b + |2 shift - (load a - load b)|) / 2, so all comparisons are of doubled integers.
    """
    num_ranks, capacity = size.shape
    window = min(capacity, PAIR_WINDOW)
    while True:
        full = _fullest(rank_load)
        top = rank_load[full]
        if top <= target:
            return top
        best, other = 2 * top, -1
        for rank in range(num_ranks):
            total = top + rank_load[rank]
            if rank != full and total < best:
                value = total + _nearest(size[full], capacity, size[rank], capacity, top - rank_load[rank])
                if value < best:
                    best, other = value, rank
        if other >= 0:
            gap = top - rank_load[other]
            miss = best - top - rank_load[other]
            for k in range(capacity * capacity):
                i, j = k // capacity, k % capacity
                if abs(2 * (size[full, i] - size[other, j]) - gap) == miss:
                    _exchange(size, item, rank_load, full, i, other, j)
                    break
            continue
        num_out = _pair_sums(size[full], window, out)
        for rank in range(num_ranks):
            total = top + rank_load[rank]
            if rank != full and total < best:
                num_back = _pair_sums(size[rank], window, back)
                value = total + _nearest(out, num_out, back, num_back, top - rank_load[rank])
                if value < best:
                    best, other = value, rank
        if other < 0:
            return top
        gap = top - rank_load[other]
        miss = best - top - rank_load[other]
        num_back = _pair_sums(size[other], window, back)
        found = 0
        while abs(2 * (out[found // num_back] - back[found % num_back]) - gap) != miss:
            found += 1
        chosen = np.empty((2, 2), np.int64)
        for side in range(2):
            n = found // num_back if side == 0 else found % num_back
            i = 1
            while n >= i:
                n -= i
                i += 1
            chosen[side, 0], chosen[side, 1] = i, n
        for step in range(2):
            _exchange(size, item, rank_load, full, chosen[0, step], other, chosen[1, step])


@njit(cache=True, nogil=True)
def search_instances(weight, rank_of, chosen, target, stop, kicks, seed, num_ranks, reached):  # type: ignore[no-untyped-def]
    """Iterated descent on the instances ``chosen``; ``rank_of`` [L, E] is improved in place.

    ``target`` [L] ends a descent, ``stop`` [L] >= target ends the kicks, of which there are at most ``kicks``;
    ``reached`` [L] receives the largest rank load.
    """
    num_items = weight.shape[1]
    capacity = num_items // num_ranks
    size = np.empty((num_ranks, capacity), np.int64)
    item = np.empty((num_ranks, capacity), np.int64)
    rank_load = np.empty(num_ranks, np.int64)
    count = np.empty(num_ranks, np.int64)
    out = np.empty(MAX_PAIRS, np.int64)
    back = np.empty(MAX_PAIRS, np.int64)
    best_size = np.empty((num_ranks, capacity), np.int64)
    best_item = np.empty((num_ranks, capacity), np.int64)
    best_load = np.empty(num_ranks, np.int64)
    for inst in chosen:
        for rank in range(num_ranks):
            rank_load[rank] = count[rank] = 0
        for e in range(num_items):
            rank = rank_of[inst, e]
            size[rank, count[rank]] = weight[inst, e]
            item[rank, count[rank]] = e
            count[rank] += 1
            rank_load[rank] += weight[inst, e]
        best = _descend(size, item, rank_load, target[inst], out, back)
        _copy(size, item, rank_load, best_size, best_item, best_load)
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(inst + 1) * np.uint64(0xD1B54A32D192ED03)
        state |= np.uint64(1)
        for _ in range(kicks):
            if best <= stop[inst]:
                break
            a = _fullest(rank_load)
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            # a chain of one to three random exchanges that starts at the fullest rank
            for _step in range(1 + (state >> np.uint64(33)) % np.uint64(3)):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                b = np.int64((state >> np.uint64(11)) % np.uint64(num_ranks))
                if a != b:
                    i = np.int64((state >> np.uint64(30)) % np.uint64(capacity))
                    j = np.int64((state >> np.uint64(45)) % np.uint64(capacity))
                    _exchange(size, item, rank_load, a, i, b, j)
                    a = b
            value = _descend(size, item, rank_load, target[inst], out, back)
            if value <= best:
                best = value
                _copy(size, item, rank_load, best_size, best_item, best_load)
            else:
                _copy(best_size, best_item, best_load, size, item, rank_load)
        for rank in range(num_ranks):
            for k in range(capacity):
                rank_of[inst, best_item[rank, k]] = rank
        reached[inst] = best


def run_in_threads(work: Callable[[NDArray[np.int64]], None], chosen: NDArray[np.int64]) -> None:
    """Call ``work`` on slices that together are ``chosen``, on as many threads as cores."""
    num_threads = max(1, min(len(chosen), os.cpu_count() or 1))
    if num_threads == 1:
        work(chosen)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        slices = [np.ascontiguousarray(chosen[first::num_threads]) for first in range(num_threads)]
        for result in [pool.submit(work, part) for part in slices]:
            result.result()


def balance(
    weight: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    num_ranks: int,
    target: NDArray[np.int64],
    *,
    stop: NDArray[np.int64] | None = None,
    kicks: int = 0,
    chosen: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Improve ``rank_of`` [L, E] in place by exchanges until none helps or ``target`` [L] is met.

    Parameters
    ----------
    stop
        int64 [L], no more kicks below this largest load; default ``target``.
    kicks
        Most random restarts an instance.
    chosen
        The instances to work on; default all.

    Returns
    -------
    reached
        int64 [L], the largest rank load, 0 for instances not chosen.
    """
    reached = np.zeros(len(weight), dtype=np.int64)
    if chosen is None:
        chosen = np.arange(len(weight), dtype=np.int64)
    if stop is None:
        stop = target

    def work(part: NDArray[np.int64]) -> None:
        search_instances(weight, rank_of, part, target, stop, kicks, seed % (1 << 62), num_ranks, reached)

    run_in_threads(work, chosen)
    return reached


def warmup() -> None:
    """Compile every kernel of this module on tiny arrays."""
    weight = np.array([[5, 4, 3, 1]], dtype=np.int64)
    rank_of = np.zeros((1, 4), dtype=np.int64)
    lpt_instances(weight, np.argsort(-weight, axis=1, kind="stable"), 2, rank_of)
    balance(weight, rank_of, 2, np.zeros(1, dtype=np.int64), kicks=1)
