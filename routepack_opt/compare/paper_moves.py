"""The paper's proposals (routepack.md section 6), compiled, over the state of one annealing chain.

With probability ``guided`` the source row-shard is drawn in proportion to its cost J and the target in proportion to
how far it is below the largest; the atom comes from the straggler of attention (the slowest cell) or of the experts
(heavier of two on the fullest rank of a random layer), in proportion to their shares of J. Else all is uniform.
"""

from __future__ import annotations

import math

import numpy as np

from routepack_opt.solvers.annealing.kernel import kernel
from routepack_opt.solvers.annealing.random import below, uniform
from routepack_opt.solvers.annealing.sample_moves import legal, try_atoms


@kernel
def _atom_of(state, cell, rng):
    """A random atom of a cell (cells are never empty, so the walk ends)."""
    n = state.cell_of.shape[0]
    i = below(rng, n)
    while state.cell_of[i] != cell:
        i += 1
        if i == n:
            i = 0
    return i


@kernel
def _cell_of_shard(grid, x, rng):
    """A random cell of row-shard x."""
    while True:
        cell = grid.cells[x, below(rng, grid.cells.shape[1])]
        if cell >= 0:
            return cell


@kernel
def _heavy(state, rng):
    """A row-shard, drawn in proportion to J."""
    total = 0.0
    for x in range(state.costs.shape[0]):
        total += state.costs[x]
    left = uniform(rng) * total
    for x in range(state.costs.shape[0]):
        left -= state.costs[x]
        if left <= 0.0:
            return x
    return state.costs.shape[0] - 1


@kernel
def _light(state, rng):
    """A row-shard, drawn in proportion to how far J is below the largest (a tenth of the mean distance is added)."""
    num_x = state.costs.shape[0]
    largest = 0.0
    total = 0.0
    for x in range(num_x):
        largest = max(largest, state.costs[x])
        total += state.costs[x]
    extra = 0.1 * (largest - total / num_x) + 1e-12 * largest
    left = uniform(rng) * (num_x * (largest + extra) - total)
    for x in range(num_x):
        left -= largest + extra - state.costs[x]
        if left <= 0.0:
            return x
    return num_x - 1


@kernel
def _straggler(grid, loads, state, x, rng):
    """An atom of row-shard x that its slowest cell, or its fullest rank, suffers from."""
    if uniform(rng) * state.costs[x] < state.attention[x]:
        stage = below(rng, state.stage_cost.shape[1])
        slowest = grid.cells[x, 0]
        for k in range(1, grid.cells.shape[1]):
            cell = grid.cells[x, k]
            if cell >= 0 and state.stage_cost[cell, stage] > state.stage_cost[slowest, stage]:
                slowest = cell
        return _atom_of(state, slowest, rng)
    layer = below(rng, state.loads.shape[2])
    fullest = 0
    for p in range(1, state.loads.shape[1]):
        if state.loads[x, p, layer] > state.loads[x, fullest, layer]:
            fullest = p
    i = _atom_of(state, _cell_of_shard(grid, x, rng), rng)
    other = _atom_of(state, _cell_of_shard(grid, x, rng), rng)
    return other if loads[other, fullest, layer] > loads[i, fullest, layer] else i


@kernel
def paper_steps(atoms, grid, costs, loads, state, scratch, rates, temperature, num_steps, rng, best, best_cell_of):
    """Run ``num_steps`` Metropolis proposals; the best state by energy goes to ``best`` [1] and ``best_cell_of`` [n].

    ``rates`` is float64 [2]: share of relocations, share of guided proposals. The change is taken relative to
    max(|E|, 1). Infeasible proposals count as steps.
    """
    num_cells = grid.shard_row.shape[0]
    n = state.cell_of.shape[0]
    for _ in range(num_steps):
        if uniform(rng) <= rates[1]:
            i = _straggler(grid, loads, state, _heavy(state, rng), rng)
            b = _cell_of_shard(grid, _light(state, rng), rng)
        else:
            i = below(rng, n)
            b = below(rng, num_cells)
        j = -1
        if uniform(rng) > rates[0]:
            j = _atom_of(state, b, rng)
        a = state.cell_of[i]
        if a == b or not legal(atoms, grid, state, i, a, j, b):
            continue
        limit = -temperature * max(abs(state.summary[0]), 1.0) * math.log(uniform(rng))
        try_atoms(atoms, grid, costs, loads, state, scratch, i, a, j, b, limit)
        if state.summary[0] < best[0]:
            best[0] = state.summary[0]
            for k in range(n):
                best_cell_of[k] = state.cell_of[k]


def empty_best(num_atoms: int) -> tuple[np.ndarray, np.ndarray]:
    """``best`` and ``best_cell_of`` before the first step."""
    return np.full(1, np.inf), np.zeros(num_atoms, dtype=np.int64)
