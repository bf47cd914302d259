"""All patterns that a packing into ``goal`` bins could use, and the exact decision over them.

With integer weights of which a bin holds at most W and the items T in all, ``goal`` bins can waste ``goal * W - T``
weight together, hence each pattern weighs at least ``W - (goal * W - T)``. Where column generation leaves almost no
gap, a few hundred patterns remain, and a mixed-integer program over them settles the question: reduced-cost fixing
taken to its end. Only patterns to which nothing can be added are listed; covering constraints make up for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from routepack_opt.solvers.pricing import Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_PATTERNS = 20_000  # beyond this the mixed-integer program does not finish in a minute
MAX_NODES = 5_000_000  # search nodes, about a second


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _suffix_best(lengths: Any, counts: Any, weights: Any, cap: int, best: Any) -> None:
    """best[k, c]: most weight of types k.. within length c; ``best[m]`` is 0."""
    for k in range(lengths.shape[0] - 1, -1, -1):
        for c in range(cap + 1):
            most = best[k + 1, c]
            for a in range(1, min(counts[k], c // lengths[k]) + 1):
                most = max(most, best[k + 1, c - a * lengths[k]] + a * weights[k])
            best[k, c] = most


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _enumerate(
    lengths: Any,
    counts: Any,
    weights: Any,
    cap: int,
    least: int,
    max_nodes: int,
    best: Any,
    copies: Any,
    starts: Any,
    index: Any,
    value: Any,
) -> Any:
    """Depth-first over types in order, most copies first; patterns written, or -1 when a limit is hit."""
    m = lengths.shape[0]
    num, k, room, weight, nodes = 0, 0, cap, 0, 0
    while nodes < max_nodes:
        if k < m and weight + best[k, room] >= least:
            take = min(counts[k], room // lengths[k])
            copies[k] = take
            room -= take * lengths[k]
            weight += take * weights[k]
            k += 1
            nodes += 1
            continue
        if k == m and weight >= least:
            maximal = True
            for j in range(m - 1, -1, -1):
                if lengths[j] > room:
                    break
                if copies[j] < counts[j]:
                    maximal = False
                    break
            if maximal:
                end = starts[num]
                if num + 1 == starts.shape[0] or end + m > index.shape[0]:
                    return -1
                for j in range(m):
                    if copies[j] > 0:
                        index[end] = j
                        value[end] = copies[j]
                        end += 1
                num += 1
                starts[num] = end
        k -= 1
        while k >= 0 and copies[k] == 0:
            k -= 1
        if k < 0:
            return num
        copies[k] -= 1
        room += lengths[k]
        weight -= weights[k]
        k += 1
    return -1


def enumerate_patterns(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    weights: NDArray[np.int64],
    cap: int,
    *,
    max_cell: int,
    goal: int,
) -> Columns | None:
    """Every maximal pattern of a packing into ``goal`` bins; None when there are too many.

    Parameters
    ----------
    lengths, counts, weights
        int64 [m], lengths distinct and decreasing; weights as in a certificate.
    max_cell
        Most weight of a bin.
    """
    m = lengths.size
    least = max_cell - (goal * max_cell - int((weights * counts).sum()))
    best = np.zeros((m + 1, cap + 1), dtype=np.int64)
    _suffix_best(lengths, counts, weights, cap, best)
    starts = np.zeros(MAX_PATTERNS + 1, dtype=np.int64)
    longest = min(int(cap // lengths[-1]), m)
    index = np.zeros(MAX_PATTERNS * min(longest, 12) + m, dtype=np.int64)
    value = np.zeros(index.size)
    copies = np.zeros(m, dtype=np.int64)
    num = int(_enumerate(lengths, counts, weights, cap, least, MAX_NODES, best, copies, starts, index, value))
    if num < 0:
        return None
    stop = int(starts[num])
    return Columns(starts[: num + 1], index[:stop], value[:stop])


def warmup() -> None:
    """Compile every kernel of this module."""
    lengths = np.array([5, 3, 2], dtype=np.int64)
    enumerate_patterns(lengths, np.array([1, 2, 1], dtype=np.int64), lengths, 7, max_cell=7, goal=2)
