"""Dynamic programming over all subsets of a few items: exact partitions, 3^n steps a convolution.

Sets are bit masks; a table holds one value for each of the 2^n sets, infinity where the set is not allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ITEMS = 17  # 3^17 = 1.3e8 steps, a few tenths of a second


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _convolve(rest: Any, part: Any, take_max: bool, first_in_part: bool, start: int, out: Any) -> None:
    for whole in range(start, out.shape[0]):
        kept = whole & -whole if first_in_part else 0  # the lowest item stays in ``part``: halves the work
        free = whole ^ kept
        best = np.inf
        inner = free
        while True:  # every subset of ``free``
            a = part[inner | kept]
            b = rest[free ^ inner]
            value = max(a, b) if take_max else a + b
            best = min(best, value)
            if inner == 0:
                break
            inner = (inner - 1) & free
        out[whole] = best


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pair_stages(stages: Any, out: Any) -> None:
    """out[S] = least sum over stages of max(stage[T], stage[S - T]) over splits of S."""
    for whole in range(1, out.shape[0]):
        kept = whole & -whole
        free = whole ^ kept
        best = np.inf
        inner = free
        while inner != 0:
            inner = (inner - 1) & free
            value = 0.0
            for s in range(stages.shape[1]):
                value += max(stages[inner | kept, s], stages[free ^ inner, s])
            best = min(best, value)
        out[whole] = best


def subset_sums(values: NDArray[Any]) -> NDArray[Any]:
    """[2^n, ...], sum over the items of every set of values [n, ...]."""
    result = np.zeros((1, *values.shape[1:]), dtype=values.dtype)
    for value in values:
        result = np.concatenate((result, result + value))
    return result


def convolve(
    rest: NDArray[np.float64],
    part: NDArray[np.float64],
    *,
    largest: bool = False,
    alike: bool = False,
    only_full: bool = False,
) -> NDArray[np.float64]:
    """Table of the best split of every set into one of ``part`` and one of ``rest``: least sum, or least maximum.

    ``alike`` promises that ``rest`` is built of sets like ``part``, in any order: then the lowest item may be taken to
    be in ``part``. With ``only_full`` the table holds the set of all items and infinity elsewhere: 2^n steps.
    """
    out = np.full(part.size, np.inf)
    _convolve(rest, part, largest, alike, part.size - 1 if only_full else 1, out)
    return out


def pair_stages(stages: NDArray[np.float64]) -> NDArray[np.float64]:
    """Table of the best split of every set into two cells: stages [2^n, S], each stage pays its slower cell."""
    out = np.full(stages.shape[0], np.inf)
    _pair_stages(np.ascontiguousarray(stages), out)
    return out


def split_of(
    rest: NDArray[np.float64], part: NDArray[np.float64], whole: int, *, largest: bool = False
) -> tuple[int, int]:
    """(set of ``part``, set of ``rest``) that reach the best value of :func:`convolve` at ``whole``."""
    inner = np.arange(part.size)
    inner = inner[(inner & ~whole) == 0]
    a, b = part[inner], rest[whole ^ inner]
    k = int(np.argmin(np.maximum(a, b) if largest else a + b))
    return int(inner[k]), int(whole ^ inner[k])


def pair_split_of(stages: NDArray[np.float64], whole: int) -> tuple[int, int]:
    """The two sets that reach the best value of :func:`pair_stages` at ``whole``."""
    inner = np.arange(stages.shape[0])
    inner = inner[(inner & ~whole) == 0]
    k = int(np.argmin(np.maximum(stages[inner], stages[whole ^ inner]).sum(axis=1)))
    return int(inner[k]), int(whole ^ inner[k])


def warmup() -> None:
    """Compile all kernels, or load them from the disk cache."""
    table = np.zeros(2)
    convolve(table, table)
    pair_stages(np.zeros((2, 1)))
