"""Compiled Metropolis swaps of experts between ranks, against standing rows.

The second half of the joint chain: rows are fixed, so the expert part of the cost is a sum over layers of the most
loaded rank of every row-shard, and each layer can be improved by itself. Vectors over row-shards run in lanes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from routepack_opt.solvers.annealing.kernel import kernel
from routepack_opt.solvers.annealing.random import below, uniform


class SwapScratch(NamedTuple):
    """Work space of one layer, allocated once; X row-shards, P ranks."""

    vectors: np.ndarray  # int32 [E, X]
    sums: np.ndarray  # int32 [P, X]
    peak: np.ndarray  # int32 [X]
    new_peak: np.ndarray  # int32 [X]
    weight: np.ndarray  # float64 [X]
    shares: np.ndarray  # float64 [E, X], demand over the row-shard's mean rank load
    level: np.ndarray  # float64 [P, X], rank loads over the same
    power: np.ndarray  # float64 [P, X], their twelfth powers
    slope: np.ndarray  # float64 [X]


@kernel
def build_loads(demand, source, rank_of, out, shift):
    """out [n, P, Lp] = loads of atoms by EP rank under rank_of [L, E]; atom i is row source[i] of demand [n, L, E]."""
    n, num_layers, num_experts = demand.shape
    out[:] = 0
    for i in range(n):
        for layer in range(num_layers):
            for e in range(num_experts):
                out[i, rank_of[layer, e], layer] += demand[source[i], layer, e] >> shift


@kernel
def build_expert_rows(demand, source, cell_of, shard_row, out, shift):
    """out [X, L, E] = demand of every row-shard."""
    n, num_layers, num_experts = demand.shape
    out[:] = 0
    for i in range(n):
        x = shard_row[cell_of[i]]
        for layer in range(num_layers):
            for e in range(num_experts):
                out[x, layer, e] += demand[source[i], layer, e] >> shift


@kernel
def swap_experts(
    expert_rows,
    rank_of,
    loads,
    costs,
    num_shards,
    sync_row,
    spread,
    row_costs,
    shard_sums,
    temperature,
    steps_per_layer,
    home,
    move_budget,
    scratch,
    rng,
):
    """Metropolis swaps of two experts of one layer on different ranks; rows stand still.

    Parameters
    ----------
    expert_rows
        int32 [X, L, E].
    rank_of
        int64 [L, E], changed in place.
    loads
        int32 [X, P, Lp], kept in step with rank_of.
    row_costs, shard_sums
        float64 [X] and [G], J and its sums; kept in step.
    home, move_budget
        int64 [L, E] and [L]: at most move_budget[l] experts of layer l may be away from home (-1: any number).

    Returns
    -------
    Number of accepted swaps.
    """
    num_x, num_layers, num_experts = expert_rows.shape
    num_ranks = loads.shape[1]
    vectors = scratch.vectors
    sums = scratch.sums
    peak = scratch.peak
    new_peak = scratch.new_peak
    weight = scratch.weight
    accepted = 0
    for layer in range(num_layers):
        gain = costs.gamma[layer] / costs.cap
        if gain == 0.0:
            continue
        for x in range(num_x):
            peak[x] = 0
            for e in range(num_experts):
                vectors[e, x] = expert_rows[x, layer, e]
            for p in range(num_ranks):
                sums[p, x] = loads[x, p, layer]
                peak[x] = max(peak[x], sums[p, x])
        away = _num_away(rank_of, home, layer)
        # how much a unit of J[x] weighs in the energy now; the shard or row that is slowest carries the rest
        _energy_weights(row_costs, num_shards, sync_row, spread, shard_sums, weight)
        for _ in range(steps_per_layer):
            e = below(rng, num_experts)
            f = below(rng, num_experts)
            p = rank_of[layer, e]
            q = rank_of[layer, f]
            if p == q:
                continue
            change_away = _change_away(home, layer, e, f, p, q)
            if change_away > 0 and move_budget[layer] >= 0 and away + change_away > move_budget[layer]:
                continue
            for x in range(num_x):
                d = vectors[f, x] - vectors[e, x]
                new_peak[x] = max(np.int32(sums[p, x] + d), np.int32(sums[q, x] - d))
            for r in range(num_ranks):
                if r != p and r != q:
                    for x in range(num_x):
                        new_peak[x] = max(new_peak[x], sums[r, x])
            change = 0.0
            for x in range(num_x):
                change += weight[x] * (new_peak[x] - peak[x])
            change *= gain
            if change > 0.0 and (temperature <= 0.0 or change > -temperature * math.log(uniform(rng))):
                continue
            accepted += 1
            away += change_away
            rank_of[layer, e] = q
            rank_of[layer, f] = p
            for x in range(num_x):
                d = vectors[f, x] - vectors[e, x]
                sums[p, x] += d
                sums[q, x] -= d
                step = gain * (new_peak[x] - peak[x])
                row_costs[x] += step
                shard_sums[x % num_shards] += step
                peak[x] = new_peak[x]
        for x in range(num_x):
            for p in range(num_ranks):
                loads[x, p, layer] = sums[p, x]
    return accepted


@kernel
def level_experts(
    expert_rows,
    rank_of,
    loads,
    costs,
    num_shards,
    sync_row,
    spread,
    row_costs,
    shard_sums,
    temperature,
    steps_per_layer,
    home,
    move_budget,
    scratch,
    rng,
):
    """Like :func:`swap_experts`, on a smooth stand-in for the maximum; returns the number of accepted swaps.

    A row-shard's peak is replaced by (m / 12) sum_p (W_p / m)^12, m its mean: its slope is 1 for a rank at the mean
    and grows with the excess, so that swaps below the peak count too, where the maximum itself is flat. A change
    needs only the two ranks of the swap. ``loads``, ``row_costs`` and ``shard_sums`` are left as they were: the
    caller recomputes them.
    """
    num_x, num_layers, num_experts = expert_rows.shape
    num_ranks = loads.shape[1]
    shares = scratch.shares
    level = scratch.level
    power = scratch.power
    weight = scratch.weight
    slope = scratch.slope
    accepted = 0
    _energy_weights(row_costs, num_shards, sync_row, spread, shard_sums, weight)
    for layer in range(num_layers):
        gain = costs.gamma[layer] / costs.cap
        if gain == 0.0:
            continue
        for x in range(num_x):
            total = 0
            for p in range(num_ranks):
                total += loads[x, p, layer]
            mean = max(1.0, total / num_ranks)
            slope[x] = weight[x] * gain * mean / 12.0
            for p in range(num_ranks):
                level[p, x] = loads[x, p, layer] / mean
                power[p, x] = _power12(level[p, x])
            for e in range(num_experts):
                shares[e, x] = expert_rows[x, layer, e] / mean
        away = _num_away(rank_of, home, layer)
        for _ in range(steps_per_layer):
            e = below(rng, num_experts)
            f = below(rng, num_experts)
            p = rank_of[layer, e]
            q = rank_of[layer, f]
            if p == q:
                continue
            change_away = _change_away(home, layer, e, f, p, q)
            if change_away > 0 and move_budget[layer] >= 0 and away + change_away > move_budget[layer]:
                continue
            change = 0.0
            for x in range(num_x):
                d = shares[f, x] - shares[e, x]
                change += slope[x] * (_power12(level[p, x] + d) + _power12(level[q, x] - d) - power[p, x] - power[q, x])
            if change > 0.0 and (temperature <= 0.0 or change > -temperature * math.log(uniform(rng))):
                continue
            accepted += 1
            away += change_away
            rank_of[layer, e] = q
            rank_of[layer, f] = p
            for x in range(num_x):
                d = shares[f, x] - shares[e, x]
                level[p, x] += d
                level[q, x] -= d
                power[p, x] = _power12(level[p, x])
                power[q, x] = _power12(level[q, x])
    return accepted


@kernel
def _power12(value):
    square = value * value
    fourth = square * square
    return fourth * fourth * fourth


@kernel
def _num_away(rank_of, home, layer):
    away = 0
    for e in range(home.shape[1]):
        if rank_of[layer, e] != home[layer, e]:
            away += 1
    return away


@kernel
def _change_away(home, layer, e, f, p, q):
    """How many more experts are away from home once e (on rank p) and f (on q) trade places."""
    home_e = home[layer, e]
    home_f = home[layer, f]
    return (q != home_e) - (p != home_e) + (p != home_f) - (q != home_f)


@kernel
def _energy_weights(row_costs, num_shards, sync_row, spread, shard_sums, weight):
    num_x = row_costs.shape[0]
    share = spread / num_shards
    for x in range(num_x):
        weight[x] = share
    if sync_row:
        for row in range(num_x // num_shards):
            best = row * num_shards
            for g in range(1, num_shards):
                if row_costs[row * num_shards + g] > row_costs[best]:
                    best = row * num_shards + g
            weight[best] += 1.0 - spread
        return
    slowest = 0
    for g in range(1, num_shards):
        if shard_sums[g] > shard_sums[slowest]:
            slowest = g
    for x in range(num_x):
        if x % num_shards == slowest:
            weight[x] += 1.0 - spread
