"""Kernel of the event-level simulator: token groups of one layer through gate, dispatch, queue, memory, compute,
gather and combine, with links, banks and chiplets reserved by their next free time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from routepack_opt.residency.simulator.stage_kernels import (
    COMBINE,
    COMPUTE,
    DISPATCH,
    GATE,
    GATHER,
    MEMORY,
    QUEUE,
    kernel,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_BUCKETS = 4096


class EventScratch(NamedTuple):
    """Memory of one layer; groups are numbered in order of block, expert, source.

    source, target, expert, slot, tokens int32 [groups]; ready, arrived, started, done, back, end float64 [groups]
    seconds since the layer began; order int32 [groups]; buckets int64 [NUM_BUCKETS + 1]; gate_ready [blocks, C];
    link_free [U], region_free [G], chiplet_free, combine_free [C]; weights_ready [E, R].
    """

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    expert: NDArray[np.int32]
    slot: NDArray[np.int32]
    tokens: NDArray[np.int32]
    ready: NDArray[np.float64]
    arrived: NDArray[np.float64]
    started: NDArray[np.float64]
    done: NDArray[np.float64]
    back: NDArray[np.float64]
    end: NDArray[np.float64]
    order: NDArray[np.int32]
    buckets: NDArray[np.int64]
    gate_ready: NDArray[np.float64]
    link_free: NDArray[np.float64]
    region_free: NDArray[np.float64]
    chiplet_free: NDArray[np.float64]
    combine_free: NDArray[np.float64]
    weights_ready: NDArray[np.float64]


class EventTotals(NamedTuple):
    """What passed, over all layers: bytes by link [U] and region [G], token assignments computed and returned [C]."""

    link_bytes: NDArray[np.float64]
    region_bytes: NDArray[np.float64]
    computed: NDArray[np.float64]
    returned: NDArray[np.float64]


@kernel
def _sort_by(times, num, order, buckets):  # type: ignore[no-untyped-def]
    """Order [num] by time, to a 4096th of the span; equal buckets keep the order of the groups."""
    low = times[0]
    high = times[0]
    for i in range(num):
        low = min(low, times[i])
        high = max(high, times[i])
    scale = (NUM_BUCKETS - 1) / (high - low) if high > low else 0.0
    buckets[:] = 0
    for i in range(num):
        buckets[int((times[i] - low) * scale) + 1] += 1
    for b in range(NUM_BUCKETS):
        buckets[b + 1] += buckets[b]
    for i in range(num):
        b = int((times[i] - low) * scale)
        order[buckets[b]] = i
        buckets[b] += 1


@kernel
def _send(tables, free, link_bytes, source, target, data, t):  # type: ignore[no-untyped-def]
    """A message over the links of its route, stored and forwarded; returns its arrival."""
    k = source * tables.route_latency.shape[0] + target
    for i in range(tables.route_offsets[k], tables.route_offsets[k + 1]):
        u = tables.route_links[i]
        free[u] = max(t, free[u]) + data / tables.link_bandwidth[u]
        t = free[u] + tables.link_latency[u]
        link_bytes[u] += data
    return t


@kernel
def _stream(tables, scratch, totals, size, tier, chiplet, t):  # type: ignore[no-untyped-def]
    """Read an expert's weights from their region and stream them to the chiplet; returns when all are there.

    The region is held for its latency and the transfer; the links are cut through, each held for the whole size.
    """
    region = tables.region_of[tier, chiplet]
    start = max(t, scratch.region_free[region])
    ready = start + tables.region_latency[region] + size / tables.region_bandwidth[region]
    scratch.region_free[region] = ready
    totals.region_bytes[region] += size
    head = start + tables.region_latency[region]
    k = tables.memory_node[tier, chiplet] * tables.route_latency.shape[0] + chiplet
    for i in range(tables.route_offsets[k], tables.route_offsets[k + 1]):
        u = tables.route_links[i]
        head = max(head, scratch.link_free[u])
        scratch.link_free[u] = head + size / tables.link_bandwidth[u]
        head += tables.link_latency[u]
        ready = max(ready, scratch.link_free[u] + tables.link_latency[u])
        totals.link_bytes[u] += size
    return ready


@kernel
def _gate_and_dispatch(tables, scratch, totals, demand, chiplets, slots, num_blocks):  # type: ignore[no-untyped-def]
    """Gate each block of each source, then send its groups; returns the number of groups."""
    num_experts, num_chiplets = demand.shape
    for c in range(num_chiplets):
        assignments = 0
        for e in range(num_experts):
            assignments += demand[e, c]
        rate = tables.gate_ops / tables.chiplet_ops[c] / tables.top_k
        for b in range(num_blocks):
            done = (assignments * (b + 1)) // num_blocks
            scratch.gate_ready[b, c] = tables.gate_constant + done * rate
    num = 0
    for b in range(num_blocks):
        for e in range(num_experts):
            for c in range(num_chiplets):
                tokens = demand[e, c]
                if tokens == 0:
                    continue
                if num_blocks > 1:
                    tokens = (tokens * (b + 1)) // num_blocks - (tokens * b) // num_blocks
                    if tokens == 0:
                        continue
                d = chiplets[e, slots[e, c]]
                scratch.source[num] = c
                scratch.target[num] = d
                scratch.expert[num] = e
                scratch.slot[num] = slots[e, c]
                scratch.tokens[num] = tokens
                t = scratch.gate_ready[b, c]
                scratch.ready[num] = t
                if d != c:
                    t = _send(tables, scratch.link_free, totals.link_bytes, c, d, tokens * tables.token_bytes, t)
                scratch.arrived[num] = t
                num += 1
    return num


@kernel
def event_layer(  # type: ignore[no-untyped-def]
    tables, scratch, totals, layer, demand, tiers, chiplets, slots, num_blocks, migration_links, migration_regions,
    stages,
):  # fmt: skip
    """Time of one layer: when its last group is combined, or its share of migration is through.

    demand [E, C], tiers, chiplets [E, R], slots [E, C]; fills stages [7] with those of the last group, which add up to
    the time returned. Groups are taken in order of block for dispatch, of arrival for memory and compute, of
    completion for gather.
    """
    stages[:] = 0.0
    scratch.chiplet_free[:] = 0.0
    scratch.combine_free[:] = 0.0
    scratch.weights_ready[:] = -1.0
    migrated = 0.0
    for u in range(len(tables.link_bandwidth)):
        scratch.link_free[u] = migration_links[u] / tables.link_bandwidth[u]
        migrated = max(migrated, scratch.link_free[u])
    for g in range(len(tables.region_bandwidth)):
        scratch.region_free[g] = migration_regions[g] / tables.region_bandwidth[g]
        if migration_regions[g] > 0:
            migrated = max(migrated, scratch.region_free[g] + tables.region_latency[g])
    num = _gate_and_dispatch(tables, scratch, totals, demand, chiplets, slots, num_blocks)
    if num == 0:
        stages[MEMORY] = migrated
        return migrated
    size = tables.expert_bytes[layer]
    _sort_by(scratch.arrived, num, scratch.order, scratch.buckets)
    for j in range(num):
        i = scratch.order[j]
        d = scratch.target[i]
        e = scratch.expert[i]
        slot = scratch.slot[i]
        t = scratch.arrived[i]
        if scratch.weights_ready[e, slot] < 0:
            scratch.weights_ready[e, slot] = _stream(tables, scratch, totals, size, tiers[e, slot], d, t)
        start = max(t, scratch.chiplet_free[d])
        scratch.started[i] = start
        scratch.chiplet_free[d] = start + scratch.tokens[i] * tables.expert_ops / tables.chiplet_ops[d]
        scratch.done[i] = max(scratch.chiplet_free[d], scratch.weights_ready[e, slot])
        totals.computed[d] += scratch.tokens[i]
    _sort_by(scratch.done, num, scratch.order, scratch.buckets)
    last = 0
    for j in range(num):
        i = scratch.order[j]
        c = scratch.source[i]
        d = scratch.target[i]
        tokens = scratch.tokens[i]
        t = scratch.done[i]
        if d != c:
            t = _send(tables, scratch.link_free, totals.link_bytes, d, c, tokens * tables.token_bytes, t)
        scratch.back[i] = t
        scratch.combine_free[c] = max(t, scratch.combine_free[c]) + tokens * tables.combine_ops / tables.chiplet_ops[c]
        scratch.end[i] = scratch.combine_free[c]
        totals.returned[c] += tokens
        if scratch.end[i] > scratch.end[last] or j == 0:
            last = i
    work = scratch.tokens[last] * tables.expert_ops / tables.chiplet_ops[scratch.target[last]]
    stages[GATE] = scratch.ready[last]
    stages[DISPATCH] = scratch.arrived[last] - scratch.ready[last]
    stages[QUEUE] = scratch.started[last] - scratch.arrived[last]
    stages[COMPUTE] = work
    stages[MEMORY] = max(0.0, scratch.done[last] - scratch.started[last] - work)
    stages[GATHER] = scratch.back[last] - scratch.done[last]
    stages[COMBINE] = scratch.end[last] - scratch.back[last]
    if migrated > scratch.end[last]:
        stages[MEMORY] += migrated - scratch.end[last]
        return migrated
    return scratch.end[last]


@kernel
def event_window(  # type: ignore[no-untyped-def]
    tables, scratch, totals, demand, tiers, chiplets, slots, num_blocks, migration_links, migration_regions, stages,
    times,
):  # fmt: skip
    """Layers of a window one after the other; fills stages [L, 7] and times [L]."""
    for layer in range(demand.shape[0]):
        times[layer] = event_layer(
            tables, scratch, totals, layer, demand[layer], tiers[layer], chiplets[layer], slots[layer], num_blocks,
            migration_links, migration_regions, stages[layer],
        )  # fmt: skip
