"""Kernels of the balancing map: whole experts against the layer's busiest chiplets and regions, then again.

Shapes as in ``stage_kernels``: E experts, C chiplets, R slots, G regions.
"""

from __future__ import annotations

import numpy as np

from routepack_opt.residency.simulator.stage_kernels import kernel


@kernel
def power8(x):  # type: ignore[no-untyped-def]
    """x ** 8 for x >= 0; rounding may leave x a hair below 0."""
    x = max(x, 0.0)
    x *= x
    x *= x
    return x * x


@kernel
def growth8(before, after, sharp):  # type: ignore[no-untyped-def]
    """Growth of a load's eighth power, or 64th when ``sharp``."""
    low, high = power8(before), power8(after)
    if sharp:
        return power8(high) - power8(low)
    return high - low


@kernel
def serve_expert(tables, layer, sign, demand, tiers, chiplets, slots, chip_s, region_s):  # type: ignore[no-untyped-def]
    """Add (sign 1) or take back (sign -1) one expert's service seconds: chip_s [C], region_s [G]."""
    used = 0
    for c in range(len(demand)):
        if demand[c] > 0:
            d = chiplets[slots[c]]
            chip_s[d] += sign * demand[c] * tables.expert_ops / tables.chiplet_ops[d]
            used |= 1 << slots[c]
    for slot in range(len(tiers)):
        if (used >> slot) & 1:
            g = tables.region_of[tiers[slot], chiplets[slot]]
            region_s[g] += sign * tables.expert_bytes[layer] / tables.region_bandwidth[g]


@kernel
def split_expert(tables, layer, demand, tiers, chiplets, weights, scale, sharp, chip_s, region_s, trial_s, trial, out):  # type: ignore[no-untyped-def]
    """Serve one expert by the set of its replicas that leaves the layer least loaded; fills out [C].

    Every non-empty set of replicas is tried: each streams once, and the groups, in source order, go to the replica of
    the set whose chiplet is then done first (travel included). Sets are compared by the growth of
    sum (chiplet * scale) ** 8 + sum (region * scale) ** 8 (64 when ``sharp``), so the layer's maximum counts and ties
    still matter. The loads chip_s [C] and region_s [G] of all other experts are not changed. weights [3] of chiplets,
    regions and travel. trial_s [C] and trial [C] are scratch. Returns the growth.
    """
    count = 0
    while count < len(tiers) and tiers[count] >= 0:
        count += 1
    best_cost = -1.0
    for chosen in range(1, 1 << count):
        cost = 0.0
        for slot in range(count):
            if (chosen >> slot) & 1:
                d = chiplets[slot]
                g = tables.region_of[tiers[slot], d]
                trial_s[d] = chip_s[d]
                load = region_s[g]
                for other in range(slot):  # replicas of the set in the same region stream one after the other
                    if (chosen >> other) & 1 and tables.region_of[tiers[other], chiplets[other]] == g:
                        load += tables.expert_bytes[layer] / tables.region_bandwidth[g]
                more = load + tables.expert_bytes[layer] / tables.region_bandwidth[g]
                cost += weights[1] * growth8(load * scale, more * scale, sharp)
        if best_cost >= 0.0 and cost >= best_cost:
            continue
        travel = 0.0
        for c in range(len(demand)):
            if demand[c] == 0:
                continue
            least = -1.0
            for slot in range(count):
                if (chosen >> slot) & 1:
                    d = chiplets[slot]
                    data = demand[c] * tables.token_bytes
                    path = data * (tables.route_inverse[c, d] + tables.route_inverse[d, c])
                    work = trial_s[d] + demand[c] * tables.expert_ops / tables.chiplet_ops[d]
                    done = weights[0] * work + weights[2] * path
                    if least < 0.0 or done < least:
                        least = done
                        trial[c] = slot
            d = chiplets[trial[c]]
            trial_s[d] += demand[c] * tables.expert_ops / tables.chiplet_ops[d]
            travel += demand[c] * tables.token_bytes * (tables.route_inverse[c, d] + tables.route_inverse[d, c])
        for slot in range(count):
            if (chosen >> slot) & 1:
                d = chiplets[slot]
                cost += weights[0] * growth8(chip_s[d] * scale, trial_s[d] * scale, sharp)
                trial_s[d] = chip_s[d]  # two replicas on one chiplet count once
        cost += weights[2] * travel * scale / len(tables.link_bandwidth)
        if best_cost < 0.0 or cost < best_cost:
            best_cost = max(cost, 0.0)
            for c in range(len(demand)):
                out[c] = trial[c] if demand[c] > 0 else -1
    return best_cost


@kernel
def balance_from(  # type: ignore[no-untyped-def]
    tables, layer, demand, order, tiers, chiplets, weights, sweeps, primaries, chip_s, region_s, trial_s, trial, out
):  # fmt: skip
    """Serve all experts of one layer from one start, then let experts with several replicas choose again in ``order``.

    The start is their primaries, or (``primaries`` False) nothing: then they come after the experts with one replica.
    Leaves the service seconds in chip_s and region_s; returns the scale of loads (1 / s), 0 without tokens.
    """
    chip_s[:] = 0.0
    region_s[:] = 0.0
    trial[:] = 0
    total_s = 0.0
    ops = 0.0
    for e in range(demand.shape[0]):
        asked = 0
        for c in range(demand.shape[1]):
            out[e, c] = 0 if demand[e, c] > 0 else -1
            asked += demand[e, c]
        total_s += asked * tables.expert_ops
        if primaries or tiers.shape[1] == 1 or tiers[e, 1] < 0:
            serve_expert(tables, layer, 1.0, demand[e], tiers[e], chiplets[e], out[e], chip_s, region_s)
    for d in range(len(tables.chiplet_ops)):
        ops += tables.chiplet_ops[d]
    if total_s == 0.0:
        return 0.0
    even = total_s / ops  # powers are taken of loads in units of the even share or of the largest load, never tiny
    for g in range(len(region_s)):
        even = max(even, region_s[g])
    for d in range(len(chip_s)):
        even = max(even, chip_s[d])
    scale = 1.0 / even
    for sweep in range(1 + sweeps):
        for i in range(demand.shape[0]):
            e = order[i]
            if tiers.shape[1] == 1 or tiers[e, 1] < 0:
                continue
            if primaries or sweep > 0:
                serve_expert(tables, layer, -1.0, demand[e], tiers[e], chiplets[e], out[e], chip_s, region_s)
            split_expert(
                tables, layer, demand[e], tiers[e], chiplets[e], weights, scale, sweep > 0, chip_s, region_s, trial_s,
                trial, out[e],
            )  # fmt: skip
            serve_expert(tables, layer, 1.0, demand[e], tiers[e], chiplets[e], out[e], chip_s, region_s)
    return scale


@kernel
def peak_of(weights, chip_s, region_s):  # type: ignore[no-untyped-def]
    """Service seconds of the busiest chiplet or region, signals with weight 0 left out."""
    peak = 0.0
    for d in range(len(chip_s)):
        peak = max(peak, weights[0] * chip_s[d])
    for g in range(len(region_s)):
        peak = max(peak, weights[1] * region_s[g])
    return peak


@kernel
def balance_layer(  # type: ignore[no-untyped-def]
    tables, layer, demand, order, tiers, chiplets, weights, sweeps, chip_s, region_s, trial_s, trial, out
):  # fmt: skip
    """Serve all experts of one layer: :func:`balance_from` both starts, the lower peak stays.

    Leaves the service seconds in chip_s and region_s; returns the scale of loads (1 / s), 0 without tokens.
    """
    other = np.empty(out.shape, dtype=np.int8)
    scale = balance_from(
        tables, layer, demand, order, tiers, chiplets, weights, sweeps, True, chip_s, region_s, trial_s, trial, other
    )
    kept_chip_s, kept_region_s = chip_s.copy(), region_s.copy()
    other_scale = balance_from(
        tables, layer, demand, order, tiers, chiplets, weights, sweeps, False, chip_s, region_s, trial_s, trial, out
    )
    if peak_of(weights, kept_chip_s, kept_region_s) < peak_of(weights, chip_s, region_s):
        chip_s[:] = kept_chip_s
        region_s[:] = kept_region_s
        out[:] = other
        return scale
    return other_scale


@kernel
def balance_window(tables, demand, order, tiers, chiplets, weights, sweeps, chip_s, region_s, trial_s, trial, out):  # type: ignore[no-untyped-def]
    """:func:`balance_layer` of every layer; chip_s [L, C] and region_s [L, G]."""
    for layer in range(demand.shape[0]):
        balance_layer(
            tables, layer, demand[layer], order[layer], tiers[layer], chiplets[layer], weights, sweeps, chip_s[layer],
            region_s[layer], trial_s, trial, out[layer],
        )  # fmt: skip
