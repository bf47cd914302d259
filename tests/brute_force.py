"""The optimum of a tiny window by trying every assignment and every placement, with rules checked one by one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from random_windows import Case


def all_placements(num_experts: int, num_ranks: int) -> list[np.ndarray]:
    """EP rank of each expert, every way (ranks named)."""
    per_rank = num_experts // num_ranks
    ways = []
    for ranks in itertools.product(range(num_ranks), repeat=num_experts):
        if all(ranks.count(p) == per_rank for p in range(num_ranks)):
            ways.append(np.array(ranks))
    return ways


def legal_layouts(case: Case, num_rows: int) -> np.ndarray:
    """int [S, N], cell r*D + d of each sample: all B^N assignments that keep every rule."""
    window, rules, dp = case.window, case.constraints, case.topology.dp
    num_samples, num_cells = window.num_samples, num_rows * dp
    codes = np.arange(num_cells**num_samples)
    cells = codes[:, None] // num_cells ** np.arange(num_samples) % num_cells
    padded = -(-window.lengths // rules.pad_multiple) * rules.pad_multiple
    groups = rules.group_numbers(window.group_ids, num_samples)
    for group in set(() if groups is None else groups.tolist()):
        place = cells % dp if rules.groups == "rank" else cells
        inside = place[:, groups == group]
        cells = cells[(inside == inside[:, :1]).all(axis=1)]
    units = groups if groups is not None and rules.groups != "rank" else np.arange(num_samples)
    keep = np.ones(len(cells), dtype=bool)
    counts = []
    for cell in range(num_cells):
        inside = cells == cell
        counts.append(inside.sum(axis=1))
        keep &= counts[-1] > 0
        fits = inside @ padded <= case.token_cap
        if rules.oversize == "alone":
            num_units = sum((inside[:, units == unit].any(axis=1)).astype(int) for unit in set(units.tolist()))
            fits |= num_units == 1
        keep &= fits
        if rules.max_samples_per_cell is not None:
            keep &= counts[-1] <= rules.max_samples_per_cell
    if rules.equal_samples_per_rank:
        by_rank = np.array(counts).reshape(num_rows, dp, -1).sum(axis=0)
        keep &= (by_rank == by_rank[:1]).all(axis=0)
    return cells[keep]


def least_slowest_shard(case: Case, num_rows: int) -> float:
    """Score's first entry at the optimum over all layouts with ``num_rows`` rows and all placements; inf if none."""
    window, topology, cap, cost = case.window, case.topology, case.token_cap, case.cost
    cells = legal_layouts(case, num_rows)
    if not len(cells):
        return np.inf
    dp, num_shards, num_layers = topology.dp, topology.num_shards, window.num_layers
    attention = np.zeros((num_rows, num_shards, len(cells)))
    demand = np.zeros((num_rows, num_shards, num_layers, len(cells), window.num_experts))
    for row in range(num_rows):
        for shard, ranks in enumerate(topology.shards):
            inside = [cells == row * dp + rank for rank in ranks]
            for stage in cost.stages:
                attention[row, shard] += np.max(
                    [stage.alpha * (m @ window.lengths) / cap + stage.beta * (m @ window.lengths**2) / cap**2
                     for m in inside], axis=0,
                )  # fmt: skip
            together = np.any(inside, axis=0).astype(float)
            for layer in range(num_layers):
                demand[row, shard, layer] = together @ window.demand[:, layer].astype(float)
    num_ranks = topology.ep
    standing = np.arange(window.num_experts) if case.previous is None else case.previous
    standing = np.broadcast_to(standing // (window.num_experts // num_ranks), (num_layers, window.num_experts))
    peaks = []  # per layer, per placement: [R, G, S]
    for layer in range(num_layers):
        ways = all_placements(window.num_experts, num_ranks)
        if case.constraints.max_moved is not None:
            most = case.constraints.max_moved * window.num_experts
            ways = [way for way in ways if (way != standing[layer]).sum() <= most]
        loads = [np.stack([demand[:, :, layer][..., way == p].sum(axis=-1) for p in range(num_ranks)]) for way in ways]
        peaks.append(np.unique(np.array([load.max(axis=0) for load in loads]), axis=0))
    gammas = cost.expert_weights(num_layers)
    best = np.inf
    for picks in itertools.product(*peaks):
        costs = attention + sum(gamma * pick for gamma, pick in zip(gammas, picks, strict=True)) / cap
        slowest = costs.max(axis=1).sum(axis=0) if cost.sync == "row" else costs.sum(axis=0).max(axis=0)
        best = min(best, float(slowest.min()))
    return best
