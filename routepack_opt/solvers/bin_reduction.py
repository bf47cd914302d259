"""Bins that some optimal packing certainly has: they are fixed before the search, which then sees fewer items.

Two exchange arguments: a pair that fills a bin exactly can always share one; and an item beside which only one other
fits can always take the longest that fits. The bound of the rest plus the fixed bins is a bound of the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fix_bins(lengths: NDArray[np.int64], cap: int) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Bins fixed without loss, and the items left.

    Parameters
    ----------
    lengths
        int64 [n], decreasing, each <= cap.

    Returns
    -------
    Lists of item positions, one a bin; int64 positions of the items left, increasing.
    """
    alive = np.ones(lengths.size, dtype=bool)
    fixed: list[list[int]] = []
    changed = True
    while changed:
        pairs = _exact_pairs(lengths, np.flatnonzero(alive), cap)
        singles = []
        for pair in pairs:
            alive[pair] = False
        singles = _forced(lengths, alive, cap)
        fixed += pairs + singles
        changed = bool(pairs or singles) and bool(alive.any())
    return fixed, np.flatnonzero(alive)


def _exact_pairs(lengths: NDArray[np.int64], items: NDArray[np.int64], cap: int) -> list[list[int]]:
    """Disjoint pairs whose lengths sum to the capacity: two pointers from both ends."""
    pairs, low, high = [], 0, items.size - 1
    size = lengths[items].tolist()
    while low < high:
        total = size[low] + size[high]
        if total == cap:
            pairs.append([int(items[low]), int(items[high])])
            low, high = low + 1, high - 1
        elif total > cap:
            low += 1
        else:
            high -= 1
    return pairs


def _forced(lengths: NDArray[np.int64], alive: NDArray[np.bool_], cap: int) -> list[list[int]]:
    """Longest items that leave room for at most one other; ``alive`` is updated."""
    bins: list[list[int]] = []
    items = np.flatnonzero(alive).tolist()
    while items:
        first = items[0]
        room = cap - int(lengths[first])
        if len(items) >= 3 and int(lengths[items[-1]] + lengths[items[-2]]) <= room:
            break
        items.pop(0)
        chosen = [first]
        at = int(np.searchsorted(-lengths[items], -room)) if items else 0
        if at < len(items):
            chosen.append(items.pop(at))
        alive[chosen] = False
        bins.append(chosen)
    return bins
