"""Kernels of the stage-level model: loads of a layer kept per expert, so that one edit costs one expert's work.

Shapes: L layers, E experts, C chiplets, R slots, U links, G regions, N nodes, T tiers. All loads are whole numbers in
float64 (bytes, tokens), so adding and removing an expert is exact and edits can be undone to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numba import njit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Division like numpy: no zero check, so that loops over links and regions run in vector lanes.
kernel = njit(cache=True, nogil=True, error_model="numpy")

GATE, DISPATCH, QUEUE, MEMORY, COMPUTE, GATHER, COMBINE = range(7)


class StageTables(NamedTuple):
    """Constants of a scene as the kernels read them; see Hardware and Scene for units."""

    route_offsets: NDArray[np.int32]
    route_links: NDArray[np.int32]
    route_latency: NDArray[np.float64]
    route_inverse: NDArray[np.float64]
    link_bandwidth: NDArray[np.float64]
    link_latency: NDArray[np.float64]
    chiplet_ops: NDArray[np.float64]
    region_bandwidth: NDArray[np.float64]
    region_latency: NDArray[np.float64]
    region_of: NDArray[np.int32]
    memory_node: NDArray[np.int32]
    expert_bytes: NDArray[np.float64]
    expert_ops: float
    token_bytes: float
    gate_ops: float
    combine_ops: float
    gate_constant: float
    top_k: float


class WindowState(NamedTuple):
    """Loads of every layer of one window.

    dispatch_links, gather_links, memory_links [L, U] bytes; chiplet_tokens [L, C]; region_bytes, region_reads [L, G];
    dispatch_route, gather_route, memory_route [L, E] seconds of each expert's longest route; fixed [L, 2] seconds of
    gate and combine, which no placement changes; migration_links [U], migration_regions [G] bytes of one layer's
    share of the window's migration traffic.
    """

    dispatch_links: NDArray[np.float64]
    gather_links: NDArray[np.float64]
    memory_links: NDArray[np.float64]
    chiplet_tokens: NDArray[np.float64]
    region_bytes: NDArray[np.float64]
    region_reads: NDArray[np.float64]
    dispatch_route: NDArray[np.float64]
    gather_route: NDArray[np.float64]
    memory_route: NDArray[np.float64]
    fixed: NDArray[np.float64]
    migration_links: NDArray[np.float64]
    migration_regions: NDArray[np.float64]


@kernel
def add_expert(tables, state, layer, expert, demand, tiers, chiplets, slots, sign):  # type: ignore[no-untyped-def]
    """Add (sign 1) or take back (sign -1) the loads of one expert: demand [C] served by slots [C].

    Routes longest per expert are set with sign 1 and cleared with sign -1.
    """
    num_nodes = tables.route_latency.shape[0]
    used = 0
    dispatch = 0.0
    gather = 0.0
    for c in range(len(demand)):
        tokens = demand[c]
        if tokens == 0:
            continue
        slot = slots[c]
        used |= 1 << slot
        d = chiplets[slot]
        state.chiplet_tokens[layer, d] += sign * tokens
        if d == c:
            continue
        data = tokens * tables.token_bytes
        k = c * num_nodes + d
        for i in range(tables.route_offsets[k], tables.route_offsets[k + 1]):
            state.dispatch_links[layer, tables.route_links[i]] += sign * data
        dispatch = max(dispatch, tables.route_latency[c, d] + data * tables.route_inverse[c, d])
        k = d * num_nodes + c
        for i in range(tables.route_offsets[k], tables.route_offsets[k + 1]):
            state.gather_links[layer, tables.route_links[i]] += sign * data
        gather = max(gather, tables.route_latency[d, c] + data * tables.route_inverse[d, c])
    size = tables.expert_bytes[layer]
    memory = 0.0
    for slot in range(len(tiers)):
        if not (used >> slot) & 1:
            continue
        d = chiplets[slot]
        region = tables.region_of[tiers[slot], d]
        state.region_bytes[layer, region] += sign * size
        state.region_reads[layer, region] += sign
        node = tables.memory_node[tiers[slot], d]
        k = node * num_nodes + d
        for i in range(tables.route_offsets[k], tables.route_offsets[k + 1]):
            state.memory_links[layer, tables.route_links[i]] += sign * size
        if node != d:
            memory = max(memory, tables.route_latency[node, d] + size * tables.route_inverse[node, d])
    state.dispatch_route[layer, expert] = dispatch if sign > 0 else 0.0
    state.gather_route[layer, expert] = gather if sign > 0 else 0.0
    state.memory_route[layer, expert] = memory if sign > 0 else 0.0


@kernel
def layer_stages(tables, state, layer, stages):  # type: ignore[no-untyped-def]
    """Fill stages [7] of one layer; returns its time gate + dispatch + queue + max(memory, compute) + gather + combine.

    The memory stage carries the layer's share of migration.
    """
    dispatch = 0.0
    gather = 0.0
    memory = 0.0
    for e in range(state.dispatch_route.shape[1]):
        dispatch = max(dispatch, state.dispatch_route[layer, e])
        gather = max(gather, state.gather_route[layer, e])
        memory = max(memory, state.memory_route[layer, e])
    for u in range(len(tables.link_bandwidth)):
        bandwidth = tables.link_bandwidth[u]
        dispatch = max(dispatch, state.dispatch_links[layer, u] / bandwidth)
        gather = max(gather, state.gather_links[layer, u] / bandwidth)
        memory = max(memory, (state.memory_links[layer, u] + state.migration_links[u]) / bandwidth)
    queue = 0.0
    for g in range(len(tables.region_bandwidth)):
        data = state.region_bytes[layer, g] + state.migration_regions[g]
        if data > 0:
            memory = max(memory, tables.region_latency[g] + data / tables.region_bandwidth[g])
            queue = max(queue, state.region_reads[layer, g] * tables.region_latency[g])
    compute = 0.0
    for c in range(len(tables.chiplet_ops)):
        compute = max(compute, state.chiplet_tokens[layer, c] * tables.expert_ops / tables.chiplet_ops[c])
    stages[GATE] = state.fixed[layer, 0]
    stages[DISPATCH] = dispatch
    stages[QUEUE] = queue
    stages[MEMORY] = memory
    stages[COMPUTE] = compute
    stages[GATHER] = gather
    stages[COMBINE] = state.fixed[layer, 1]
    return stages[GATE] + dispatch + queue + max(memory, compute) + gather + stages[COMBINE]


@kernel
def clear_layer(tables, state, layer, demand):  # type: ignore[no-untyped-def]
    """Zero the loads of one layer and set its gate and combine times from demand [E, C]."""
    state.dispatch_links[layer] = 0.0
    state.gather_links[layer] = 0.0
    state.memory_links[layer] = 0.0
    state.chiplet_tokens[layer] = 0.0
    state.region_bytes[layer] = 0.0
    state.region_reads[layer] = 0.0
    state.dispatch_route[layer] = 0.0
    state.gather_route[layer] = 0.0
    state.memory_route[layer] = 0.0
    gate = 0.0
    combine = 0.0
    for c in range(demand.shape[1]):
        assignments = 0.0
        for e in range(demand.shape[0]):
            assignments += demand[e, c]
        gate = max(gate, assignments / tables.top_k * tables.gate_ops / tables.chiplet_ops[c])
        combine = max(combine, assignments * tables.combine_ops / tables.chiplet_ops[c])
    state.fixed[layer, 0] = gate + tables.gate_constant if combine > 0 else 0.0
    state.fixed[layer, 1] = combine


@kernel
def window_stages(tables, state, demand, tiers, chiplets, slots, stages, times):  # type: ignore[no-untyped-def]
    """Loads of a whole window from demand [L, E, C] served by slots [L, E, C]; fills stages [L, 7] and times [L]."""
    for layer in range(demand.shape[0]):
        clear_layer(tables, state, layer, demand[layer])
        for e in range(demand.shape[1]):
            add_expert(
                tables, state, layer, e, demand[layer, e], tiers[layer, e], chiplets[layer, e], slots[layer, e], 1.0
            )
        times[layer] = layer_stages(tables, state, layer, stages[layer])


@kernel
def choose_slots(tables, layer, demand, tiers, chiplets, tokens, region_bytes, weights, block, out):  # type: ignore[no-untyped-def]
    """Fast map of one expert: every group (source c, demand[c] tokens) to its cheapest replica.

    The counters tokens [C] and region_bytes [G] hold what is assigned so far; they are updated after each block of
    ``block`` groups. weights [5]: queue, path, bank, streaming, peak. Fills out [C]: slots, -1 where demand is 0.
    """
    count = 0
    while count < len(tiers) and tiers[count] >= 0:
        count += 1
    size = tables.expert_bytes[layer]
    used = 0
    new_used = 0
    start = 0
    in_block = 0
    peak = 0.0
    if weights[4] > 0 and count > 1:
        for c in range(len(tokens)):
            peak = max(peak, tokens[c] * tables.expert_ops / tables.chiplet_ops[c])
        for g in range(len(region_bytes)):
            peak = max(peak, region_bytes[g] / tables.region_bandwidth[g])
    for c in range(len(demand)):
        out[c] = -1
        if demand[c] > 0:
            best_cost = 0.0
            best = 0
            for slot in range(count if count > 1 else 0):
                d = chiplets[slot]
                region = tables.region_of[tiers[slot], d]
                node = tables.memory_node[tiers[slot], d]
                data = demand[c] * tables.token_bytes
                compute = (tokens[d] + demand[c]) * tables.expert_ops / tables.chiplet_ops[d]
                path = tables.route_latency[c, d] + tables.route_latency[d, c]
                path += data * (tables.route_inverse[c, d] + tables.route_inverse[d, c])
                bank = region_bytes[region] / tables.region_bandwidth[region]
                stream = 0.0
                if not (used >> slot) & 1:
                    bank += size / tables.region_bandwidth[region]
                    stream = size * (1.0 / tables.region_bandwidth[region] + tables.route_inverse[node, d])
                cost = weights[0] * compute + weights[1] * path + weights[2] * bank + weights[3] * stream
                cost += weights[4] * max(peak, max(compute, bank))
                if slot == 0 or cost < best_cost:
                    best_cost = cost
                    best = slot
            out[c] = best
            new_used |= 1 << best
            in_block += 1
        if in_block == block or c == len(demand) - 1:
            for i in range(start, c + 1):
                if demand[i] > 0:
                    d = chiplets[out[i]]
                    tokens[d] += demand[i]
                    peak = max(peak, tokens[d] * tables.expert_ops / tables.chiplet_ops[d])
            for slot in range(count):
                if ((new_used & ~used) >> slot) & 1:
                    region = tables.region_of[tiers[slot], chiplets[slot]]
                    region_bytes[region] += size
                    peak = max(peak, region_bytes[region] / tables.region_bandwidth[region])
            used = new_used
            start = c + 1
            in_block = 0


@kernel
def map_window(tables, demand, order, tiers, chiplets, tokens, region_bytes, weights, block, forced_first, out):  # type: ignore[no-untyped-def]
    """Fast map of a window: experts of each layer in ``order`` [L, E]; ``forced_first``: those with one replica lead.

    tokens [C] and region_bytes [G] are scratch.
    """
    for layer in range(demand.shape[0]):
        tokens[:] = 0.0
        region_bytes[:] = 0.0
        for phase in range(2 if forced_first else 1):
            for i in range(demand.shape[1]):
                e = order[layer, i]
                several = tiers.shape[2] > 1 and tiers[layer, e, 1] >= 0
                if forced_first and several == (phase == 0):
                    continue
                choose_slots(
                    tables, layer, demand[layer, e], tiers[layer, e], chiplets[layer, e], tokens, region_bytes,
                    weights, block, out[layer, e],
                )  # fmt: skip


@kernel
def score_edits(  # type: ignore[no-untyped-def]
    tables, state, demand, tiers, chiplets, slots, edit_layer, edit_expert, edit_tiers, edit_chiplets,
    weights, block, tokens, region_bytes, new_slots, stages, times,
):  # fmt: skip
    """Layer time after each edit, all else as it is: edit k gives one expert the replicas edit_tiers/chiplets [K, R].

    Groups of the edited expert are mapped anew by the fast rule on the loads of the others; ``state`` is left as
    found, to the last bit. tokens [C], region_bytes [G], new_slots [C] and stages [7] are scratch; fills times [K].
    """
    for k in range(len(edit_layer)):
        layer = edit_layer[k]
        e = edit_expert[k]
        group = demand[layer, e]
        add_expert(tables, state, layer, e, group, tiers[layer, e], chiplets[layer, e], slots[layer, e], -1.0)
        tokens[:] = state.chiplet_tokens[layer]
        region_bytes[:] = state.region_bytes[layer]
        choose_slots(
            tables, layer, group, edit_tiers[k], edit_chiplets[k], tokens, region_bytes, weights, block, new_slots
        )
        add_expert(tables, state, layer, e, group, edit_tiers[k], edit_chiplets[k], new_slots, 1.0)
        times[k] = layer_stages(tables, state, layer, stages)
        add_expert(tables, state, layer, e, group, edit_tiers[k], edit_chiplets[k], new_slots, -1.0)
        add_expert(tables, state, layer, e, group, tiers[layer, e], chiplets[layer, e], slots[layer, e], 1.0)
