"""Compiled Metropolis swaps of whole cells between row-shards; off by default (docs/annealing.md has their worth)."""

from __future__ import annotations

import math

from routepack_opt.solvers.annealing.kernel import kernel
from routepack_opt.solvers.annealing.random import below, uniform
from routepack_opt.solvers.annealing.sample_moves import attention_after, commit, exact_change, least_change


@kernel
def _delta_of_cells(loads, cell_of, a, b, delta):
    """Per-rank loads of cell b minus those of cell a."""
    delta[:] = 0
    for atom in range(cell_of.shape[0]):
        if cell_of[atom] == b:
            for p in range(delta.shape[0]):
                for layer in range(delta.shape[1]):
                    delta[p, layer] += loads[atom, p, layer]
        elif cell_of[atom] == a:
            for p in range(delta.shape[0]):
                for layer in range(delta.shape[1]):
                    delta[p, layer] -= loads[atom, p, layer]


@kernel
def _try_cells(atoms, grid, costs, loads, state, scratch, a, b, limit):
    """Score swapping all atoms of cells a and b of different row-shards, and take it when within ``limit``.

    Any two cells may be swapped whatever the cap: the way out where full cells block swaps of single atoms.
    """
    x = grid.shard_row[a]
    y = grid.shard_row[b]
    for s in range(scratch.stage_a.shape[0]):
        scratch.stage_a[s] = state.stage_cost[b, s]
        scratch.stage_b[s] = state.stage_cost[a, s]
    scratch.after[0] = attention_after(grid, state, x, a, scratch.stage_a, b, scratch.stage_b)
    scratch.after[2] = attention_after(grid, state, y, a, scratch.stage_a, b, scratch.stage_b)
    d_floor = 0.0
    for atom in range(state.cell_of.shape[0]):
        if state.cell_of[atom] == a:
            d_floor += atoms.floor[atom]
        elif state.cell_of[atom] == b:
            d_floor -= atoms.floor[atom]
    if least_change(grid, state, scratch, x, y, d_floor) > limit:
        return
    _delta_of_cells(loads, state.cell_of, a, b, scratch.delta)
    change = exact_change(grid, costs, state, scratch, x, y)
    if change > limit:
        return
    for atom in range(state.cell_of.shape[0]):
        if state.cell_of[atom] == a:
            state.cell_of[atom] = b
        elif state.cell_of[atom] == b:
            state.cell_of[atom] = a
    _exchange(state.num_atoms, a, b)
    _exchange(state.num_samples, a, b)
    _exchange(state.padded, a, b)
    _exchange(state.tokens, a, b)
    _exchange(state.squares, a, b)
    for s in range(scratch.stage_a.shape[0]):
        state.stage_cost[a, s] = scratch.stage_a[s]
        state.stage_cost[b, s] = scratch.stage_b[s]
    commit(grid, state, scratch, x, y, d_floor, change)


@kernel
def _exchange(values, a, b):
    held = values[a]
    values[a] = values[b]
    values[b] = held


@kernel
def anneal_cells(atoms, grid, costs, loads, state, scratch, temperature, num_steps, rng):
    """Run ``num_steps`` proposals of swapping two cells at one temperature; returns how many were scored.

    Not for layouts whose cells may not change rank (equal sample counts, pinned atoms).
    """
    num_cells = grid.shard_row.shape[0]
    scored = 0
    for _ in range(num_steps):
        a = below(rng, num_cells)
        b = below(rng, num_cells)
        if grid.shard_row[a] != grid.shard_row[b]:
            scored += 1
            limit = -temperature * math.log(uniform(rng))
            _try_cells(atoms, grid, costs, loads, state, scratch, a, b, limit)
    return scored
