"""Event-atomic cache replay: hits, misses and streamed bytes of a policy at a capacity."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.cache.events import EventTrace, event_trace
from routepack_opt.residency.cache.policies import policy_scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.traces.route_trace import RouteTrace


@dataclass(frozen=True)
class PhaseCount:
    """Look-ups of one phase."""

    accesses: int
    hits: int
    bytes_streamed: int

    @property
    def hit_rate(self) -> float:
        """Hits over accesses; 0 without accesses."""
        return self.hits / self.accesses if self.accesses else 0.0

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's JSON."""
        return {
            "accesses": self.accesses,
            "hits": self.hits,
            "hit_rate": self.hit_rate,
            "bytes_streamed": self.bytes_streamed,
        }


@dataclass(frozen=True, eq=False)
class CacheResult:
    """What one replay found.

    Parameters
    ----------
    policy
        Name.
    capacity_bytes
        Of the cache.
    prefill, decode, total
        Counts of the phases and of both.
    hit
        bool [A], each access.
    switches
        Orders the controller changed to after the first, as (batch, order); empty for fixed policies.
    """

    policy: str
    capacity_bytes: int
    prefill: PhaseCount
    decode: PhaseCount
    total: PhaseCount
    hit: NDArray[np.bool_]
    switches: tuple[tuple[int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Contract keys for both phases together, then each phase."""
        return {
            "policy": self.policy,
            "capacity_bytes": self.capacity_bytes,
            **self.total.to_json(),
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "switches": [{"batch": batch, "order": order} for batch, order in self.switches],
        }


def replay_cache(trace: RouteTrace | EventTrace, policy: str, capacity_bytes: int) -> CacheResult:
    """Replay ``trace`` through a cache that starts empty.

    A miss streams the expert's bytes. Eviction happens after a batch, lowest score first, and never takes an expert
    the batch used: inside a batch the capacity may be exceeded, and a batch larger than the cache stays until the next.

    Raises
    ------
    InvalidInput
        An unknown policy, or a capacity that holds no expert.
    """
    events = trace if isinstance(trace, EventTrace) else event_trace(trace)
    check_capacity(capacity_bytes, events.sizes)
    switches: tuple[tuple[int, str], ...] = ()
    if policy == "ours":
        from routepack_opt.residency.cache.controller import control

        hit, switches = control(events, capacity_bytes)
    else:
        scores, ties = policy_scores(policy, events)
        hit = replay_order(events, scores, ties, capacity_bytes)
    return _result(policy, int(capacity_bytes), events, hit, switches)


def check_capacity(capacity_bytes: int, sizes: NDArray[np.int64]) -> None:
    """Refuse a cache that could not keep even one expert of every layer's size."""
    if capacity_bytes < int(sizes.max()):
        raise InvalidInput(
            f"capacity: {int(capacity_bytes)} bytes; expected at least {int(sizes.max())}, the largest expert"
        )


def _result(policy: str, capacity_bytes: int, events: EventTrace, hit: NDArray[np.bool_],
            switches: tuple[tuple[int, str], ...]) -> CacheResult:  # fmt: skip
    in_prefill = events.per_access(events.batch_prefill)
    streamed = np.where(hit, 0, events.sizes[events.keys])
    prefill, decode, total = (
        PhaseCount(int(chosen.sum()), int(hit[chosen].sum()), int(streamed[chosen].sum()))
        for chosen in (in_prefill, ~in_prefill, np.ones(hit.size, dtype=np.bool_))
    )
    return CacheResult(policy, capacity_bytes, prefill, decode, total, hit, switches)


def replay_order(
    events: EventTrace, scores: NDArray[np.float64], ties: NDArray[np.int64], capacity_bytes: int
) -> NDArray[np.bool_]:
    """bool [A], hits of the cache that evicts in the order of (score, tie) of the last use."""
    order = np.zeros(events.num_batches, dtype=np.int64)
    return np.asarray(
        replay_kernel(events.offsets, events.keys, scores[None], ties[None], order, events.sizes, int(capacity_bytes))
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def replay_kernel(
    offsets: NDArray[np.int64],
    keys: NDArray[np.int64],
    scores: NDArray[np.float64],
    ties: NDArray[np.int64],
    order: NDArray[np.int64],
    sizes: NDArray[np.int64],
    capacity: int,
) -> NDArray[np.bool_]:
    """Hits [A] of the cache that evicts after batch b in the order ``scores[order[b]]``, ``ties[order[b]]``.

    The heap holds (score, tie, access); an entry is stale when its key was used again or is gone. A batch's own
    entries enter after its eviction, which is what keeps its experts in.
    """
    hit = np.zeros(keys.size, dtype=np.bool_)
    resident = np.zeros(sizes.size, dtype=np.bool_)
    last = np.full(sizes.size, -1, dtype=np.int64)
    heap = [(0.0, np.int64(0), np.int64(0))]
    heap.pop()
    used, following = 0, order[0] if order.size else 0
    for b in range(offsets.size - 1):
        if order[b] != following:  # another order: build its heap from what is resident
            following = order[b]
            heap.clear()
            for key in np.flatnonzero(resident):
                a = last[key]
                heapq.heappush(heap, (scores[following, a], ties[following, a], np.int64(a)))
        for a in range(offsets[b], offsets[b + 1]):
            if resident[keys[a]]:
                hit[a] = True
            else:
                resident[keys[a]] = True
                used += sizes[keys[a]]
            last[keys[a]] = a
        while used > capacity and len(heap) > 0:
            access = heapq.heappop(heap)[2]
            key = keys[access]
            if resident[key] and last[key] == access:
                resident[key] = False
                used -= sizes[key]
        for a in range(offsets[b], offsets[b + 1]):
            heapq.heappush(heap, (scores[following, a], ties[following, a], np.int64(a)))
    return hit


def warmup() -> None:
    """Compile every kernel of a replay."""
    from routepack_opt.residency.cache import events as cache_events
    from routepack_opt.residency.cache import policies as cache_policies

    cache_events.warmup()
    cache_policies.warmup()
    no = np.zeros(1, dtype=np.int64)
    replay_kernel(np.array([0, 1], dtype=np.int64), no, np.zeros((1, 1)), no[None], no, no + 1, 1)
