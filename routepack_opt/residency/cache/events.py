"""EventTrace: the batches of expert look-ups that a cache sees, in the accounting of the engine that recorded them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.traces.route_trace import RouteTrace

    _Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, eq=False)
class EventTrace:
    """Batches of distinct experts, atomic for eviction.

    Prefill is one batch a layer and turn (all prompt tokens together, experts in the order tokens first use them);
    decode is one batch a token and layer.

    Parameters
    ----------
    offsets
        int64 [B + 1], accesses of batch b are [offsets[b], offsets[b + 1]).
    keys
        int64 [A], layer position * E + expert.
    tokens
        int64 [A], tokens of the batch that use the expert.
    batch_prefill
        bool [B].
    batch_pass
        int64 [B], forward pass: one a prefill of a turn, one a decoded token; never falls.
    batch_tokens
        int64 [B], tokens of the batch.
    sizes
        int64 [L * E], bytes of each expert.
    num_experts
        E.
    """

    offsets: NDArray[np.int64]
    keys: NDArray[np.int64]
    tokens: NDArray[np.int64]
    batch_prefill: NDArray[np.bool_]
    batch_pass: NDArray[np.int64]
    batch_tokens: NDArray[np.int64]
    sizes: NDArray[np.int64]
    num_experts: int

    @property
    def num_accesses(self) -> int:
        """A, look-ups of all batches."""
        return int(self.keys.size)

    @property
    def num_batches(self) -> int:
        """B."""
        return int(self.batch_prefill.size)

    def per_access(self, of_batch: NDArray[_Value]) -> NDArray[_Value]:
        """[A] from [B]: the batch's value at each of its accesses."""
        return np.repeat(of_batch, np.diff(self.offsets))


def event_trace(trace: RouteTrace) -> EventTrace:
    """The event-atomic form of ``trace``."""
    num_keys = trace.num_layers * trace.num_experts
    worst = int(np.count_nonzero(trace.experts >= 0))
    batches = trace.num_tokens * trace.num_layers
    offsets, batch_pass, batch_tokens = (np.zeros(batches + 1, dtype=np.int64) for _ in range(3))
    batch_prefill = np.zeros(batches, dtype=np.bool_)
    keys, tokens = np.zeros((2, worst), dtype=np.int64)
    passes, starts, stops = _passes(trace)
    num_batches = _collect(
        trace.experts, passes, starts, stops, np.full(num_keys, -1, dtype=np.int64), trace.num_experts,
        offsets, keys, tokens, batch_prefill, batch_pass, batch_tokens,
    )  # fmt: skip
    num_accesses = int(offsets[num_batches])
    return EventTrace(
        offsets=offsets[: num_batches + 1].copy(),
        keys=keys[:num_accesses].copy(),
        tokens=tokens[:num_accesses].copy(),
        batch_prefill=batch_prefill[:num_batches],
        batch_pass=batch_pass[:num_batches],
        batch_tokens=batch_tokens[:num_batches],
        sizes=np.repeat(trace.expert_bytes, trace.num_experts).astype(np.int64),
        num_experts=trace.num_experts,
    )


def _passes(trace: RouteTrace) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Token ranges that are computed together, and whether each is a prefill."""
    new = np.ones(trace.num_tokens, dtype=np.bool_)
    new[1:] = (trace.turns[1:] != trace.turns[:-1]) | ~trace.prefill[1:]
    starts = np.flatnonzero(new).astype(np.int64)
    return trace.prefill[starts], starts, np.append(starts[1:], trace.num_tokens).astype(np.int64)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _collect(
    experts: NDArray[np.int32],
    passes: NDArray[np.bool_],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    place: NDArray[np.int64],
    num_experts: int,
    offsets: NDArray[np.int64],
    keys: NDArray[np.int64],
    tokens: NDArray[np.int64],
    batch_prefill: NDArray[np.bool_],
    batch_pass: NDArray[np.int64],
    batch_tokens: NDArray[np.int64],
) -> int:
    """Fill the arrays of EventTrace; ``place`` [L * E] is the last access of each key. Returns the batches."""
    batch, access = 0, 0
    for p in range(passes.size):
        for layer in range(experts.shape[1]):
            begun = access
            seen = 0
            for t in range(starts[p], stops[p]):
                used = False
                for k in range(experts.shape[2]):
                    expert = experts[t, layer, k]
                    if expert < 0:
                        continue
                    used = True
                    key = layer * num_experts + expert
                    if place[key] < begun:
                        place[key] = access
                        keys[access] = key
                        access += 1
                    tokens[place[key]] += 1
                if used:
                    seen += 1
            if access > begun:
                batch_prefill[batch] = passes[p]
                batch_pass[batch] = p
                batch_tokens[batch] = seen
                batch += 1
                offsets[batch] = access
    return batch


def warmup() -> None:
    """Compile the kernel."""
    no, flag = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_)
    experts = np.zeros((1, 1, 1), dtype=np.int32)
    _collect(
        experts, flag, no, no + 1, no - 1, 1, np.zeros(2, dtype=np.int64), no.copy(), no.copy(), flag.copy(), no.copy(),
        no.copy(),
    )  # fmt: skip
