"""Rank balancing by exchanges: equal numbers of weighted items on every rank, smallest possible largest rank load.

Knows arrays only: ``weight[l, e]`` is the weight of item e in instance l, ``rank_of[l, e]`` the rank that holds it.
An instance never loses the equal number of items a rank: every move exchanges one or two items of the fullest rank
for as many of another rank. Weights are int64 and every sum is exact.
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


@njit(cache=True, nogil=True)
def lpt_instances(weight, order, num_ranks, rank_of):  # type: ignore[no-untyped-def]
    """Items in ``order``, each to the open rank with the smallest (rank load, rank); fills ``rank_of`` [L, E]."""
    num_instances, num_items = weight.shape
    capacity = num_items // num_ranks
    rank_load = np.empty(num_ranks, np.int64)
    count = np.empty(num_ranks, np.int64)
    for inst in range(num_instances):
        rank_load[:] = 0
        count[:] = 0
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
def _descend(size, item, home, rank_load, target, moved, budget):  # type: ignore[no-untyped-def]
    """Exchange items of the fullest rank while that lowers it; returns the number of items away from home.

    ``size``, ``item`` and ``home`` [P, H] list what each rank holds: weight, item id, and the rank the item stood on
    (-1: moving it is free). Two-for-two exchanges are tried only where one-for-one finds nothing.
    """
    num_ranks, capacity = size.shape
    while True:
        full = 0
        for rank in range(1, num_ranks):
            if rank_load[rank] > rank_load[full]:
                full = rank
        top = rank_load[full]
        if top <= target:
            return moved
        best = top
        best_cost = 0
        other, i1, i2, j1, j2 = -1, -1, -1, -1, -1
        for rank in range(num_ranks):
            gap = top - rank_load[rank]
            if rank == full or top - gap // 2 > best:
                continue
            for i in range(capacity):
                for j in range(capacity):
                    shift = size[full, i] - size[rank, j]
                    if shift <= 0 or shift >= gap:
                        continue
                    value = max(top - shift, rank_load[rank] + shift)
                    if value > best:
                        continue
                    cost = (
                        (home[full, i] == full)
                        - (home[full, i] == rank)
                        + (home[rank, j] == rank)
                        - (home[rank, j] == full)
                    )
                    if moved + cost <= budget and (value < best or (cost < best_cost and other >= 0)):
                        best, best_cost, other, i1, j1 = value, cost, rank, i, j
        if other < 0:
            window = min(capacity, PAIR_WINDOW)
            for rank in range(num_ranks):
                gap = top - rank_load[rank]
                if rank == full or top - gap // 2 >= best:
                    continue
                for i in range(1, window):
                    for k in range(i):
                        pair = size[full, i] + size[full, k]
                        for j in range(1, window):
                            for m in range(j):
                                shift = pair - size[rank, j] - size[rank, m]
                                if shift <= 0 or shift >= gap:
                                    continue
                                value = max(top - shift, rank_load[rank] + shift)
                                if value >= best:
                                    continue
                                cost = (
                                    (home[full, i] == full)
                                    - (home[full, i] == rank)
                                    + (home[full, k] == full)
                                    - (home[full, k] == rank)
                                    + (home[rank, j] == rank)
                                    - (home[rank, j] == full)
                                    + (home[rank, m] == rank)
                                    - (home[rank, m] == full)
                                )
                                if moved + cost <= budget:
                                    best, best_cost, other = value, cost, rank
                                    i1, i2, j1, j2 = i, k, j, m
        if other < 0:
            return moved
        shift = 0
        for step in range(2):
            i, j = (i1, j1) if step == 0 else (i2, j2)
            if i < 0:
                continue
            shift += size[full, i] - size[other, j]
            size[full, i], size[other, j] = size[other, j], size[full, i]
            item[full, i], item[other, j] = item[other, j], item[full, i]
            home[full, i], home[other, j] = home[other, j], home[full, i]
        rank_load[full] -= shift
        rank_load[other] += shift
        moved += best_cost


@njit(cache=True, nogil=True)
def balance_instances(weight, rank_of, standing, target, budget, first, stride, num_ranks, reached):  # type: ignore[no-untyped-def]
    """Descend on instances first, first + stride, ...; ``rank_of`` [L, E] is improved in place.

    ``standing`` [L, E] holds the rank each item stood on (-1: free to move), ``budget`` [L] the most items that may end
    up elsewhere, ``target`` [L] the largest rank load at which to stop, ``reached`` [L] receives the largest rank load.
    """
    num_instances, num_items = weight.shape
    capacity = num_items // num_ranks
    size = np.empty((num_ranks, capacity), np.int64)
    item = np.empty((num_ranks, capacity), np.int64)
    home = np.empty((num_ranks, capacity), np.int64)
    rank_load = np.empty(num_ranks, np.int64)
    count = np.empty(num_ranks, np.int64)
    for inst in range(first, num_instances, stride):
        rank_load[:] = 0
        count[:] = 0
        moved = 0
        for e in range(num_items):
            rank = rank_of[inst, e]
            size[rank, count[rank]] = weight[inst, e]
            item[rank, count[rank]] = e
            home[rank, count[rank]] = standing[inst, e]
            moved += standing[inst, e] >= 0 and standing[inst, e] != rank
            count[rank] += 1
            rank_load[rank] += weight[inst, e]
        _descend(size, item, home, rank_load, target[inst], moved, budget[inst])
        for rank in range(num_ranks):
            for k in range(capacity):
                rank_of[inst, item[rank, k]] = rank
        reached[inst] = rank_load.max()


def run_in_threads(work: Callable[[int, int], None], num_instances: int) -> None:
    """Call ``work(first, stride)`` so that together the calls cover all instances, on as many threads as cores."""
    num_threads = max(1, min(num_instances, os.cpu_count() or 1))
    if num_threads == 1:
        work(0, 1)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for result in [pool.submit(work, first, num_threads) for first in range(num_threads)]:
            result.result()


def balance(
    weight: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    num_ranks: int,
    target: NDArray[np.int64],
    *,
    standing: NDArray[np.int64] | None = None,
    budget: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Improve ``rank_of`` [L, E] by exchanges until no exchange helps or ``target`` [L] is met.

    Returns
    -------
    rank_of, reached
        int64 [L, E] and the largest rank load [L]; the input is left alone.
    """
    num_instances, num_items = weight.shape
    result = np.array(rank_of, dtype=np.int64, order="C")
    reached = np.zeros(num_instances, dtype=np.int64)
    if standing is None:
        standing = np.full(weight.shape, -1, dtype=np.int64)
    if budget is None:
        budget = np.full(num_instances, num_items, dtype=np.int64)
    weight, standing = np.ascontiguousarray(weight), np.ascontiguousarray(standing)

    def work(first: int, stride: int) -> None:
        balance_instances(weight, result, standing, target, budget, first, stride, num_ranks, reached)

    run_in_threads(work, num_instances)
    return result, reached


def warmup() -> None:
    """Compile every kernel of this module on tiny arrays."""
    weight = np.array([[5, 4, 3, 1]], dtype=np.int64)
    rank_of = np.zeros((1, 4), dtype=np.int64)
    lpt_instances(weight, np.arange(4, dtype=np.int64)[None], 2, rank_of)
    balance(weight, rank_of, 2, np.zeros(1, dtype=np.int64))
