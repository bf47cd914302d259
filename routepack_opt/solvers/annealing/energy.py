"""Energy of a matrix of row-shard costs J, and of one with two entries changed.

Energy = (1 - spread) * s0 + spread * mean, with s0 the slowest shard (or the sum of row maxima with
``sync="row"``) and mean the total over shards divided by their number. With one shard both agree. A positive
spread keeps work on the faster shards worth doing: it can be handed to the slowest one later.
Everything here is monotone in J, so lower bounds on J give lower bounds on the energy.
"""

from __future__ import annotations

import numpy as np

from routepack_opt.solvers.annealing.kernel import kernel


@kernel
def full_energy(costs, num_shards, sync_row, spread, shard_sums):
    """Energy of costs [R*G] (row-major); fills shard_sums [G] with sum_r J."""
    num_rows = costs.shape[0] // num_shards
    total = 0.0
    for g in range(num_shards):
        shard_sums[g] = 0.0
    slowest = 0.0
    for r in range(num_rows):
        peak = 0.0
        for g in range(num_shards):
            value = costs[r * num_shards + g]
            shard_sums[g] += value
            total += value
            peak = max(peak, value)
        if sync_row:
            slowest += peak
    if not sync_row:
        for g in range(num_shards):
            slowest = max(slowest, shard_sums[g])
    return (1.0 - spread) * slowest + spread * total / num_shards


@kernel
def energy_change(costs, num_shards, sync_row, spread, shard_sums, x, new_x, y, new_y):
    """Energy change when J[x] and J[y] become new_x and new_y (x may equal y: then new_y is ignored)."""
    dx = new_x - costs[x]
    dy = 0.0 if x == y else new_y - costs[y]
    if num_shards == 1:
        return dx + dy
    mean_change = spread * (dx + dy) / num_shards
    if not sync_row:
        gx = x % num_shards
        gy = y % num_shards
        old = 0.0
        new = 0.0
        for g in range(num_shards):
            value = shard_sums[g]
            old = max(old, value)
            if g == gx:
                value += dx
            if g == gy:
                value += dy
            new = max(new, value)
        return (1.0 - spread) * (new - old) + mean_change
    rx = x // num_shards
    ry = y // num_shards
    change = _row_peak_change(costs, num_shards, rx, x, new_x, y, new_y)
    if ry != rx:
        change += _row_peak_change(costs, num_shards, ry, x, new_x, y, new_y)
    return (1.0 - spread) * change + mean_change


@kernel
def _row_peak_change(costs, num_shards, row, x, new_x, y, new_y):
    old = 0.0
    new = 0.0
    for g in range(num_shards):
        k = row * num_shards + g
        value = costs[k]
        old = max(old, value)
        if k == x:
            value = new_x
        elif k == y:
            value = new_y
        new = max(new, value)
    return new - old


def energy_of(costs: np.ndarray, num_shards: int, sync: str, spread: float) -> float:
    """Energy of J [R, G] from Python, in the same arithmetic."""
    flat = np.ascontiguousarray(costs, dtype=np.float64).ravel()
    return float(full_energy(flat, num_shards, sync == "row", spread, np.zeros(num_shards)))
