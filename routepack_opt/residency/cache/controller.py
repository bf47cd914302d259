"""The cache controller: several eviction orders run as shadow caches, and the real cache follows the best of late.

Orders differ in what they remember: recency (LRU), frequency that fades over 1 to 256 tokens or never (LFU), and the
prompt only (pinned). Which is right depends on the budget - under one token cycle LRU hits nothing, since every expert
is evicted before its layer comes round again - and on how fast the routing drifts. A shadow holds expert numbers only,
no weights: at 58 layers x 256 experts it costs some kilobytes and a heap operation a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from routepack_opt.residency.cache.policies import decayed, lfu, lru, pinned
from routepack_opt.residency.cache.replay import replay_kernel, replay_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.cache.events import EventTrace

HALF_LIVES = (1.0, 4.0, 16.0, 64.0, 256.0)  # forward passes
START_ORDER = 3  # half-life 16, until the shadows have something to say
ORDERS = ("lru", *(f"decayed {half_life:g}" for half_life in HALF_LIVES), "lfu", "pinned")


@dataclass(frozen=True)
class ControllerConfig:
    """When the controller changes its order.

    Parameters
    ----------
    memory
        Half-life of the shadows' hit rates, forward passes.
    margin
        Hit rate by which another shadow must lead before the cache follows it.
    min_passes
        Forward passes an order stays at least.
    """

    memory: float = 64.0
    margin: float = 0.01
    min_passes: int = 8


DEFAULT_CONFIG = ControllerConfig()


def control(
    events: EventTrace, capacity_bytes: int, config: ControllerConfig = DEFAULT_CONFIG
) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...]]:
    """Hits bool [A] of the controlled cache, and its changes of order as (batch, order).

    Every decision uses accesses of earlier forward passes only.
    """
    candidates = [lru(events), *(decayed(events, half_life) for half_life in HALF_LIVES), lfu(events), pinned(events)]
    shadows = np.stack([replay_order(events, scores, ties, capacity_bytes) for scores, ties in candidates])
    scores, ties = np.stack([c[0] for c in candidates]), np.stack([c[1] for c in candidates])
    order = choose_orders(
        events.offsets, shadows, events.batch_pass, events.batch_prefill, START_ORDER, config.memory, config.margin,
        config.min_passes,
    )  # fmt: skip
    hit = replay_kernel(events.offsets, events.keys, scores, ties, order, events.sizes, int(capacity_bytes))
    changes = np.flatnonzero(np.diff(order)) + 1
    return np.asarray(hit), tuple((int(batch), ORDERS[order[batch]]) for batch in changes)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def choose_orders(
    offsets: NDArray[np.int64],
    shadows: NDArray[np.bool_],
    batch_pass: NDArray[np.int64],
    batch_prefill: NDArray[np.bool_],
    start: int,
    memory: float,
    margin: float,
    min_passes: int,
) -> NDArray[np.int64]:
    """int64 [B], the order in force at each batch; it changes only where a forward pass begins.

    ``shadows`` [P, A] are the shadows' hits. Prefill is not scored: a pass over distinct experts of one turn tells
    recency and frequency apart by nothing.
    """
    num_orders = shadows.shape[0]
    order = np.empty(batch_pass.size, dtype=np.int64)
    hits, accesses = np.zeros(num_orders), 0.0
    fade = 2.0 ** (-1.0 / memory)
    current, since = start, 0
    for b in range(batch_pass.size):
        if b > 0 and batch_pass[b] != batch_pass[b - 1]:
            since += 1
            best = int(np.argmax(hits))
            if since >= min_passes and hits[best] > hits[current] + margin * accesses:
                current, since = best, 0
            hits *= fade
            accesses *= fade
        order[b] = current
        if not batch_prefill[b]:
            accesses += offsets[b + 1] - offsets[b]
            for p in range(num_orders):
                hits[p] += shadows[p, offsets[b] : offsets[b + 1]].sum()
    return order


def warmup() -> None:
    """Compile the choice, and every kernel of a replay."""
    from routepack_opt.residency.cache import replay as cache_replay

    cache_replay.warmup()
    no = np.zeros(1, dtype=np.int64)
    choose_orders(np.array([0, 1], dtype=np.int64), np.zeros((1, 1), dtype=np.bool_), no, no > 0, 0, 64.0, 0.01, 8)
