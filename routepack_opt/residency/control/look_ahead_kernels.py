"""Kernels of the look-ahead: all single edits of one layer worth a look, each scored on the layer's forecast.

The value of a layer is its service time with the maximum over chiplets and regions softened to an 8-norm: the forecast
errs, so near-busiest places count too. Shapes as in ``stage_kernels``.
"""

from __future__ import annotations

import numpy as np

from routepack_opt.residency.mapping.balance_kernels import balance_layer, power8, serve_expert, split_expert
from routepack_opt.residency.simulator.stage_kernels import kernel

MOVE, ADD, EVICT = range(3)
MAX_EXPERTS = 8  # shortlist: experts whose loads the layer's value grows with most
MAX_TARGETS = 4  # and places for each, by the location score
MAX_STALE = 6  # replicas that serve least


@kernel
def potential(weights, scale, chip_s, region_s):  # type: ignore[no-untyped-def]
    """Sum of eighth powers of all service times in units of 1 / scale."""
    total = 0.0
    for d in range(len(chip_s)):
        total += weights[0] * power8(chip_s[d] * scale)
    for g in range(len(region_s)):
        total += weights[1] * power8(region_s[g] * scale)
    return total


@kernel
def seconds_of(total, scale):  # type: ignore[no-untyped-def]
    """The 8-norm of a potential, in s."""
    return max(total, 0.0) ** 0.125 / scale


@kernel
def trial_value(  # type: ignore[no-untyped-def]
    tables, demand, tiers, chiplets, rest, weights, scale, chip_s, region_s, trial_s, trial, scratch
):  # fmt: skip
    """Seconds of the layer if the expert, taken out of chip_s and region_s (potential ``rest``), had these replicas."""
    growth = split_expert(
        tables, 0, demand, tiers, chiplets, weights, scale, False, chip_s, region_s, trial_s, trial, scratch
    )
    return seconds_of(rest + growth, scale)


@kernel
def pressing_experts(  # type: ignore[no-untyped-def]
    tables, demand, tiers, chiplets, slots, may, weights, scale, chip_s, region_s, push, chosen
):  # fmt: skip
    """The experts that raise the layer's value most: load times the seventh power of where it falls.

    Only where may [E]. Fills push [E] and chosen [MAX_EXPERTS]; returns how many.
    """
    for e in range(demand.shape[0]):
        push[e] = 0.0
        if not may[e]:
            continue
        used = 0
        for c in range(demand.shape[1]):
            if demand[e, c] > 0:
                d = chiplets[e, slots[e, c]]
                load = chip_s[d] * scale
                part = demand[e, c] * tables.expert_ops / tables.chiplet_ops[d] * scale
                push[e] += weights[0] * part * power8(load) / max(load, 1e-9)
                used |= 1 << slots[e, c]
        for slot in range(tiers.shape[1]):
            if (used >> slot) & 1:
                g = tables.region_of[tiers[e, slot], chiplets[e, slot]]
                load = region_s[g] * scale
                part = tables.expert_bytes[0] / tables.region_bandwidth[g] * scale
                push[e] += weights[1] * part * power8(load) / max(load, 1e-9)
    count = 0
    while count < len(chosen):
        best = -1
        for e in range(demand.shape[0]):
            if push[e] > 0.0 and (best < 0 or push[e] > push[best]):
                best = e
        if best < 0:
            break
        chosen[count] = best
        push[best] = 0.0
        count += 1
    return count


@kernel
def best_targets(  # type: ignore[no-untyped-def]
    tables, demand, tiers, chiplets, fits, free_share, place, weights, scale, chip_s, region_s, scores, chosen
):  # fmt: skip
    """Places of a new replica with the least location score; fills chosen with t * C + c, returns how many.

    The score is place[0] * source distance + place[1] * chiplet queue + place[2] * bank use + place[3] * tier scarcity
    - place[4] * distance to its other replicas, each in units of the layer's peak service time (scarcity: a share).
    """
    num_tiers, num_chiplets = tables.region_of.shape
    links = len(tables.link_bandwidth)
    total = 0.0
    for c in range(num_chiplets):
        total += demand[c]
    data = tables.token_bytes * total
    for c in range(num_chiplets):
        near = np.inf
        here = 0
        for slot in range(len(tiers)):
            if tiers[slot] >= 0:
                near = min(near, tables.route_inverse[chiplets[slot], c])
                if chiplets[slot] == c:
                    here |= 1 << tiers[slot]
        away = 0.0
        for s in range(num_chiplets):
            away += demand[s] * (tables.route_inverse[s, c] + tables.route_inverse[c, s])
        travel = weights[2] * (place[0] * away * tables.token_bytes - place[4] * near * data) / links
        queue = weights[0] * place[1] * (chip_s[c] + 0.5 * total * tables.expert_ops / tables.chiplet_ops[c])
        for t in range(num_tiers):
            g = tables.region_of[t, c]
            at = t * num_chiplets + c
            scores[at] = np.inf
            if g >= 0 and fits[g] and not (here >> t) & 1:
                bank = region_s[g] + tables.expert_bytes[0] / tables.region_bandwidth[g]
                scores[at] = scale * (travel + queue + weights[1] * place[2] * bank) + place[3] * (1.0 - free_share[t])
    count = 0
    while count < len(chosen):
        best = -1
        for at in range(len(scores)):
            if scores[at] < np.inf and (best < 0 or scores[at] < scores[best]):
                best = at
        if best < 0:
            break
        chosen[count] = best
        scores[best] = np.inf
        count += 1
    return count


@kernel
def stale_replicas(demand, tiers, slots, leave, served, chosen):  # type: ignore[no-untyped-def]
    """Replicas that may leave and serve the fewest tokens; fills chosen with e * R + slot, returns how many.

    served [E, R] is scratch.
    """
    num_experts, num_slots = tiers.shape
    for e in range(num_experts):
        for slot in range(num_slots):
            served[e, slot] = 0.0
        for c in range(demand.shape[1]):
            if demand[e, c] > 0:
                served[e, slots[e, c]] += demand[e, c]
    count = 0
    while count < len(chosen):
        best = -1
        least = np.inf
        for e in range(num_experts):
            if num_slots == 1 or tiers[e, 1] < 0:
                continue
            for slot in range(num_slots):
                if tiers[e, slot] >= 0 and leave[e, slot] and served[e, slot] < least:
                    least = served[e, slot]
                    best = e * num_slots + slot
        if best < 0:
            break
        chosen[count] = best
        served[best // num_slots, best % num_slots] = np.inf
        count += 1
    return count


@kernel
def without_slot(tiers, chiplets, slot, new_tiers, new_chiplets):  # type: ignore[no-untyped-def]
    """Copy an expert's replicas without ``slot``, packed; returns their number."""
    count = 0
    for r in range(len(tiers)):
        if r != slot and tiers[r] >= 0:
            new_tiers[count] = tiers[r]
            new_chiplets[count] = chiplets[r]
            count += 1
    for r in range(count, len(tiers)):
        new_tiers[r] = -1
        new_chiplets[r] = -1
    return count


@kernel
def plan_layer(  # type: ignore[no-untyped-def]
    tables, demand, order, tiers, chiplets, may, leave, fits, free_share, place, weights, sweeps, slots, best, value
):  # fmt: skip
    """The best move, addition and eviction of one layer on its forecast demand int32 [E, C].

    Parameters: replicas tiers, chiplets [E, R]; may [E] which experts may get a copy; leave [E, R] which replicas may
    leave (for evictions of experts with several and for moves of any); fits [G] whether a region has room for one
    more; free_share [T]; place [5]; weights [3]: load, bank, link. Fills best [3, 4]: expert, tier, chiplet, slot that
    leaves (-1 none), rows MOVE, ADD and EVICT; value [4]: seconds of the layer after each (inf when there is none),
    and now. slots [E, C]: the assignment.
    """
    num_experts, num_slots = tiers.shape
    num_tiers, num_chiplets = tables.region_of.shape
    chip_s, region_s = np.zeros(num_chiplets), np.zeros(len(tables.region_bandwidth))
    trial_s, trial = np.zeros(num_chiplets), np.zeros(num_chiplets, dtype=np.int8)
    scratch, push = np.zeros(num_chiplets, dtype=np.int8), np.zeros(num_experts)
    experts, targets = np.zeros(MAX_EXPERTS, dtype=np.int64), np.zeros(MAX_TARGETS, dtype=np.int64)
    stale, served = np.zeros(MAX_STALE, dtype=np.int64), np.zeros((num_experts, num_slots))
    scores = np.zeros(num_tiers * num_chiplets)
    new_tiers, new_chiplets = np.zeros(num_slots, dtype=np.int8), np.zeros(num_slots, dtype=np.int16)
    best[:] = -1
    value[:] = np.inf
    scale = balance_layer(
        tables, 0, demand, order, tiers, chiplets, weights, sweeps, chip_s, region_s, trial_s, trial, slots
    )
    value[3] = 0.0
    if scale == 0.0:
        return
    value[3] = seconds_of(potential(weights, scale, chip_s, region_s), scale)
    for i in range(
        pressing_experts(tables, demand, tiers, chiplets, slots, may, weights, scale, chip_s, region_s, push, experts)
    ):
        e = experts[i]
        serve_expert(tables, 0, -1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
        rest = potential(weights, scale, chip_s, region_s)
        for j in range(
            best_targets(
                tables, demand[e], tiers[e], chiplets[e], fits, free_share, place, weights, scale, chip_s, region_s,
                scores, targets,
            )
        ):  # fmt: skip
            tier, chiplet = targets[j] // num_chiplets, targets[j] % num_chiplets
            for slot in range(-1, num_slots):  # -1: nothing leaves
                if slot >= 0 and (tiers[e, slot] < 0 or not leave[e, slot]):
                    continue
                count = without_slot(tiers[e], chiplets[e], slot, new_tiers, new_chiplets)
                if count == num_slots:
                    continue
                new_tiers[count] = tier
                new_chiplets[count] = chiplet
                after = trial_value(
                    tables, demand[e], new_tiers, new_chiplets, rest, weights, scale, chip_s, region_s, trial_s, trial,
                    scratch,
                )  # fmt: skip
                kind = ADD if slot < 0 else MOVE
                if after < value[kind]:
                    value[kind] = after
                    best[kind, 0] = e
                    best[kind, 1] = tier
                    best[kind, 2] = chiplet
                    best[kind, 3] = slot
        serve_expert(tables, 0, 1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
    for i in range(stale_replicas(demand, tiers, slots, leave, served, stale)):
        e, slot = stale[i] // num_slots, stale[i] % num_slots
        serve_expert(tables, 0, -1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
        rest = potential(weights, scale, chip_s, region_s)
        without_slot(tiers[e], chiplets[e], slot, new_tiers, new_chiplets)
        after = trial_value(
            tables, demand[e], new_tiers, new_chiplets, rest, weights, scale, chip_s, region_s, trial_s, trial, scratch
        )
        if after < value[EVICT]:
            value[EVICT] = after
            best[EVICT, 0] = e
            best[EVICT, 1] = tiers[e, slot]
            best[EVICT, 2] = chiplets[e, slot]
            best[EVICT, 3] = slot
        serve_expert(tables, 0, 1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
