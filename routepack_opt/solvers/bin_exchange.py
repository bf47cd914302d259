"""Bin packing into a given number of bins by exchanges with a pool of unpacked items.

After Buljubasic and Vasquez, *Consistent neighborhood search for one-dimensional bin packing* (2016): two bins stay
open, their items form the pool. A tabu search swaps up to two items of a bin with up to two of the pool so that the
bins hold as much as possible; when it stalls, exchanges between bins push loads apart (largest sum of squares), which
gathers scattered slack. Done when the pool fits into the two open bins.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from routepack_opt.solvers import bin_packing
from routepack_opt.solvers.bin_packing import _next_random, random_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPEN_BINS = 2
MAX_POOL = 48  # items whose pairs are tried per step; a larger pool offers its longest
STALL = 200  # tabu steps without a better pool before the bins are shaken
MAX_ITEMS = 512  # largest bin (in items) the search handles
SHAKE_PAIRS = 4000  # pairs of bins looked at per shake


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _split_pool(pool: Any, num_pool: int, lengths: Any, counts: Any, cap: int, max_count: int, side: Any) -> bool:
    """Can the pool fill two bins? Fills ``side`` with 0 or 1; depth-first over the pool, longest first, bounded."""
    total, total_count = 0, 0
    for p in range(num_pool):
        total += lengths[pool[p]]
        total_count += counts[pool[p]]
        side[p] = 0
    if total > 2 * cap or total_count > 2 * max_count:
        return False
    chosen = np.empty(num_pool + 1, np.int64)
    suffix = np.zeros(num_pool + 1, np.int64)
    for p in range(num_pool - 1, -1, -1):
        suffix[p] = suffix[p + 1] + lengths[pool[p]]
    depth, load, held, p, nodes = 0, 0, 0, 0, 0
    while nodes < 3000:
        nodes += 1
        if load >= total - cap and total_count - held <= max_count:
            for k in range(depth):
                side[chosen[k]] = 1
            return True
        if p < num_pool and load + suffix[p] >= total - cap:
            i = pool[p]
            if load + lengths[i] <= cap and held + counts[i] <= max_count:
                chosen[depth] = p
                depth += 1
                load += lengths[i]
                held += counts[i]
            p += 1
            continue
        if depth == 0:
            return False
        depth -= 1
        p = chosen[depth]
        load -= lengths[pool[p]]
        held -= counts[pool[p]]
        p += 1
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sort_pool(pool: Any, num_pool: int, lengths: Any) -> None:
    for a in range(1, num_pool):
        i = pool[a]
        b = a - 1
        while b >= 0 and lengths[pool[b]] < lengths[i]:
            pool[b + 1] = pool[b]
            b -= 1
        pool[b + 1] = i


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sort_sets(sets: Any, num_sets: int) -> None:
    """Positions by increasing weight into ``sets[3]`` (shell sort: numba's argsort takes over a second to compile)."""
    for s in range(num_sets):
        sets[3, s] = s
    gap = num_sets // 2
    while gap > 0:
        for a in range(gap, num_sets):
            s = sets[3, a]
            b = a - gap
            while b >= 0 and sets[0, sets[3, b]] > sets[0, s]:
                sets[3, b + gap] = sets[3, b]
                b -= gap
            sets[3, b + gap] = s
        gap //= 2


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _shake(
    items: Any, stats: Any, lengths: Any, counts: Any, cap: int, max_count: int, num_pairs: int, state: Any
) -> None:
    """Push the loads of random pairs of bins apart: one or two items of one bin against up to two of the other."""
    num_bins = stats.shape[1]
    widest = items.shape[1]
    for _ in range(num_pairs):
        a, b = _next_random(state) % num_bins, _next_random(state) % num_bins
        if stats[0, a] < stats[0, b]:
            a, b = b, a
        room, room_count = cap - stats[0, a], max_count - stats[1, a]
        if a == b or room == 0 or stats[2, a] + 2 > widest:
            continue
        # a gains i (and maybe j) of b and gives k (or nothing): the largest gain within its room.
        best, best_i, best_j, best_k = 0, -1, -1, -1
        for x in range(stats[2, b]):
            for y in range(x, stats[2, b]):
                i, j = items[b, x], items[b, y]
                gain, more = lengths[i], counts[i]
                if y > x:
                    gain += lengths[j]
                    more += counts[j]
                for z in range(-1, stats[2, a]):
                    net, net_count = gain, more
                    if z >= 0:
                        net -= lengths[items[a, z]]
                        net_count -= counts[items[a, z]]
                    elif stats[2, b] <= 1 + (y > x):
                        continue  # never empties a bin
                    if net > best and net <= room and net_count <= room_count:
                        if stats[1, b] - net_count > max_count:
                            continue
                        best, best_i, best_j, best_k = net, x, y, z
        if best == 0:
            continue
        i, j = items[b, best_i], items[b, best_j]
        two = best_j > best_i
        k = items[a, best_k] if best_k >= 0 else -1
        moved_count = counts[i] + (counts[j] if two else 0) - (counts[k] if k >= 0 else 0)
        if two:
            items[b, best_j] = items[b, stats[2, b] - 1]
            stats[2, b] -= 1
        items[b, best_i] = items[b, stats[2, b] - 1]
        stats[2, b] -= 1
        if k >= 0:
            items[a, best_k] = items[a, stats[2, a] - 1]
            stats[2, a] -= 1
            items[b, stats[2, b]] = k
            stats[2, b] += 1
        items[a, stats[2, a]] = i
        stats[2, a] += 1
        if two:
            items[a, stats[2, a]] = j
            stats[2, a] += 1
        stats[0, a] += best
        stats[0, b] -= best
        stats[1, a] += moved_count
        stats[1, b] -= moved_count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _best_exchange(
    items: Any,
    stats: Any,
    pool: Any,
    num_pool: int,
    lengths: Any,
    counts: Any,
    cap: int,
    max_count: int,
    tabu: Any,
    step: int,
    must_gain: int,
    state: Any,
    sets: Any,
    move: Any,
) -> Any:
    """The exchange that moves most length from the pool into a bin; fills ``move`` = bin, out 1, out 2, in 1, in 2."""
    widest = items.shape[1]
    num_sets = 0
    top = min(num_pool, sets.shape[1] // 64)
    for p in range(top):
        for q in range(p, top):
            sets[0, num_sets] = lengths[pool[p]] + (lengths[pool[q]] if q > p else 0)
            sets[1, num_sets] = p
            sets[2, num_sets] = q
            num_sets += 1
    order = sets[3]
    _sort_sets(sets, num_sets)
    best, ties = np.int64(-(2**62)), 0
    for b in range(stats.shape[1]):
        for x in range(-1, stats[2, b]):
            for y in range(x, stats[2, b]):
                if x < 0 and y >= 0:
                    break
                out, out_count = 0, 0
                blocked = False
                if x >= 0:
                    i = items[b, x]
                    out, out_count = lengths[i], counts[i]
                    blocked = tabu[i] > step
                    if y > x:
                        j = items[b, y]
                        out += lengths[j]
                        out_count += counts[j]
                        blocked = blocked or tabu[j] > step
                room = cap - stats[0, b] + out
                # A bin of this room gains at most its slack: nothing to look for when that is not better.
                if room - out < best or (blocked and room - out <= must_gain):
                    continue
                low, high = 0, num_sets
                while low < high:
                    middle = (low + high) // 2
                    if sets[0, order[middle]] <= room:
                        low = middle + 1
                    else:
                        high = middle
                for at in range(low - 1, max(low - 9, -1), -1):
                    s = order[at]
                    gain = sets[0, s] - out
                    if gain < best:
                        break
                    p, q = sets[1, s], sets[2, s]
                    in_count = counts[pool[p]] + (counts[pool[q]] if q > p else 0)
                    if stats[1, b] - out_count + in_count > max_count or stats[2, b] + 2 > widest:
                        continue
                    if gain <= must_gain and (blocked or tabu[pool[p]] > step or tabu[pool[q]] > step):
                        continue
                    if gain == 0 and x < 0:
                        continue
                    if gain > best:
                        ties = 0
                    ties += 1
                    if _next_random(state) % ties == 0:
                        best = gain
                        move[0], move[1], move[2], move[3], move[4] = b, x, y, p, q
                    break
    return best


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _exchange(
    items: Any,
    stats: Any,
    pool: Any,
    num_pool: int,
    lengths: Any,
    counts: Any,
    cap: int,
    max_count: int,
    num_steps: int,
    stall: int,
    shake_pairs: int,
    state: Any,
    side: Any,
) -> tuple[int, int]:
    """Tabu search in place; (1 when the pool fits two bins, items in the pool)."""
    tabu = np.zeros(lengths.shape[0], np.int64)
    top = min(pool.shape[0], 48)
    sets = np.zeros((4, 64 * top), np.int64)
    move = np.zeros(5, np.int64)
    weight = 0
    for p in range(num_pool):
        weight += lengths[pool[p]]
    best_weight, last_better = weight, 0
    for step in range(1, num_steps + 1):
        _sort_pool(pool, num_pool, lengths)
        if weight <= 2 * cap and _split_pool(pool, num_pool, lengths, counts, cap, max_count, side):
            return 1, num_pool
        if step - last_better > stall:
            _shake(items, stats, lengths, counts, cap, max_count, shake_pairs, state)
            best_weight, last_better = weight, step
        must_gain = weight - best_weight
        gain = _best_exchange(
            items, stats, pool, num_pool, lengths, counts, cap, max_count, tabu, step, must_gain, state, sets, move
        )
        if gain < -cap:
            _shake(items, stats, lengths, counts, cap, max_count, shake_pairs, state)
            last_better = step
            continue
        b, x, y, p, q = move[0], move[1], move[2], move[3], move[4]
        tenure = step + 3 + _next_random(state) % 10
        i = items[b, x] if x >= 0 else -1
        j = items[b, y] if y > x else -1
        first, second = pool[p], pool[q]
        # Higher positions first, so that filling a hole with the last entry never moves the other one.
        if j >= 0:
            items[b, y] = items[b, stats[2, b] - 1]
            stats[2, b] -= 1
        if i >= 0:
            items[b, x] = items[b, stats[2, b] - 1]
            stats[2, b] -= 1
        if q > p:
            pool[q] = pool[num_pool - 1]
            num_pool -= 1
        pool[p] = pool[num_pool - 1]
        num_pool -= 1
        for k in (i, j):
            if k >= 0:
                pool[num_pool] = k
                num_pool += 1
                tabu[k] = tenure
                stats[1, b] -= counts[k]
        for k in (first, second if q > p else -1):
            if k >= 0:
                items[b, stats[2, b]] = k
                stats[2, b] += 1
                tabu[k] = tenure
                stats[1, b] += counts[k]
        stats[0, b] += gain
        weight -= gain
        if weight < best_weight:
            best_weight, last_better = weight, step
    return 0, num_pool


def exchange(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    bin_of: NDArray[np.int64],
    cap: int,
    *,
    num_bins: int,
    max_count: int,
    rng: np.random.Generator,
    time_limit_s: float = float("inf"),
    max_rounds: int = 2**31,
    steps_per_round: int = 500,
) -> NDArray[np.int64] | None:
    """Repair a packing with too many bins into ``num_bins`` bins.

    Parameters
    ----------
    lengths, counts
        int64 [n] in decreasing length.
    bin_of
        int64 [n], any packing; the fullest ``num_bins - 2`` bins are the start, the others' items the pool.
    time_limit_s, max_rounds
        Stop after either; a round is ``steps_per_round`` tabu steps.

    Returns
    -------
    int64 [n] or None when none was found.
    """
    kept = num_bins - OPEN_BINS
    if kept < 1 or lengths.size == 0:
        return None
    start = time.perf_counter()
    load = np.bincount(bin_of, lengths)
    fullest = np.argsort(-load, kind="stable")[:kept]
    widest = min(int(cap // max(int(lengths[-1]), 1)), lengths.size, MAX_ITEMS) + 3
    items = np.full((kept, widest), -1, dtype=np.int64)
    stats = np.zeros((3, kept), dtype=np.int64)
    place = np.full(int(bin_of.max()) + 1, -1, dtype=np.int64)
    place[fullest] = np.arange(fullest.size)
    # Position of every item inside its bin: items sorted by bin, minus where the bin starts.
    by_bin = np.argsort(bin_of, kind="stable")
    size = np.bincount(bin_of)
    position = np.empty(lengths.size, dtype=np.int64)
    position[by_bin] = np.arange(lengths.size) - np.repeat(np.cumsum(size) - size, size)
    home = place[bin_of]
    inside = (home >= 0) & (position < widest - 3)
    items[home[inside], position[inside]] = np.flatnonzero(inside)
    for row, values in enumerate((lengths, counts, np.ones_like(lengths))):
        np.add.at(stats[row], home[inside], values[inside])
    pool = np.zeros(lengths.size + 8, dtype=np.int64)
    num_pool = int((~inside).sum())
    pool[:num_pool] = np.flatnonzero(~inside)
    state = random_state(rng)
    side = np.zeros(pool.size, dtype=np.int64)
    for _ in range(max_rounds):
        done, num_pool = _exchange(
            items,
            stats,
            pool,
            num_pool,
            lengths,
            counts,
            cap,
            max_count,
            steps_per_round,
            STALL,
            SHAKE_PAIRS,
            state,
            side,
        )
        if done:
            found = np.empty(lengths.size, dtype=np.int64)
            filled = np.arange(widest)[None, :] < stats[2][:, None]
            found[items[filled]] = np.nonzero(filled)[0]
            found[pool[:num_pool]] = kept + side[:num_pool]
            return found
        if time.perf_counter() - start > time_limit_s:
            return None
    return None


def fill_and_exchange(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    goal: int,
    *,
    max_count: int,
    rng: np.random.Generator,
    steps: int,
    skip: float,
) -> NDArray[np.int64] | None:
    """Subset filling towards ``goal`` bins, repaired by exchanges; None when the goal was missed."""
    limits: dict[str, Any] = {"max_count": max_count, "rng": rng}
    bin_of = bin_packing.fill(lengths, counts, cap, max_bins=lengths.size, goal=goal, skip=skip, **limits)
    if bin_of is None or int(bin_of.max()) < goal:
        return bin_of
    return exchange(lengths, counts, bin_of, cap, num_bins=goal, max_rounds=1, steps_per_round=steps, **limits)


def warmup() -> None:
    """Compile every kernel of this module."""
    lengths = np.array([6, 6, 5, 5, 4, 4, 3, 3, 2, 2], dtype=np.int64)
    counts = np.ones(10, dtype=np.int64)
    rng = np.random.default_rng(0)
    exchange(lengths, counts, np.arange(10), 10, num_bins=4, max_count=9, rng=rng, max_rounds=1, steps_per_round=20)
