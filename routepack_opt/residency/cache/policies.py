"""Eviction orders as numbers: each policy gives every access a score, and the cache evicts the lowest.

A score is fixed when its expert is used and stays until the next use, so that all policies share one replay. Ties are
broken by a second number. Only ``belady`` looks into the future; it is the bound, not a policy one can run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from routepack_opt.residency.cache.events import EventTrace

    Scores = tuple[NDArray[np.float64], NDArray[np.int64]]

PREFILL_WEIGHT = 0.5  # a prompt token tells half as much about decoding as a decoded token (see residency-traces.md)
PROFILE_SHARE = 0.1  # of the forward passes: what the static policy is told, as in the window comparison
_FAR = 1e18


def lru(events: EventTrace) -> Scores:
    """Least recently used."""
    clock = np.arange(events.num_accesses, dtype=np.int64)
    return clock.astype(np.float64), clock


def lfu(events: EventTrace) -> Scores:
    """Fewest look-ups since the start, prefill included and kept over evictions; then least recently used."""
    clock = np.arange(events.num_accesses, dtype=np.int64)
    return _running(events.keys, np.ones(events.num_accesses), events.sizes.size), clock


def belady(events: EventTrace) -> Scores:
    """Next use furthest away (clairvoyant); optimal for hits when all experts have one size."""
    return -_next_use(events.keys, events.sizes.size), np.arange(events.num_accesses, dtype=np.int64)


def pinned(events: EventTrace) -> Scores:
    """The experts most tokens of the prefill used stay; order never changes in decode, so they are pinned.

    A later turn's prefill adds to the counts. Experts with equal counts keep the order of layer and expert number.
    """
    in_prefill = events.per_access(events.batch_prefill)
    return _running(events.keys, np.where(in_prefill, events.tokens, 0.0), events.sizes.size), -events.keys


def static(events: EventTrace) -> Scores:
    """The most used experts of the first tenth of the forward passes stay; known from the start, never changed."""
    passes = events.per_access(events.batch_pass)
    profile = passes < max(1, int(PROFILE_SHARE * (int(events.batch_pass[-1]) + 1)))
    counts = np.bincount(events.keys[profile], weights=events.tokens[profile], minlength=events.sizes.size)
    return np.asarray(counts[events.keys], dtype=np.float64), -events.keys


def decayed(events: EventTrace, half_life: float) -> Scores:
    """Frequency that halves every ``half_life`` forward passes, as log2 on one clock: no score ages between uses.

    A decoded token that uses the expert adds 1. A prefill of n tokens adds ``PREFILL_WEIGHT`` x its share of the
    expert x what n tokens in a row are worth after decay, so a long prompt does not drown the decode that follows.
    """
    scores = np.empty(events.num_accesses)
    _decayed(
        events.offsets, events.keys, events.tokens, events.batch_prefill, events.batch_pass, events.batch_tokens,
        float(half_life), PREFILL_WEIGHT, np.full(events.sizes.size, -np.inf), scores,
    )  # fmt: skip
    return scores, np.arange(events.num_accesses, dtype=np.int64)


POLICIES: dict[str, str] = {
    "lru": "least recently used",
    "lfu": "least frequently used, counts kept over evictions, prefill included",
    "pinned": "the most frequent experts of the prefill that fit",
    "static": "the most frequent experts of the first tenth of the trace",
    "ours": "the controller: fading frequencies, LRU, LFU and pinned, chosen by shadow hits",
    "belady": "furthest next use, clairvoyant: the bound",
}

_SCORES: dict[str, Callable[[EventTrace], Scores]] = {
    "lru": lru, "lfu": lfu, "belady": belady, "pinned": pinned, "static": static,
}  # fmt: skip


def policy_scores(policy: str, events: EventTrace) -> Scores:
    """Scores float64 [A] and ties int64 [A] of a policy other than ``ours``."""
    if policy not in _SCORES:
        raise InvalidInput(f"policy: {policy!r} is unknown; expected one of {', '.join(POLICIES)}")
    return _SCORES[policy](events)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _running(keys: NDArray[np.int64], weights: NDArray[np.float64], num_keys: int) -> NDArray[np.float64]:
    """Sum of the weights of each key up to and including each access."""
    total = np.zeros(num_keys)
    scores = np.empty(keys.size)
    for a in range(keys.size):
        total[keys[a]] += weights[a]
        scores[a] = total[keys[a]]
    return scores


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _next_use(keys: NDArray[np.int64], num_keys: int) -> NDArray[np.float64]:
    """Access number of the next use of each access's key."""
    upcoming = np.full(num_keys, _FAR)
    found = np.empty(keys.size)
    for a in range(keys.size - 1, -1, -1):
        found[a] = upcoming[keys[a]]
        upcoming[keys[a]] = a
    return found


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _decayed(
    offsets: NDArray[np.int64],
    keys: NDArray[np.int64],
    tokens: NDArray[np.int64],
    batch_prefill: NDArray[np.bool_],
    batch_pass: NDArray[np.int64],
    batch_tokens: NDArray[np.int64],
    half_life: float,
    prefill_weight: float,
    current: NDArray[np.float64],
    scores: NDArray[np.float64],
) -> None:
    """Fill ``scores`` [A]; ``current`` [L * E] starts at -inf."""
    for b in range(batch_prefill.size):
        now = batch_pass[b] / half_life
        scale = 1.0
        if batch_prefill[b]:
            worth = (1.0 - 2.0 ** (-batch_tokens[b] / half_life)) / (1.0 - 2.0 ** (-1.0 / half_life))
            scale = prefill_weight * worth / batch_tokens[b]
        for a in range(offsets[b], offsets[b + 1]):
            added = now + np.log2(scale * tokens[a])
            high, low = max(added, current[keys[a]]), min(added, current[keys[a]])
            current[keys[a]] = high + np.log2(1.0 + 2.0 ** (low - high))
            scores[a] = current[keys[a]]


def warmup() -> None:
    """Compile the kernels."""
    no, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    _running(no, np.zeros(1), 1)
    _next_use(no, 1)
    offsets, score = np.array([0, 1], dtype=np.int64), np.full(1, -np.inf)
    _decayed(offsets, no, one, np.zeros(1, dtype=np.bool_), no, one, 8.0, PREFILL_WEIGHT, score, score.copy())
