"""Rank balancing that starts where the items stand: good balance for few moved items.

Arrays as in ``local_search``; ``standing[l, e]`` is the rank item e stands on, and an item counts as moved when it ends
anywhere else, however often it was exchanged on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from routepack_opt.solvers.local_search import _exchange, _fullest, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MOVE_PRICE = 0.05
"""One more moved item is worth this share of the target load as unused room: tuned on real expert counts."""


@njit(cache=True, nogil=True)
def _move_cost(standing, item, a, i, b, j):  # type: ignore[no-untyped-def]
    """Change of the number of moved items when ranks a and b exchange their items i and j."""
    from_a, from_b = standing[item[a, i]], standing[item[b, j]]
    return np.int64(from_a == a) - np.int64(from_a == b) + np.int64(from_b == b) - np.int64(from_b == a)


@njit(cache=True, nogil=True)
def _repair(size, item, rank_load, standing, target, budget, noise, state):  # type: ignore[no-untyped-def]
    """Bring every rank to ``target`` or below with few exchanges; returns the number of moved items.

    The fullest rank exchanges with the rank whose room the surplus fills best (best fit: large rooms are kept for large
    surpluses). Where no single exchange does, the one that leaves least of the surplus on either side. Stops early
    where nothing helps or the budget is spent.
    """
    num_ranks, capacity = size.shape
    moved = 0
    for _ in range(4 * num_ranks):  # exchanges of items already moved cost nothing: they must not go on for ever
        full = _fullest(rank_load)
        surplus = rank_load[full] - target
        if surplus <= 0:
            break
        best, best_cost, other, best_i, best_j = np.inf, 0, -1, 0, 0
        for rank in range(num_ranks):
            room = target - rank_load[rank]
            if room <= 0:
                continue
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            luck = noise * np.float64(state >> np.uint64(11)) / 9007199254740992.0
            # no exchange that leaves more than this can win, however many items it brings home
            limit = (best - luck + 2 * MOVE_PRICE) * (target + 1)
            for i in range(capacity):
                for j in range(capacity):
                    shift = size[full, i] - size[rank, j]
                    if shift <= 0 or shift >= surplus + room or (shift > room and shift < surplus):
                        continue
                    if shift > room:
                        left = target + shift - room
                    elif shift < surplus:
                        left = target + surplus - shift
                    else:
                        left = room - shift
                    if left >= limit:
                        continue
                    cost = _move_cost(standing, item, full, i, rank, j)
                    value = np.float64(left) / (target + 1) + MOVE_PRICE * cost + luck
                    if value < best and moved + cost <= budget:
                        best, best_cost, other, best_i, best_j = value, cost, rank, i, j
                        limit = (best - luck + 2 * MOVE_PRICE) * (target + 1)
        if other < 0:
            break
        _exchange(size, item, rank_load, full, best_i, other, best_j)
        moved += best_cost
    return moved


@njit(cache=True, nogil=True)
def _settle(size, item, rank_load, standing, target, moved, budget):  # type: ignore[no-untyped-def]
    """Best one-for-one exchange of the fullest rank, cheapest among equals, while it helps and the budget allows."""
    num_ranks, capacity = size.shape
    while True:
        full = _fullest(rank_load)
        top = rank_load[full]
        if top <= target:
            return moved
        best, best_cost, other, best_i, best_j = top, 0, -1, 0, 0
        for rank in range(num_ranks):
            gap = top - rank_load[rank]
            if top - gap // 2 > best:
                continue
            for i in range(capacity):
                for j in range(capacity):
                    shift = size[full, i] - size[rank, j]
                    if shift <= 0 or shift >= gap:
                        continue
                    value = max(top - shift, rank_load[rank] + shift)
                    if value <= best:
                        cost = _move_cost(standing, item, full, i, rank, j)
                        if (value < best or cost < best_cost) and moved + cost <= budget:
                            best, best_cost, other, best_i, best_j = value, cost, rank, i, j
        if other < 0:
            return moved
        _exchange(size, item, rank_load, full, best_i, other, best_j)
        moved += best_cost


@njit(cache=True, nogil=True)
def move_instances(  # type: ignore[no-untyped-def]
    weight, standing, chosen, goal, budget, slack, noise, first_only, seed, num_ranks, rank_of, reached
):
    """Several attempts from the standing ranks; the best by (largest load above ``goal``, moved items) is kept.

    Attempt k repairs to ``goal * (1 + slack[k])``, then settles towards ``goal``; ``first_only`` ends with the first
    attempt whose repair succeeded. Fills ``rank_of`` [L, E] and ``reached`` [L] for the instances ``chosen``.
    """
    num_items = weight.shape[1]
    capacity = num_items // num_ranks
    size = np.empty((num_ranks, capacity), np.int64)
    item = np.empty((num_ranks, capacity), np.int64)
    rank_load = np.empty(num_ranks, np.int64)
    count = np.empty(num_ranks, np.int64)
    for inst in chosen:
        best, best_moved = np.int64(-1), np.int64(0)
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(inst + 1) * np.uint64(0xD1B54A32D192ED03)
        state |= np.uint64(1)
        for k in range(len(slack)):
            for rank in range(num_ranks):
                rank_load[rank] = count[rank] = 0
            for e in range(num_items):
                rank = standing[inst, e]
                size[rank, count[rank]] = weight[inst, e]
                item[rank, count[rank]] = e
                count[rank] += 1
                rank_load[rank] += weight[inst, e]
            target = goal[inst] + np.int64(goal[inst] * slack[k])
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            luck = noise if k > 0 else 0.0
            moved = _repair(size, item, rank_load, standing[inst], target, budget[inst], luck, state | np.uint64(1))
            met = rank_load[_fullest(rank_load)] <= target
            moved = _settle(size, item, rank_load, standing[inst], goal[inst], moved, budget[inst])
            value = max(goal[inst], rank_load[_fullest(rank_load)])
            if best < 0 or value < best or (value == best and moved < best_moved):
                best, best_moved = value, moved
                reached[inst] = rank_load[_fullest(rank_load)]
                for rank in range(num_ranks):
                    for i in range(capacity):
                        rank_of[inst, item[rank, i]] = rank
            if met and first_only:
                break


def rebalance(
    weight: NDArray[np.int64],
    standing: NDArray[np.int64],
    num_ranks: int,
    goal: NDArray[np.int64],
    *,
    budget: NDArray[np.int64] | None = None,
    slack: Sequence[float] = (0.0,),
    noise: float = 0.0,
    first_only: bool = False,
    chosen: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Balance by few exchanges from ``standing`` [L, E].

    Parameters
    ----------
    goal
        int64 [L], the largest rank load wanted; below it only the number of moved items counts.
    budget
        int64 [L], most items that may be moved; default all.
    slack
        Each attempt's first target, as a share above ``goal``.
    noise
        Randomness of all attempts but the first, as a share of the target load.
    first_only
        Stop after the first attempt that met its target.
    chosen
        The instances to work on; default all.

    Returns
    -------
    rank_of, reached
        int64 [L, E] and [L]; instances not chosen stand, with reached 0.
    """
    rank_of = standing.copy()
    reached = np.zeros(len(weight), dtype=np.int64)
    if chosen is None:
        chosen = np.arange(len(weight), dtype=np.int64)
    if budget is None:
        budget = np.full(len(weight), weight.shape[1], dtype=np.int64)
    tried = np.array(slack, dtype=np.float64)
    seed = seed % (1 << 62)

    def work(part: NDArray[np.int64]) -> None:
        move_instances(
            weight, standing, part, goal, budget, tried, noise, first_only, seed, num_ranks, rank_of, reached
        )

    run_in_threads(work, chosen)
    return rank_of, reached


def warmup() -> None:
    """Compile every kernel of this module on tiny arrays."""
    weight = np.array([[5, 4, 3, 1]], dtype=np.int64)
    rebalance(weight, np.array([[0, 0, 1, 1]], dtype=np.int64), 2, np.zeros(1, dtype=np.int64))
