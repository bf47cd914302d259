"""Pricing for bin-packing column generation: a bounded knapsack that returns many patterns at once.

Copies of an item type enter as binary blocks (1, 2, 4, ... copies), so every pattern respects the number of copies. One
table over the capacity gives, for every block k, the best pattern whose last block is k: as many good patterns as there
are blocks, each around another item, for the price of one knapsack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TABLE = 200_000_000  # bytes of the decision table; larger problems are refused
EPSILON = 1e-9  # a pattern improves when its value exceeds 1 by more than this


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill_table(
    lengths: Any, values: Any, sizes: Any, cap: int, levels: int, best: Any, other: Any, take: Any, last: Any
) -> Any:
    """take[k, q, c]: does the best pattern of blocks 0..k within (q, c) use k; last[k]: best that ends in k."""
    for q in range(levels + 1):
        for c in range(cap + 1):
            best[q, c] = 0.0
    for k in range(lengths.shape[0]):
        length, value, size = lengths[k], values[k], sizes[k]
        last[k] = value + best[levels - size, cap - length]
        for q in range(levels + 1):
            start = length if q >= size and value > 0.0 else cap + 1
            for c in range(start):
                other[q, c] = best[q, c]
                take[k, q, c] = 0
            for c in range(cap + 1 - start):
                with_block = best[q - size, c] + value
                without = best[q, c + length]
                better = with_block > without
                other[q, c + length] = with_block if better else without
                take[k, q, c + length] = better
        best, other = other, best
    return best[levels, cap]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _collect(
    order: Any,
    lengths: Any,
    types: Any,
    copies: Any,
    sizes: Any,
    take: Any,
    prices: Any,
    cap: int,
    levels: int,
    max_columns: int,
    max_use: int,
    used: Any,
    starts: Any,
    index: Any,
    value: Any,
) -> int:
    """Read patterns off the table for the blocks in ``order``; number of columns written (CSR)."""
    num = 0
    starts[0] = 0
    for at in range(order.shape[0]):
        if num == max_columns:
            break
        k = order[at]
        begin = starts[num]
        end = begin
        room, level = cap, levels
        total = 0.0
        crowded = False
        j = k
        while j >= 0:
            if j == k or take[j, level, room]:
                room -= lengths[j]
                level -= sizes[j]
                t = types[j]
                total += prices[t] * copies[j]
                crowded = crowded or used[t] >= max_use
                if end > begin and index[end - 1] == t:
                    value[end - 1] += copies[j]
                else:
                    index[end] = t
                    value[end] = copies[j]
                    end += 1
            j -= 1
        if crowded or total <= 1.0 + 1e-9:
            continue
        for e in range(begin, end):
            used[index[e]] += 1
        num += 1
        starts[num] = end
    return num


@dataclass(frozen=True)
class Columns:
    """Compressed patterns: column j holds ``value`` copies of the types ``index`` at ``starts[j]:starts[j + 1]``."""

    starts: NDArray[np.int64]
    index: NDArray[np.int64]
    value: NDArray[np.float64]

    @property
    def num(self) -> int:
        """Number of columns."""
        return self.starts.size - 1


class Pricer:
    """Bounded knapsack over the types of one bin-packing problem.

    Parameters
    ----------
    lengths
        int64 [m], distinct, decreasing, each <= cap.
    cap
        Bin capacity.
    sizes, max_size
        int64 [m] samples of an item of each type and the most of a bin; None: no limit.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
        cap: int,
        *,
        sizes: NDArray[np.int64] | None = None,
        max_size: int = 0,
    ) -> None:
        """Allocate the table once, for the largest counts."""
        self.cap = cap
        self.lengths = lengths
        self.levels = 0 if sizes is None else max_size
        self.sizes = np.zeros_like(lengths) if sizes is None else sizes
        self.set_counts(counts)
        shape = (self.levels + 1, cap + 1)
        self._take = np.empty((self.block_types.size, *shape), dtype=np.uint8)
        self._last = np.empty(self.block_types.size)
        self._best = np.empty(shape)
        self._other = np.empty(shape)

    @staticmethod
    def table_size(lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int, max_size: int = 0) -> int:
        """Bytes the table would take (a little more than it does)."""
        copies = np.minimum(counts, cap // lengths)
        return int(np.ceil(np.log2(copies + 1)).sum()) * (cap + 1) * (max_size + 1)

    def set_counts(self, counts: NDArray[np.int64]) -> None:
        """Copies of each type that a pattern may use; never more than at construction."""
        most = np.minimum(counts, self.cap // self.lengths)
        if self.levels:
            most = np.minimum(most, self.levels // self.sizes)
        types, copies = [], []
        for t, left in enumerate(most.tolist()):
            block = 1
            while left > 0:
                take = min(block, left)
                types.append(t)
                copies.append(take)
                left -= take
                block *= 2
        self.block_types = np.array(types, dtype=np.int64)
        self.block_copies = np.array(copies, dtype=np.int64)
        self.block_lengths = self.lengths[self.block_types] * self.block_copies
        self.block_sizes = self.sizes[self.block_types] * self.block_copies

    def price(self, prices: NDArray[np.float64]) -> float:
        """Largest value of a pattern under ``prices`` [m]; fills the table that :meth:`columns` reads."""
        num = self.block_types.size
        values = prices[self.block_types] * self.block_copies
        take, last = self._take[:num], self._last[:num]
        best, other = self._best, self._other
        blocks = (self.block_lengths, values, self.block_sizes)
        return float(_fill_table(*blocks, self.cap, self.levels, best, other, take, last))

    def columns(self, prices: NDArray[np.float64], *, max_columns: int, max_use: int) -> Columns:
        """Patterns of the last table worth more than 1 under ``prices``, each type in at most ``max_use`` of them."""
        num = self.block_types.size
        last = self._last[:num]
        found = np.flatnonzero(last > 1.0 + EPSILON)
        order = found[np.argsort(-last[found], kind="stable")]
        longest = int(self.cap // max(int(self.lengths[-1]), 1)) + 1
        size = min(longest, num) * (max_columns + 1)
        starts = np.zeros(max_columns + 1, dtype=np.int64)
        index, value = np.empty(size, dtype=np.int64), np.empty(size)
        used = np.zeros(self.lengths.size, dtype=np.int64)
        written = _collect(
            order,
            self.block_lengths,
            self.block_types,
            self.block_copies,
            self.block_sizes,
            self._take[:num],
            prices,
            self.cap,
            self.levels,
            max_columns,
            max_use,
            used,
            starts,
            index,
            value,
        )
        stop = int(starts[written])
        return Columns(starts[: written + 1], index[:stop], value[:stop])


def warmup() -> None:
    """Compile every kernel of this module."""
    pricer = Pricer(np.array([5, 3, 2], dtype=np.int64), np.array([1, 2, 1], dtype=np.int64), 7)
    prices = np.array([0.8, 0.5, 0.3])
    pricer.price(prices)
    pricer.columns(prices, max_columns=4, max_use=4)
