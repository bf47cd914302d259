"""Kernel of the candidates: edits of one layer worth a look, the mask of legal ones, and what each looks like.

Shapes as in ``stage_kernels``. Demand is the layer's forecast.
"""

from __future__ import annotations

import numpy as np

from routepack_opt.residency.mapping.balance_kernels import balance_layer, power8, serve_expert, split_expert
from routepack_opt.residency.simulator.stage_kernels import kernel

PROMOTE, RETAIN, DEMOTE, EVICT = 1, 2, 3, 4  # kinds; 0 is no-op
MAX_EXPERTS = 6  # that press the layer's busiest chiplets and regions
MAX_TARGETS = 4  # places of each, by the location score
MAX_STALE = 3  # replicas that serve least: evict or retain
MAX_COLD = 2  # coldest experts that lie in a fast tier: demote
MAX_EDITS = 2 * MAX_EXPERTS * MAX_TARGETS + 2 * MAX_STALE + MAX_COLD
# columns of an edit
KIND, EXPERT, TIER, CHIPLET, SLOT, LEGAL = range(6)
# what the kernel measures of an edit, in units that do not depend on model or machine
(
    HOT, VOLATILITY, ENTROPY, COPIES, AGE, SERVED, TARGET_TIER, SOURCE_TIER, TARGET_LOAD, TARGET_BANK, SOURCE_LOAD,
    SOURCE_BANK, DISTANCE, OTHERS, FREE, SCARCITY, COPY_COST, GAIN, PEAK_GAIN, ROOM_GAIN,
) = range(20)  # fmt: skip
NUM_MEASURES = 20


@kernel
def soft_seconds(scale, chip_s, region_s):  # type: ignore[no-untyped-def]
    """8-norm of all service times, in s: near-busiest places count too."""
    total = 0.0
    for d in range(len(chip_s)):
        total += power8(chip_s[d] * scale)
    for g in range(len(region_s)):
        total += power8(region_s[g] * scale)
    return total**0.125 / scale


@kernel
def peak_seconds(chip_s, region_s):  # type: ignore[no-untyped-def]
    """The busiest chiplet or region, in s."""
    peak = 0.0
    for d in range(len(chip_s)):
        peak = max(peak, chip_s[d])
    for g in range(len(region_s)):
        peak = max(peak, region_s[g])
    return peak


@kernel
def tokens_served(demand, tiers, slots, served):  # type: ignore[no-untyped-def]
    """Fill served [E, R]: demand by the replica that serves it."""
    for e in range(tiers.shape[0]):
        for slot in range(tiers.shape[1]):
            served[e, slot] = 0.0
        for c in range(demand.shape[1]):
            if demand[e, c] > 0:
                served[e, slots[e, c]] += demand[e, c]


@kernel
def largest(values, chosen):  # type: ignore[no-untyped-def]
    """Indices of the largest finite values, largest first, first index first among equals; returns how many.

    ``values`` is used up.
    """
    count = 0
    while count < len(chosen):
        best = -1
        for i in range(len(values)):
            if values[i] > -np.inf and (best < 0 or values[i] > values[best]):
                best = i
        if best < 0:
            break
        chosen[count] = best
        values[best] = -np.inf
        count += 1
    return count


@kernel
def pressing(tables, demand, tiers, chiplets, slots, scale, chip_s, region_s, push):  # type: ignore[no-untyped-def]
    """Fill push [E]: by how much each expert raises the layer's soft time, -inf where nothing is asked of it."""
    for e in range(demand.shape[0]):
        push[e] = -np.inf
        used = 0
        total = 0.0
        for c in range(demand.shape[1]):
            if demand[e, c] > 0:
                d = chiplets[e, slots[e, c]]
                load = max(chip_s[d] * scale, 1e-9)
                total += demand[e, c] * tables.expert_ops / tables.chiplet_ops[d] * power8(load) / load
                used |= 1 << slots[e, c]
        for slot in range(tiers.shape[1]):
            if (used >> slot) & 1:
                g = tables.region_of[tiers[e, slot], chiplets[e, slot]]
                load = max(region_s[g] * scale, 1e-9)
                total += tables.expert_bytes[0] / tables.region_bandwidth[g] * power8(load) / load
        if used:
            push[e] = total


@kernel
def travel_parts(tables, demand, tiers, chiplets, scale, chiplet):  # type: ignore[no-untyped-def]
    """Source distance of a replica at a chiplet and its distance to the expert's replicas, in units of 1 / scale."""
    links = max(len(tables.link_bandwidth), 1)
    total, away, near = 0.0, 0.0, np.inf
    for s in range(len(demand)):
        total += demand[s]
        inverse = tables.route_inverse[s, chiplet] + tables.route_inverse[chiplet, s]
        away += demand[s] * tables.token_bytes * inverse
    for slot in range(len(tiers)):
        if tiers[slot] >= 0:
            near = min(near, tables.route_inverse[chiplets[slot], chiplet] * tables.token_bytes * total)
    return scale * away / links, scale * near / links


@kernel
def place_scores(tables, demand, tiers, chiplets, scale, chip_s, region_s, scarcity, scores):  # type: ignore[no-untyped-def]
    """Location scores of one expert's next replica, [T * C], negated so that the best is the largest; -inf: no place.

    Terms in units of the layer's time: source distance + chiplet queue + bank use + tier scarcity - distance to its
    other replicas.
    """
    num_tiers, num_chiplets = tables.region_of.shape
    total = 0.0
    for c in range(num_chiplets):
        total += demand[c]
    for c in range(num_chiplets):
        away, near = travel_parts(tables, demand, tiers, chiplets, scale, c)
        queue = scale * (chip_s[c] + 0.5 * total * tables.expert_ops / tables.chiplet_ops[c])
        for t in range(num_tiers):
            g = tables.region_of[t, c]
            scores[t * num_chiplets + c] = -np.inf
            if g >= 0:
                bank = scale * (region_s[g] + tables.expert_bytes[0] / tables.region_bandwidth[g])
                scores[t * num_chiplets + c] = near - away - queue - bank - 0.1 * scarcity[t]


@kernel
def replace_slot(tiers, chiplets, slot, tier, chiplet, new_tiers, new_chiplets):  # type: ignore[no-untyped-def]
    """Copy an expert's replicas without ``slot`` (-1: all stay) and with one more (tier -1: none); returns how many."""
    count = 0
    for r in range(len(tiers)):
        if r != slot and tiers[r] >= 0:
            new_tiers[count] = tiers[r]
            new_chiplets[count] = chiplets[r]
            count += 1
    if tier >= 0 and count < len(tiers):
        new_tiers[count] = tier
        new_chiplets[count] = chiplet
        count += 1
    for r in range(count, len(tiers)):
        new_tiers[r] = -1
        new_chiplets[r] = -1
    return count


@kernel
def leaves_legally(tiers, ages, slot, least_age, replaced):  # type: ignore[no-untyped-def]
    """Whether a replica may leave: A_min, and never the last copy unless one takes its place."""
    if slot < 0 or tiers[slot] < 0 or ages[slot] < least_age:
        return False
    return replaced or (len(tiers) > 1 and tiers[1] >= 0)


@kernel
def comes_legally(tables, tiers, chiplets, slot, tier, chiplet, free, budget):  # type: ignore[no-untyped-def]
    """Whether a copy may come to (tier, chiplet); ``slot`` leaves for it, -1 nothing does."""
    g = tables.region_of[tier, chiplet]
    size = tables.expert_bytes[0]
    if g < 0 or free[g] < size or (slot < 0 and budget < size):
        return False
    count = 0
    for r in range(len(tiers)):
        if tiers[r] >= 0:
            count += 1
            if tiers[r] == tier and chiplets[r] == chiplet:
                return False
    return count < len(tiers) + (slot >= 0)


@kernel
def layer_edits(  # type: ignore[no-untyped-def]
    tables, demand, order, tiers, chiplets, ages, busy, hot, volatility, entropy, free, budget, least_age, scarcity,
    weights, sweeps, edits, measures, times,
):  # fmt: skip
    """Candidate edits of one layer on its forecast demand int32 [E, C].

    Parameters: replicas tiers, chiplets, ages [E, R] (ages in windows); busy [E]: a copy of the expert is under way or
    was retained; hot, volatility, entropy [E]; free [G] bytes, below 0 where no expert ever fits; budget bytes left;
    least_age A_min; scarcity [T]; weights [3] of the map. Fills edits int64 [MAX_EDITS, 6], measures float64
    [MAX_EDITS, NUM_MEASURES] and times [2]: soft and peak seconds as it is. Returns how many, 0 without demand.
    """
    num_experts, num_slots = tiers.shape
    num_tiers, num_chiplets = tables.region_of.shape
    chip_s, region_s = np.zeros(num_chiplets), np.zeros(len(tables.region_bandwidth))
    trial_s, trial = np.zeros(num_chiplets), np.zeros(num_chiplets, dtype=np.int8)
    scratch = np.zeros(num_chiplets, dtype=np.int8)
    slots, served = np.zeros((num_experts, num_chiplets), dtype=np.int8), np.zeros((num_experts, num_slots))
    scores = np.zeros(num_tiers * num_chiplets)
    experts, targets = np.zeros(MAX_EXPERTS, dtype=np.int64), np.zeros(MAX_TARGETS, dtype=np.int64)
    stale, cold = np.zeros(MAX_STALE, dtype=np.int64), np.zeros(MAX_COLD, dtype=np.int64)
    values, push = np.zeros(num_experts * num_slots), np.zeros(num_experts)
    new_tiers, new_chiplets = np.zeros(num_slots, dtype=np.int8), np.zeros(num_slots, dtype=np.int16)
    times[:] = 0.0
    scale = balance_layer(
        tables, 0, demand, order, tiers, chiplets, weights, sweeps, chip_s, region_s, trial_s, trial, slots
    )
    if scale == 0.0:
        return 0
    times[0] = soft_seconds(scale, chip_s, region_s)
    times[1] = peak_seconds(chip_s, region_s)
    tokens_served(demand, tiers, slots, served)
    mean_hot = 1e-12
    for e in range(num_experts):
        mean_hot += hot[e] / num_experts

    # what may come: the experts that press, each to its best places, with and without its idlest replica leaving
    count = 0
    roomy = free.max() >= tables.expert_bytes[0]
    pressing(tables, demand, tiers, chiplets, slots, scale, chip_s, region_s, push)
    num_pressing = largest(push, experts)
    for i in range(num_pressing):
        e = experts[i]
        idlest = -1
        for slot in range(num_slots):
            if leaves_legally(tiers[e], ages[e], slot, least_age, True) and (
                idlest < 0 or served[e, slot] < served[e, idlest]
            ):
                idlest = slot
        serve_expert(tables, 0, -1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
        place_scores(tables, demand[e], tiers[e], chiplets[e], scale, chip_s, region_s, scarcity, scores)
        serve_expert(tables, 0, 1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
        for at in range(len(scores)):  # full regions would crowd out places with room, where there are any
            g = tables.region_of[at // num_chiplets, at % num_chiplets]
            if g >= 0 and (free[g] < 0.0 or (roomy and free[g] < tables.expert_bytes[0])):
                scores[at] = -np.inf
        for j in range(largest(scores, targets)):
            tier, chiplet = targets[j] // num_chiplets, targets[j] % num_chiplets
            for moves in range(2):
                slot = idlest if moves else -1
                if moves and idlest < 0:
                    continue
                edits[count, KIND] = DEMOTE if moves and tier > tiers[e, slot] else PROMOTE
                edits[count, EXPERT], edits[count, TIER], edits[count, CHIPLET] = e, tier, chiplet
                edits[count, SLOT] = slot
                count += 1

    # what may leave: the replicas that serve least, of experts with several; each may be retained instead
    for e in range(num_experts):
        several = num_slots > 1 and tiers[e, 1] >= 0
        for slot in range(num_slots):
            values[e * num_slots + slot] = -served[e, slot] if several and tiers[e, slot] >= 0 else -np.inf
    for i in range(largest(values, stale)):
        e, slot = stale[i] // num_slots, stale[i] % num_slots
        for kind in (EVICT, RETAIN):
            edits[count, KIND] = kind
            edits[count, EXPERT], edits[count, TIER], edits[count, CHIPLET] = e, tiers[e, slot], chiplets[e, slot]
            edits[count, SLOT] = slot
            count += 1

    # what may make room in a fast tier: the coldest experts there, to the tier below
    for e in range(num_experts):
        push[e] = -hot[e] if 0 <= tiers[e, 0] < num_tiers - 1 else -np.inf
    for i in range(largest(push, cold)):
        e = cold[i]
        tier = tiers[e, 0] + 1
        if tables.region_of[tier, chiplets[e, 0]] < 0:
            continue
        edits[count, KIND] = DEMOTE
        edits[count, EXPERT], edits[count, TIER], edits[count, CHIPLET] = e, tier, chiplets[e, 0]
        edits[count, SLOT] = 0
        count += 1

    for k in range(count):
        measure_edit(
            tables, demand, tiers, chiplets, ages, busy, hot, volatility, entropy, free, budget, least_age, scarcity,
            weights, slots, served, scale, mean_hot, chip_s, region_s, trial_s, trial, scratch,
            new_tiers, new_chiplets, times, edits[k], measures[k],
        )  # fmt: skip
        if edits[k, KIND] == EVICT and not (roomy and budget >= tables.expert_bytes[0]):
            measures[k, ROOM_GAIN] = room_gain(
                tables, demand, tiers, chiplets, busy, weights, slots, scale, chip_s, region_s, trial_s, trial, scratch,
                new_tiers, new_chiplets, times, edits[k], experts[:num_pressing],
            )  # fmt: skip
    return count


@kernel
def room_gain(  # type: ignore[no-untyped-def]
    tables, demand, tiers, chiplets, busy, weights, slots, scale, chip_s, region_s, trial_s, trial, scratch, new_tiers,
    new_chiplets, times, edit, experts,
):  # fmt: skip
    """Best gain of one more replica of a pressing expert in the room that an eviction makes; at least 0."""
    num_chiplets, num_slots = demand.shape[1], tiers.shape[1]
    tier, region = edit[TIER], tables.region_of[edit[TIER], edit[CHIPLET]]
    best = 0.0
    for i in range(len(experts)):
        e = experts[i]
        if e == edit[EXPERT] or busy[e] or tiers[e, num_slots - 1] >= 0:
            continue
        place = -1
        for c in range(num_chiplets):
            here = False
            for slot in range(num_slots):
                here |= tiers[e, slot] >= 0 and chiplets[e, slot] == c
            if tables.region_of[tier, c] == region and not here and (place < 0 or chip_s[c] < chip_s[place]):
                place = c
        if place < 0:
            continue
        serve_expert(tables, 0, -1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
        replace_slot(tiers[e], chiplets[e], -1, tier, place, new_tiers, new_chiplets)
        split_expert(
            tables, 0, demand[e], new_tiers, new_chiplets, weights, scale, False, chip_s, region_s, trial_s, trial,
            scratch,
        )  # fmt: skip
        serve_expert(tables, 0, 1.0, demand[e], new_tiers, new_chiplets, scratch, chip_s, region_s)
        best = max(best, (times[0] - soft_seconds(scale, chip_s, region_s)) / times[0])
        serve_expert(tables, 0, -1.0, demand[e], new_tiers, new_chiplets, scratch, chip_s, region_s)
        serve_expert(tables, 0, 1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
    return best


@kernel
def measure_edit(  # type: ignore[no-untyped-def]
    tables, demand, tiers, chiplets, ages, busy, hot, volatility, entropy, free, budget, least_age, scarcity, weights,
    slots, served, scale, mean_hot, chip_s, region_s, trial_s, trial, scratch, new_tiers, new_chiplets, times,
    edit, out,
):  # fmt: skip
    """Fill the legality of one edit and its measures out [NUM_MEASURES]; loads are left as found but for rounding."""
    num_tiers, num_chiplets = tables.region_of.shape
    kind, e, tier, chiplet, slot = edit[KIND], edit[EXPERT], edit[TIER], edit[CHIPLET], edit[SLOT]
    copies = kind in (PROMOTE, DEMOTE)
    legal = not busy[e]
    if copies:
        legal = legal and comes_legally(tables, tiers[e], chiplets[e], slot, tier, chiplet, free, budget)
    if slot >= 0 and kind != RETAIN:
        legal = legal and leaves_legally(tiers[e], ages[e], slot, least_age, copies)
    edit[LEGAL] = legal
    asked = 0.0
    count = 0
    for c in range(num_chiplets):
        asked += demand[e, c]
    for r in range(tiers.shape[1]):
        count += tiers[e, r] >= 0
    deepest = max(num_tiers - 1, 1)
    out[:] = 0.0
    out[HOT] = np.log2(1.0 + hot[e] / mean_hot) / 4.0
    out[VOLATILITY] = min(volatility[e] / max(hot[e], 1e-9), 2.0)
    out[ENTROPY] = entropy[e]
    out[COPIES] = count / tiers.shape[1]
    if slot >= 0:
        g = tables.region_of[tiers[e, slot], chiplets[e, slot]]
        out[AGE] = np.log2(1.0 + max(ages[e, slot], 0)) / 8.0
        out[SERVED] = served[e, slot] / max(asked, 1e-9)
        out[SOURCE_TIER] = tiers[e, slot] / deepest
        out[SOURCE_LOAD] = chip_s[chiplets[e, slot]] * scale
        out[SOURCE_BANK] = region_s[g] * scale
    serve_expert(tables, 0, -1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
    if copies:
        g = tables.region_of[tier, chiplet]
        out[TARGET_TIER] = tier / deepest
        out[TARGET_LOAD] = chip_s[chiplet] * scale
        out[TARGET_BANK] = region_s[g] * scale
        away, near = travel_parts(tables, demand[e], tiers[e], chiplets[e], scale, chiplet)
        out[DISTANCE] = min(away, 4.0)
        out[OTHERS] = min(near, 4.0)
        out[FREE] = min(free[g] / tables.expert_bytes[0], 8.0) / 8.0
        out[SCARCITY] = scarcity[tier]
        slowest = tables.region_bandwidth[g]
        for r in range(count):
            source = tables.region_of[tiers[e, r], chiplets[e, r]]
            slowest = min(slowest, tables.region_bandwidth[source])
        out[COPY_COST] = min(tables.expert_bytes[0] / slowest / times[1], 4.0)
    if kind != RETAIN and asked > 0.0:
        new_count = replace_slot(tiers[e], chiplets[e], slot, tier if copies else -1, chiplet, new_tiers, new_chiplets)
        if new_count > 0:
            split_expert(
                tables, 0, demand[e], new_tiers, new_chiplets, weights, scale, False, chip_s, region_s, trial_s, trial,
                scratch,
            )  # fmt: skip
            serve_expert(tables, 0, 1.0, demand[e], new_tiers, new_chiplets, scratch, chip_s, region_s)
            out[GAIN] = (times[0] - soft_seconds(scale, chip_s, region_s)) / times[0]
            out[PEAK_GAIN] = (times[1] - peak_seconds(chip_s, region_s)) / times[1]
            serve_expert(tables, 0, -1.0, demand[e], new_tiers, new_chiplets, scratch, chip_s, region_s)
    serve_expert(tables, 0, 1.0, demand[e], tiers[e], chiplets[e], slots[e], chip_s, region_s)
