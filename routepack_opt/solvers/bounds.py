"""Lower bounds on the number of bins, each with integer weights that a knapsack check turns into a proof.

Every bound here has one form: a non-negative integer weight per distinct length and the largest weight ``max_cell``
that one bin of capacity C can hold. Then ``ceil(sum of weights / max_cell)`` bins are needed. Volume, the L2 bound
(Martello and Toth 1990), the dual-feasible functions of Fekete and Schepers (2001) and Carlier, Clautiaux and Moukrim
(2007), and the dual prices of column generation only differ in how they choose the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Families of dual-feasible functions, in the order the scan tries them.
_U_ALPHA, _HALF, _STEPS, _CARLIER, _PHI = 0, 1, 2, 3, 4
KINDS = {_U_ALPHA: "l2", _HALF: "l2", _STEPS: "dff", _CARLIER: "dff", _PHI: "dff"}
MAX_PARAMETERS = 256  # parameters tried per family: the scan stays under a millisecond for 2048 lengths
LARGEST_TABLE = 1 << 24  # capacity up to which bins are weighed exactly: 128 MiB a table
MAX_KNAPSACK = 500_000_000  # lengths x cap beyond which the check would take half a second
MAX_STEPS = 64  # largest k of the step functions u^(k); beyond it the steps are finer than the items


@dataclass(frozen=True)
class Certificate:
    """A lower bound on bins that anyone can check with one dynamic program over the capacity.

    Attributes
    ----------
    kind
        "volume", "l2", "dff", "dual" (column-generation prices) or "count" (samples per bin).
    lengths, weights
        int64 [m], distinct lengths and their weights.
    max_cell
        Most weight a bin can hold.
    bins
        ``ceil(total weight / max_cell)``.
    """

    kind: str
    cap: int
    lengths: NDArray[np.int64]
    weights: NDArray[np.int64]
    max_cell: int
    bins: int

    def to_json(self, extra_cells: int = 0) -> dict[str, Any]:
        """The ``certificates.rows`` object of plan.json; ``extra_cells`` are the cells of samples kept alone."""
        table = [[int(x), int(w)] for x, w in zip(self.lengths, self.weights, strict=True)]
        cells = self.bins + extra_cells
        return {"kind": self.kind, "cap": self.cap, "table": table, "max_cell": self.max_cell, "cells": cells}


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _knapsack_max(lengths: Any, counts: Any, weights: Any, sizes: Any, cap: int, levels: int) -> Any:
    """Largest total weight with total length <= cap, total size <= levels, at most ``counts`` of each; exact in int64.

    Without a limit on sizes, sizes are 0 and so is ``levels``.
    """
    best = np.zeros((levels + 1, cap + 1), np.int64)
    other = np.zeros((levels + 1, cap + 1), np.int64)
    for i in range(lengths.shape[0]):
        if weights[i] <= 0 or lengths[i] > cap:
            continue
        left = min(counts[i], cap // lengths[i])
        if sizes[i] > 0:
            left = min(left, levels // sizes[i])
        block = 1
        while left > 0:  # binary splitting of the copies
            take = min(block, left)
            length, weight, size = take * lengths[i], take * weights[i], take * sizes[i]
            # Two arrays instead of one updated in place: without the overlap the loop is vectorised.
            # (Loops rather than slices in every kernel: numba compiles a slice assignment in about a second.)
            for q in range(levels + 1):
                start = length if q >= size else cap + 1
                for c in range(start):
                    other[q, c] = best[q, c]
                for c in range(cap + 1 - start):
                    with_block = best[q - size, c] + weight
                    without = best[q, c + length]
                    other[q, c + length] = with_block if with_block > without else without
            best, other = other, best
            left -= take
            block *= 2
    return best[levels, cap]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _weight(family: int, parameter: int, x: int, cap: int) -> int:
    """The weight of length x; see :func:`_capacity` for what a full bin weighs at most."""
    if family == 0:  # U-alpha: large items fill a bin, items below alpha are ignored
        if x > cap - parameter:
            return cap
        return 0 if x < parameter else x
    if family == 1:  # two items over half never share a bin
        return 1 if 2 * x > cap else 0
    if family == 2:  # Fekete-Schepers u^(k)
        k = parameter
        if ((k + 1) * x) % cap == 0:
            return k * x
        return ((k + 1) * x) // cap * cap
    if family == 3:  # Carlier f2
        if 2 * x > cap:
            return 2 * (cap // parameter - (cap - x) // parameter)
        if 2 * x == cap:
            return cap // parameter
        return 2 * (x // parameter)
    # Fekete-Schepers phi: count the middle items, what is over half takes the places it blocks
    if 2 * x > cap:
        return cap // parameter - (cap - x) // parameter
    return 1 if x >= parameter else 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill_weights(family: int, parameter: int, lengths: Any, cap: int, weights: Any) -> None:
    for i in range(lengths.shape[0]):
        weights[i] = _weight(family, parameter, lengths[i], cap)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _capacity(family: int, parameter: int, cap: int) -> int:
    if family == 0:
        return cap
    if family == 1:
        return 1
    if family == 2:
        return parameter * cap
    if family == 3:
        return 2 * (cap // parameter)
    return cap // parameter


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scan(lengths: Any, counts: Any, cap: int, parameters: Any, max_steps: int) -> tuple[int, int, int]:
    """(bins, family, parameter) of the best dual-feasible function; the earliest among equals."""
    best_bins, best_family, best_parameter = 0, 0, 1
    for family in range(5):
        num = parameters.shape[0]
        if family == 1:
            num = 1
        elif family == 2:
            num = max_steps
        for j in range(num):
            parameter = j + 1 if family == 2 else parameters[j]
            total = 0
            for i in range(lengths.shape[0]):
                total += counts[i] * _weight(family, parameter, lengths[i], cap)
            bound = _capacity(family, parameter, cap)
            bins = (total + bound - 1) // bound
            if bins > best_bins:
                best_bins, best_family, best_parameter = bins, family, parameter
    return best_bins, best_family, best_parameter


def knapsack_max(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    weights: NDArray[np.int64],
    cap: int,
    *,
    sizes: NDArray[np.int64] | None = None,
    max_size: int = 0,
) -> int:
    """Largest weight of a bin: bounded knapsack by dynamic programming over the capacity.

    Exact, but where the table would take gigabytes: then an upper bound, no token weighing more than the densest.

    Parameters
    ----------
    lengths, counts, weights
        int64 [m], lengths >= 1.
    sizes, max_size
        int64 [m] samples of each item and the most of a bin; None: no limit.
    """
    if sizes is None:
        sizes, max_size = np.zeros_like(lengths), 0
    unit = max(int(np.gcd.reduce(lengths)), 1) if lengths.size else 1  # padded lengths share a factor
    lengths, cap = lengths // unit, cap // unit
    room = min(cap, int((lengths * counts).sum()))
    if (room + 1) * (max_size + 1) > LARGEST_TABLE:
        densest = max(int(w) * room // int(length) for length, w in zip(lengths, weights, strict=True))
        return min(densest, int((counts * weights).sum()))
    return int(_knapsack_max(lengths, counts, weights, sizes, room, max_size))


def certify(
    kind: str,
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    weights: NDArray[np.int64],
    cap: int,
    *,
    sizes: NDArray[np.int64] | None = None,
    max_size: int = 0,
) -> Certificate:
    """Turn any non-negative integer weights into a checked certificate; weak weights only give a weak bound."""
    heaviest = max(knapsack_max(lengths, counts, weights, cap, sizes=sizes, max_size=max_size), 1)
    total = int((counts * weights).sum())
    return Certificate(kind, cap, lengths, weights, heaviest, -(-total // heaviest))


def volume_bound(lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int) -> Certificate:
    """``ceil(total length / cap)``: the weight is the length, and no bin holds more than its capacity."""
    total = int((lengths * counts).sum())
    return Certificate("volume", cap, lengths, lengths, cap, -(-total // cap))


def fill_bound(lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int) -> Certificate:
    """The volume bound with the fullest bin the lengths can make (even lengths never fill an odd capacity)."""
    return certify("volume", lengths, counts, lengths, cap)


def function_bound(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int, *, above: int = -1
) -> Certificate | None:
    """Best of the L2 bound and the dual-feasible functions, re-proved by the knapsack; None if not over ``above``.

    At most 256 parameters a family are tried, spread over the lengths up to half the capacity.
    """
    if int((lengths * counts).sum()) <= cap:
        return volume_bound(lengths, counts, cap)
    small = lengths[2 * lengths <= cap]
    if small.size > MAX_PARAMETERS:
        small = small[np.linspace(0, small.size - 1, MAX_PARAMETERS).astype(np.int64)]
    parameters = np.unique(np.concatenate((small, np.array([max(cap // 3, 1), max(cap // 4, 1)], dtype=np.int64))))
    if lengths.size * min(cap, int((lengths * counts).sum())) > MAX_KNAPSACK:
        return _half_bound(lengths, counts, cap, above)
    bins, family, parameter = _scan(lengths, counts, cap, parameters, min(MAX_STEPS, max(cap - 1, 1)))
    if bins <= above:
        return None
    weights = np.empty_like(lengths)
    _fill_weights(family, parameter, lengths, cap, weights)
    return certify(KINDS[int(family)], lengths, counts, weights, cap)


def _half_bound(lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int, above: int) -> Certificate | None:
    """One bin for every item over half the capacity: needs no table, however large the capacity."""
    weights = (lengths > cap // 2).astype(np.int64)
    bins = int((counts * weights).sum())
    return Certificate("l2", cap, lengths, weights, 1, bins) if bins > above else None


def warmup() -> None:
    """Compile every kernel of this module."""
    lengths = np.array([2, 3, 5], dtype=np.int64)
    counts = np.array([1, 2, 1], dtype=np.int64)
    function_bound(lengths, counts, 7)
