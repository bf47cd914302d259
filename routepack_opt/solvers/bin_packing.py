"""Bin-packing heuristics: first/best fit, balanced dealing, and subset filling (minimum bin slack).

All kernels work on items sorted by decreasing length and return ``bin_of``, int64 [n]. A second resource, the number of
samples an item stands for, is limited by ``max_count`` per bin. Minimum bin slack is the heuristic MBS' of Gupta and Ho
(1999) as improved by Fleszar and Hindi (2002): each bin starts with the largest remaining item and is filled by
depth-first search for the subset that leaves least room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_FIT, BEST_FIT, LEAST_LOADED = 0, 1, 2
NO_LIMIT = 2**40  # far above any sample count, and sums of it stay far below int64


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _next_random(state: Any) -> Any:
    """xorshift64*: 31 random bits; ``state`` is uint64 [1], never 0."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fit(lengths: Any, counts: Any, cap: int, max_count: int, max_bins: int, rule: int, bin_of: Any) -> int:
    """Place items in the given order; bins used, or -1 when an item fits nowhere."""
    load = np.zeros(max_bins, np.int64)
    held = np.zeros(max_bins, np.int64)
    used = max_bins if rule == LEAST_LOADED else 0
    for i in range(lengths.shape[0]):
        chosen, chosen_load = -1, -1
        for b in range(used):
            if load[b] + lengths[i] > cap or held[b] + counts[i] > max_count:
                continue
            if rule == FIRST_FIT:
                chosen = b
                break
            if chosen < 0 or (load[b] > chosen_load if rule == BEST_FIT else load[b] < chosen_load):
                chosen, chosen_load = b, load[b]
        if chosen < 0:
            if used == max_bins or lengths[i] > cap or counts[i] > max_count:
                return -1
            chosen = used
            used += 1
        bin_of[i] = chosen
        load[chosen] += lengths[i]
        held[chosen] += counts[i]
    return used


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _alive_from(following: Any, i: int) -> int:
    """First item at or after i that is still unpacked (path-halving over ``following``)."""
    while following[i] != i:
        following[i] = following[following[i]]
        i = following[i]
    return i


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _first_fitting(lengths: Any, start: int, room: int) -> int:
    """First index >= start with length <= room in a decreasing list."""
    low, high = start, lengths.shape[0]
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] > room:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill(
    lengths: Any,
    counts: Any,
    cap: int,
    max_count: int,
    max_bins: int,
    goal: int,
    max_nodes: int,
    skip: int,
    state: Any,
    bin_of: Any,
) -> int:
    """Minimum bin slack; bins used, or -1 when more than ``max_bins`` are needed.

    ``skip`` / 2^31 is the chance that the search passes over an item where it would take it: different random states
    then give different packings.
    """
    n = lengths.shape[0]
    following = np.empty(n + 2, np.int64)
    for i in range(n + 2):
        following[i] = i
    chosen = np.zeros(n + 1, np.int64)
    best = np.zeros(n + 1, np.int64)
    volume = 0
    for i in range(n):
        volume += lengths[i]
    packed = 0
    for b in range(max_bins):
        first = _alive_from(following, 0)
        if first >= n:
            return b
        # Slack this bin may leave if the rest is to fit: half the average, so that later bins are not starved.
        tolerance = 0
        if b < goal:
            tolerance = max((goal - b) * cap - (volume - packed), 0) // (2 * (goal - b))
        following[first] = first + 1
        depth, num_best = 0, 0
        room, room_count = cap - lengths[first], max_count - counts[first]
        best_room = room
        nodes = 0
        i = _alive_from(following, _first_fitting(lengths, first + 1, room))
        while nodes < max_nodes and best_room > tolerance:
            nodes += 1
            if i < n and (counts[i] > room_count or (skip > 0 and _next_random(state) < skip)):
                i = _alive_from(following, i + 1)
                continue
            if i < n:
                chosen[depth] = i
                depth += 1
                room -= lengths[i]
                room_count -= counts[i]
                if room < best_room:
                    best_room, num_best = room, depth
                    for k in range(depth):
                        best[k] = chosen[k]
                i = _alive_from(following, _first_fitting(lengths, i + 1, room))
                continue
            if depth == 0:
                break
            depth -= 1
            last = chosen[depth]
            room += lengths[last]
            room_count += counts[last]
            # The next shorter item: equal ones would repeat the same subsets.
            shorter = _first_fitting(lengths, last + 1, lengths[last] - 1)
            i = _alive_from(following, shorter)
        bin_of[first] = b
        packed += cap - best_room
        for k in range(num_best):
            bin_of[best[k]] = b
            following[best[k]] = best[k] + 1
    return max_bins if _alive_from(following, 0) >= n else -1


def random_state(rng: np.random.Generator) -> NDArray[np.uint64]:
    """A kernel random state, uint64 [1], drawn from a numpy generator."""
    return rng.integers(1, 2**63, size=1).astype(np.uint64)


def fit(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    *,
    max_bins: int,
    max_count: int = NO_LIMIT,
    rule: int = FIRST_FIT,
) -> NDArray[np.int64] | None:
    """Put the items, in the order given, into bins by a rule.

    Parameters
    ----------
    lengths, counts
        int64 [n], in the order of placement.
    rule
        FIRST_FIT, BEST_FIT (fullest bin that has room) or LEAST_LOADED (emptiest of all ``max_bins``).

    Returns
    -------
    int64 [n] bin of each item, or None when ``max_bins`` are not enough.
    """
    bin_of = np.zeros(lengths.size, dtype=np.int64)
    return bin_of if _fit(lengths, counts, cap, max_count, max_bins, rule, bin_of) >= 0 else None


def fill(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    *,
    max_bins: int,
    goal: int | None = None,
    max_count: int = NO_LIMIT,
    max_nodes: int = 2000,
    skip: float = 0.0,
    rng: np.random.Generator,
) -> NDArray[np.int64] | None:
    """Minimum bin slack with at most ``max_nodes`` search steps a bin; items must be in decreasing length.

    A bin is closed early when its slack is so small that ``goal`` bins (default ``max_bins``) are still within reach.
    ``skip`` is the chance of passing over an item (0 is the deterministic heuristic).
    """
    bin_of = np.zeros(lengths.size, dtype=np.int64)
    state = random_state(rng)
    chance = int(skip * 2**31)
    used = _fill(
        lengths, counts, cap, max_count, max_bins, max_bins if goal is None else goal, max_nodes, chance, state, bin_of
    )
    return bin_of if used >= 0 else None


def level(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    *,
    num_bins: int,
    max_count: int,
    max_steps: int = 400,
) -> NDArray[np.int64] | None:
    """Pack where ``max_count`` binds: deal by count first, then swap items out of the fullest bin until all fit.

    Parameters
    ----------
    lengths, counts
        int64 [n] in decreasing length.

    Returns
    -------
    int64 [n], or None when the swaps get stuck over the capacity.
    """
    total = int(lengths.sum())
    bin_of = fit(lengths, counts, total, max_bins=num_bins, max_count=max_count, rule=LEAST_LOADED)
    if bin_of is None or total > num_bins * cap:
        return None
    load = np.bincount(bin_of, lengths, num_bins).astype(np.int64)
    held = np.bincount(bin_of, counts, num_bins).astype(np.int64)
    for _ in range(max_steps):
        full = int(np.argmax(load))
        if load[full] <= cap:
            return bin_of
        mine = np.flatnonzero(bin_of == full)
        drop = lengths[mine][:, None] - lengths[None, :]
        more = counts[mine][:, None] - counts[None, :]
        worst = np.maximum(load[full] - drop, load[bin_of][None, :] + drop)
        legal = (held[bin_of][None, :] + more <= max_count) & (held[full] - more <= max_count)
        worst = np.where(legal & (bin_of != full)[None, :], worst, load[full])
        i, j = divmod(int(np.argmin(worst)), lengths.size)
        if worst[i, j] >= load[full]:
            return None
        other = int(bin_of[j])
        for values, change in ((load, drop[i, j]), (held, more[i, j])):
            values[full] -= change
            values[other] += change
        bin_of[mine[i]], bin_of[j] = other, full
    return None


def warmup() -> None:
    """Compile every kernel of this module."""
    lengths = np.array([5, 3, 2], dtype=np.int64)
    counts = np.ones(3, dtype=np.int64)
    fit(lengths, counts, 7, max_bins=3)
    fill(lengths, counts, 7, max_bins=3, rng=np.random.default_rng(0))
