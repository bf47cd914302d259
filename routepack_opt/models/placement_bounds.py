"""Integer lower bounds on the largest EP-rank load, valid for every placement with H experts a rank.

Notation: s[0] >= s[1] >= ... are the loads of one layer in falling order, P ranks, H = E / P experts a rank,
small(k) the sum of the k smallest loads. Every bound is at least re-checkable by adding a few loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("mean", "largest", "cardinality", "hot-pigeonhole", "pairing")
_NEVER = np.iinfo(np.int64).max


def mean_bound(load: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Ceil of the mean: some rank carries at least the mean, and rank loads are integers."""
    bound: NDArray[np.int64] = -(-load.sum(axis=1) // num_ranks)
    return bound


def largest_bound(falling: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """s[0] + small(H-1): the hottest expert shares its rank with H-1 others, at best the smallest ones."""
    num_experts = falling.shape[1]
    capacity = num_experts // num_ranks
    bound: NDArray[np.int64] = falling[:, 0] + falling[:, num_experts - capacity + 1 :].sum(axis=1)
    return bound


def cardinality_bound(falling: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Maximum over j of (s[jP-j] + ... + s[jP]) + small(H-j-1).

    Of the jP+1 hottest experts some rank holds at least j+1; these weigh at least the j+1 smallest of the jP+1, and the
    rank's other H-j-1 experts at least the smallest of all.
    """
    num_experts = falling.shape[1]
    capacity = num_experts // num_ranks
    head = _prefix(falling)
    tail = head[:, -1:] - head  # tail[:, k] = sum of falling[k:]
    best = np.zeros(len(falling), dtype=np.int64)
    for j in range(capacity):
        hot = head[:, j * num_ranks + 1] - head[:, j * num_ranks - j]
        best = np.maximum(best, hot + tail[:, num_experts - (capacity - j - 1)])
    return best


def hot_pigeonhole_bound(falling: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Maximum over n = jP+h, 1 <= h <= P, of the smaller of two cases for the n hottest experts.

    Either (crowded) some rank holds j+2 of the n hottest: it carries at least the j+2 smallest of them plus
    small(H-j-2). Or (spread) no rank holds more than j+1: then at least h ranks hold exactly j+1, and for every h' <= h
    (the jP+h' hottest are spread as well) h' ranks together carry at least the h'(j+1) smallest of the jP+h' hottest
    plus small(h'(H-j-1)), so one of them carries at least a share 1/h', rounded up.
    For j = 0: two of the h hottest share a rank, or each sits alone among colder ones.
    """
    num_layers, num_experts = falling.shape
    capacity = num_experts // num_ranks
    head = _prefix(falling)
    tail = head[:, -1:] - head
    best = np.zeros(num_layers, dtype=np.int64)
    mean = -(-head[:, -1] // num_ranks)
    for j in range(capacity):
        h = np.arange(1, num_ranks + 1)
        n = j * num_ranks + h
        spread = head[:, n] - head[:, n - h * (j + 1)] + tail[:, num_experts - h * (capacity - j - 1)]
        spread = np.maximum.accumulate(-(-spread // h), axis=1)
        spread = np.maximum(spread, mean[:, None])
        crowded = np.full_like(spread, _NEVER)
        fits = n >= j + 2
        if j + 2 <= capacity:
            hot = n[fits]
            crowded[:, fits] = head[:, hot] - head[:, hot - (j + 2)] + tail[:, [num_experts - (capacity - j - 2)]]
        best = np.maximum(best, np.minimum(spread, crowded).max(axis=1))
    return best


def pairing_bound(falling: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """For H = 2, max over i of s[i] + s[E-1-i]: the optimum itself.

    Of the i+1 hottest experts, either two share a rank (at least s[i-1] + s[i], and s[i] >= s[E-1-i] for i < P), or all
    i+1 have partners among the other E-i-1, whose i+1 smallest end at s[E-1-i]: the partner of some one of them is at
    least s[E-1-i]. Pairing hottest with coldest meets the bound.
    """
    num_experts = falling.shape[1]
    if num_experts != 2 * num_ranks:
        return np.zeros(len(falling), dtype=np.int64)
    bound: NDArray[np.int64] = (falling[:, :num_ranks] + falling[:, : num_ranks - 1 : -1]).max(axis=1)
    return bound


def placement_bounds(load: NDArray[np.int64], num_ranks: int) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The best bound of each layer and the simplest kind that gives it.

    Parameters
    ----------
    load
        int64 [L, E], non-negative; E a multiple of ``num_ranks``.
    num_ranks
        P.

    Returns
    -------
    bound, kind
        int64 [L] and one of ``KINDS`` a layer.
    """
    falling = -np.sort(-load, axis=1)
    candidates = np.stack(
        [
            mean_bound(load, num_ranks),
            largest_bound(falling, num_ranks),
            cardinality_bound(falling, num_ranks),
            hot_pigeonhole_bound(falling, num_ranks),
            pairing_bound(falling, num_ranks),
        ]
    )
    # rank loads are multiples of the greatest common divisor of a layer's loads: round up to the next one
    divisor = np.maximum(np.gcd.reduce(load, axis=1), 1)
    bound: NDArray[np.int64] = -(-candidates.max(axis=0) // divisor) * divisor
    return bound, tuple(KINDS[k] for k in candidates.argmax(axis=0))


def _prefix(falling: NDArray[np.int64]) -> NDArray[np.int64]:
    head = np.zeros((falling.shape[0], falling.shape[1] + 1), dtype=np.int64)
    np.cumsum(falling, axis=1, out=head[:, 1:])
    return head
