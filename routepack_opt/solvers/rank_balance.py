"""Even out how many samples each rank holds, without breaking bin capacities.

Bin b belongs to rank ``b % num_ranks``. Three moves bring the fullest and the emptiest ranks together: two whole bins
change places, an item moves, two items of a bin change places with one. Plain numpy: a window needs few such moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_PAIRS = 256  # item pairs looked at per rank pair in the two-for-one move
MAX_ITEMS = 64  # of the shortest items of the fuller rank


@dataclass
class _State:
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    bin_of: NDArray[np.int64]
    load: NDArray[np.int64]
    held: NDArray[np.int64]
    size: NDArray[np.int64]
    cap: int
    max_count: int
    num_ranks: int

    def relocate(self, i: int, target: int) -> None:
        source = self.bin_of[i]
        for b, sign in ((source, -1), (target, 1)):
            self.load[b] += sign * self.lengths[i]
            self.held[b] += sign * self.counts[i]
            self.size[b] += sign
        self.bin_of[i] = target

    def bins(self, rank: int) -> NDArray[np.int64]:
        return np.arange(rank, self.load.size, self.num_ranks)

    def items(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.bin_of % self.num_ranks == rank)


def balance_ranks(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    bin_of: NDArray[np.int64],
    *,
    cap: int,
    max_count: int,
    num_ranks: int,
    num_bins: int,
    max_tries: int | None = None,
) -> int:
    """Even out the samples per rank, in place; returns the spread that is left (1 or 0 when it succeeded).

    Parameters
    ----------
    lengths, counts
        int64 [n] in decreasing length; lengths may exceed ``cap``, such items stay alone in their bin.
    bin_of
        int64 [n], bin b belongs to rank ``b % num_ranks``.
    max_tries
        Stop after looking at this many pairs of ranks, for callers to whom even counts are only a wish; None: until
        nothing helps.
    """
    load = np.bincount(bin_of, lengths, num_bins).astype(np.int64)
    held = np.bincount(bin_of, counts, num_bins).astype(np.int64)
    size = np.bincount(bin_of, minlength=num_bins).astype(np.int64)
    state = _State(lengths, counts, bin_of, load, held, size, cap, max_count, num_ranks)
    total = held.reshape(-1, num_ranks).sum(axis=0)
    tries_left = 2**62 if max_tries is None else max_tries
    while total.max() - total.min() > 1 and tries_left > 0:
        moved, tries = _one_move(state, total, tries_left)
        tries_left -= tries
        if moved is None:
            break
        high, low, change = moved
        total[high] -= change
        total[low] += change
    return int(total.max() - total.min())


def _one_move(state: _State, total: NDArray[np.int64], max_tries: int) -> tuple[tuple[int, int, int] | None, int]:
    """The first move between the fullest rank and another, else between another and the emptiest; pairs looked at."""
    order = np.argsort(total, kind="stable")
    highest, lowest = int(order[-1]), int(order[0])
    pairs = [(highest, int(d)) for d in order[:-1]] + [(int(d), lowest) for d in order[-2:0:-1]]
    for tries, (high, low) in enumerate(pairs[:max_tries], 1):
        gap = int(total[high] - total[low])
        if gap < 2:
            continue
        change = (
            _swap_bins(state, high, low, gap)
            or _move_item(state, high, low, gap)
            or _two_for_one(state, high, low, gap)
        )
        if change:
            return (high, low, change), tries
    return None, len(pairs)


def _swap_bins(state: _State, high: int, low: int, gap: int) -> int:
    mine, theirs = state.bins(high), state.bins(low)
    change = state.held[mine][:, None] - state.held[theirs][None, :]
    # The best change is half the gap: it evens the two ranks out at once.
    value = np.where((change > 0) & (change < gap), -np.abs(2 * change - gap), -gap)
    at = int(np.argmax(value))
    if value.flat[at] <= -gap:
        return 0
    a, b = mine[at // theirs.size], theirs[at % theirs.size]
    in_a, in_b = state.bin_of == a, state.bin_of == b
    state.bin_of[in_a], state.bin_of[in_b] = b, a
    for values in (state.load, state.held, state.size):
        values[[a, b]] = values[[b, a]]
    return int(change.flat[at])


def _move_item(state: _State, high: int, low: int, gap: int) -> int:
    items = state.items(high)
    items = items[(state.size[state.bin_of[items]] > 1) & (state.counts[items] < gap)]
    theirs = state.bins(low)
    if not items.size:
        return 0
    fits = state.lengths[items][:, None] + state.load[theirs][None, :] <= state.cap
    fits &= state.counts[items][:, None] + state.held[theirs][None, :] <= state.max_count
    found = np.flatnonzero(fits)
    if not found.size:
        return 0
    at = int(found[0])  # the longest that fits: short ones stay to fill gaps
    i, b = items[at // theirs.size], theirs[at % theirs.size]
    state.relocate(int(i), int(b))
    return int(state.counts[i])


def _two_for_one(state: _State, high: int, low: int, gap: int) -> int:
    items, others = state.items(high)[-MAX_ITEMS:], state.items(low)
    bins = state.bin_of[items]
    first, second = np.nonzero(np.triu(bins[:, None] == bins[None, :], 1))
    if not first.size or not others.size:
        return 0
    # Pairs from the short end: they are the ones that find room.
    i, j = items[first[-MAX_PAIRS:]], items[second[-MAX_PAIRS:]]
    pair, both, source = state.lengths[i] + state.lengths[j], state.counts[i] + state.counts[j], state.bin_of[i]
    target = state.bin_of[others]
    more = pair[:, None] - state.lengths[others][None, :]
    change = both[:, None] - state.counts[others][None, :]
    good = (change > 0) & (change < gap) & (state.load[target][None, :] + more <= state.cap)
    good &= (state.load[source][:, None] - more <= state.cap) & (
        state.held[target][None, :] + change <= state.max_count
    )
    found = np.flatnonzero(good)
    if not found.size:
        return 0
    p, q = divmod(int(found[0]), others.size)
    k, a, b = int(others[q]), int(source[p]), int(target[q])
    state.relocate(int(i[p]), b)
    state.relocate(int(j[p]), b)
    state.relocate(k, a)
    return int(change[p, q])
