"""Compiled Metropolis moves of atoms between cells, scored incrementally.

Knows arrays only: atoms with token counts and per-rank loads, cells, row-shards. A row-shard x is one row of one
EDP shard; its cost is J[x] = sum over stages of its slowest cell + sum over layers of its most loaded rank.
Loads are int32 laid out [.., P, Lp] with the layer innermost, so that maxima over ranks run in vector lanes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from routepack_opt.solvers.annealing.energy import energy_change, full_energy
from routepack_opt.solvers.annealing.kernel import kernel
from routepack_opt.solvers.annealing.random import below, uniform


class Atoms(NamedTuple):
    """What is moved: n atoms (a sample, or an atomic group)."""

    padded: np.ndarray  # int64 [n], tokens the cap counts
    tokens: np.ndarray  # int64 [n], true tokens
    squares: np.ndarray  # int64 [n], sum of squared lengths
    samples: np.ndarray  # int64 [n]
    pinned: np.ndarray  # uint8 [n], 1 = may not change its DP rank
    order: np.ndarray  # int64 [n], atoms by padded length
    position: np.ndarray  # int64 [n], inverse of order
    floor: np.ndarray  # float64 [n], expert cost of the atom if every layer were perfectly balanced


class Grid(NamedTuple):
    """Where atoms go: B = R*D cells in R*G row-shards."""

    shard_row: np.ndarray  # int64 [B], row-shard of each cell
    rank: np.ndarray  # int64 [B], DP rank of each cell
    cells: np.ndarray  # int64 [R*G, m_max], cells of each row-shard, -1 padded
    num_shards: int
    cap: int
    max_samples: int
    equal_samples: bool
    sync_row: bool
    spread: float


class Costs(NamedTuple):
    """Cost coefficients."""

    alpha: np.ndarray  # float64 [S]
    beta: np.ndarray  # float64 [S]
    gamma: np.ndarray  # float64 [Lp], expert weight of each layer, 0 on padding
    uniform_gamma: bool
    cap: float


class Moves(NamedTuple):
    """How proposals are drawn; the rest are swaps of two atoms of similar length."""

    relocate: float  # share of relocations of one atom
    swap_cells: float  # share of swaps of two whole cells of different row-shards
    guided: float  # share of proposals whose first atom comes from the slowest cell of a row-shard


class State(NamedTuple):
    """One layout, with everything derived from it. ``summary`` is float64 [2]: energy, accepted moves."""

    cell_of: np.ndarray  # int64 [n]
    num_atoms: np.ndarray  # int64 [B]
    num_samples: np.ndarray  # int64 [B]
    padded: np.ndarray  # int64 [B]
    tokens: np.ndarray  # int64 [B]
    squares: np.ndarray  # int64 [B]
    stage_cost: np.ndarray  # float64 [B, S]
    loads: np.ndarray  # int32 [R*G, P, Lp]
    attention: np.ndarray  # float64 [R*G]
    experts: np.ndarray  # float64 [R*G]
    floor: np.ndarray  # float64 [R*G], experts if every layer were perfectly balanced
    costs: np.ndarray  # float64 [R*G]
    shard_sums: np.ndarray  # float64 [G]
    summary: np.ndarray  # float64 [2]


class Scratch(NamedTuple):
    """Work space of one proposal, allocated once."""

    peaks_x: np.ndarray  # int32 [Lp]
    peaks_y: np.ndarray  # int32 [Lp]
    delta: np.ndarray  # int32 [P, Lp], what enters row-shard x and leaves y
    stage_a: np.ndarray  # float64 [S]
    stage_b: np.ndarray  # float64 [S]
    after: np.ndarray  # float64 [4], attention and expert cost of x, then of y, after the proposal


@kernel
def weighted_peaks(peaks, costs):
    """(1/C) sum_l gamma_l peaks[l]; integer sum first when all gammas agree, as the exact evaluator does."""
    if costs.uniform_gamma:
        total = 0
        for layer in range(peaks.shape[0]):
            total += peaks[layer]
        return costs.gamma[0] * total / costs.cap
    weighted = 0.0
    for layer in range(peaks.shape[0]):
        weighted += peaks[layer] * costs.gamma[layer]
    return weighted / costs.cap


@kernel
def _delta_of_atoms(loads, enters, leaves, delta):
    """Per-rank loads of atom ``enters`` (-1: none) minus those of atom ``leaves``."""
    num_ranks, num_layers = delta.shape
    if enters >= 0:
        for p in range(num_ranks):
            for layer in range(num_layers):
                delta[p, layer] = loads[enters, p, layer] - loads[leaves, p, layer]
    else:
        for p in range(num_ranks):
            for layer in range(num_layers):
                delta[p, layer] = -loads[leaves, p, layer]


@kernel
def _peaks_after(state_loads, x, y, delta, peaks_x, peaks_y):
    """Most loaded rank of every layer of row-shards x and y once ``delta`` moved from y to x."""
    num_ranks, num_layers = delta.shape
    for layer in range(num_layers):
        peaks_x[layer] = state_loads[x, 0, layer] + delta[0, layer]
        peaks_y[layer] = state_loads[y, 0, layer] - delta[0, layer]
    for p in range(1, num_ranks):
        for layer in range(num_layers):
            d = delta[p, layer]
            peaks_x[layer] = max(peaks_x[layer], np.int32(state_loads[x, p, layer] + d))
            peaks_y[layer] = max(peaks_y[layer], np.int32(state_loads[y, p, layer] - d))


@kernel
def _stage_costs(tokens, squares, costs, out):
    t = tokens / costs.cap
    q = squares / (costs.cap * costs.cap)
    for s in range(costs.alpha.shape[0]):
        out[s] = costs.alpha[s] * t + costs.beta[s] * q


@kernel
def attention_after(grid, state, x, cell_a, new_a, cell_b, new_b):
    """Attention cost of row-shard x when cells a and b (where they belong to x) have the given stage costs."""
    total = 0.0
    for s in range(new_a.shape[0]):
        peak = 0.0
        for k in range(grid.cells.shape[1]):
            cell = grid.cells[x, k]
            if cell < 0:
                break
            if cell == cell_a:
                value = new_a[s]
            elif cell == cell_b:
                value = new_b[s]
            else:
                value = state.stage_cost[cell, s]
            peak = max(peak, value)
        total += peak
    return total


@kernel
def recompute(atoms, grid, costs, loads, state, scratch):
    """Fill everything in ``state`` from ``state.cell_of``: the slow, obviously right path."""
    state.num_atoms[:] = 0
    state.num_samples[:] = 0
    state.padded[:] = 0
    state.tokens[:] = 0
    state.squares[:] = 0
    state.loads[:] = 0
    state.floor[:] = 0.0
    for atom in range(atoms.padded.shape[0]):
        cell = state.cell_of[atom]
        x = grid.shard_row[cell]
        state.num_atoms[cell] += 1
        state.num_samples[cell] += atoms.samples[atom]
        state.padded[cell] += atoms.padded[atom]
        state.tokens[cell] += atoms.tokens[atom]
        state.squares[cell] += atoms.squares[atom]
        state.floor[x] += atoms.floor[atom]
        for p in range(loads.shape[1]):
            for layer in range(loads.shape[2]):
                state.loads[x, p, layer] += loads[atom, p, layer]
    for cell in range(grid.shard_row.shape[0]):
        _stage_costs(state.tokens[cell], state.squares[cell], costs, state.stage_cost[cell])
    scratch.delta[:] = 0
    for x in range(state.costs.shape[0]):
        state.attention[x] = attention_after(grid, state, x, -1, scratch.stage_a, -1, scratch.stage_b)
        _peaks_after(state.loads, x, x, scratch.delta, scratch.peaks_x, scratch.peaks_y)
        state.experts[x] = weighted_peaks(scratch.peaks_x, costs)
        state.costs[x] = state.attention[x] + state.experts[x]
    state.summary[0] = full_energy(state.costs, grid.num_shards, grid.sync_row, grid.spread, state.shard_sums)


@kernel
def _fits(grid, padded, samples, num_atoms):
    """Cell rule: within the cap, or a single (oversize) atom; never empty; at most max_samples."""
    return (padded <= grid.cap or num_atoms == 1) and num_atoms >= 1 and samples <= grid.max_samples


@kernel
def _draw_first(grid, state, guided, rng):
    """An atom: uniform, or with probability ``guided`` one of the slowest cell of a random row-shard."""
    n = state.cell_of.shape[0]
    i = below(rng, n)
    if guided == 0.0 or uniform(rng) >= guided:
        return i
    x = below(rng, state.costs.shape[0])
    stage = below(rng, state.stage_cost.shape[1])
    slowest = grid.cells[x, 0]
    for k in range(1, grid.cells.shape[1]):
        cell = grid.cells[x, k]
        if cell >= 0 and state.stage_cost[cell, stage] > state.stage_cost[slowest, stage]:
            slowest = cell
    while state.cell_of[i] != slowest:  # cells are never empty, so this ends
        i += 1
        if i == n:
            i = 0
    return i


@kernel
def _draw_partner(atoms, i, rng):
    """An atom at a log-uniform distance in length order: partners of like length fit more often in full cells."""
    n = atoms.order.shape[0]
    reach = np.int64(math.exp(uniform(rng) * math.log(n)))
    k = atoms.position[i] + (reach if uniform(rng) < 0.5 else -reach)
    if k < 0 or k >= n:
        k = below(rng, n)
    return atoms.order[k]


@kernel
def legal(atoms, grid, state, i, a, j, b):
    """Whether atom i may go from cell a to b, in exchange for atom j (-1: for nothing)."""
    d_padded = atoms.padded[i]
    d_samples = atoms.samples[i]
    d_atoms = 1
    pinned = atoms.pinned[i]
    if j >= 0:
        d_padded -= atoms.padded[j]
        d_samples -= atoms.samples[j]
        d_atoms = 0
        pinned |= atoms.pinned[j]
    if grid.rank[a] != grid.rank[b] and (pinned or (grid.equal_samples and d_samples != 0)):
        return False
    return _fits(
        grid, state.padded[b] + d_padded, state.num_samples[b] + d_samples, state.num_atoms[b] + d_atoms
    ) and _fits(grid, state.padded[a] - d_padded, state.num_samples[a] - d_samples, state.num_atoms[a] - d_atoms)


@kernel
def least_change(grid, state, scratch, x, y, d_floor):
    """Lower bound on the energy change, before the O(L P) part: exact when x == y.

    ``scratch.after`` holds the new attention costs; ``d_floor`` is the balanced expert cost that moves from x to y.
    Experts cost at least their floor, and the energy is monotone in the row-shard costs.
    """
    if x == y:
        scratch.after[1] = state.experts[x]
        new_x = scratch.after[0] + scratch.after[1]
        new_y = 0.0
    else:
        new_x = scratch.after[0] + state.floor[x] - d_floor
        new_y = scratch.after[2] + state.floor[y] + d_floor
    return energy_change(state.costs, grid.num_shards, grid.sync_row, grid.spread, state.shard_sums, x, new_x, y, new_y)


@kernel
def exact_change(grid, costs, state, scratch, x, y):
    """Energy change once ``scratch.delta`` is known: fills the expert costs of ``scratch.after``."""
    after = scratch.after
    _peaks_after(state.loads, x, y, scratch.delta, scratch.peaks_x, scratch.peaks_y)
    after[1] = weighted_peaks(scratch.peaks_x, costs)
    after[3] = weighted_peaks(scratch.peaks_y, costs)
    new_x = after[0] + after[1]
    new_y = after[2] + after[3]
    return energy_change(state.costs, grid.num_shards, grid.sync_row, grid.spread, state.shard_sums, x, new_x, y, new_y)


@kernel
def commit(grid, state, scratch, x, y, d_floor, change):
    """Book the accepted proposal of ``scratch`` on row-shards x and y."""
    after = scratch.after
    if x != y:
        for p in range(scratch.delta.shape[0]):
            for layer in range(scratch.delta.shape[1]):
                state.loads[x, p, layer] += scratch.delta[p, layer]
                state.loads[y, p, layer] -= scratch.delta[p, layer]
        state.floor[x] -= d_floor
        state.floor[y] += d_floor
        state.attention[y] = after[2]
        state.experts[y] = after[3]
        new_y = after[2] + after[3]
        state.shard_sums[y % grid.num_shards] += new_y - state.costs[y]
        state.costs[y] = new_y
    state.attention[x] = after[0]
    state.experts[x] = after[1]
    new_x = after[0] + after[1]
    state.shard_sums[x % grid.num_shards] += new_x - state.costs[x]
    state.costs[x] = new_x
    state.summary[0] += change
    state.summary[1] += 1.0


@kernel
def try_atoms(atoms, grid, costs, loads, state, scratch, i, a, j, b, limit):
    """Score moving atom i from a to b (j comes back unless -1) and take it when its change is within ``limit``."""
    x = grid.shard_row[a]
    y = grid.shard_row[b]
    d_tokens = atoms.tokens[i]
    d_squares = atoms.squares[i]
    d_floor = atoms.floor[i]
    if j >= 0:
        d_tokens -= atoms.tokens[j]
        d_squares -= atoms.squares[j]
        d_floor -= atoms.floor[j]
    _stage_costs(state.tokens[a] - d_tokens, state.squares[a] - d_squares, costs, scratch.stage_a)
    _stage_costs(state.tokens[b] + d_tokens, state.squares[b] + d_squares, costs, scratch.stage_b)
    scratch.after[0] = attention_after(grid, state, x, a, scratch.stage_a, b, scratch.stage_b)
    scratch.after[2] = 0.0
    if x != y:
        scratch.after[2] = attention_after(grid, state, y, a, scratch.stage_a, b, scratch.stage_b)
    change = least_change(grid, state, scratch, x, y, d_floor)
    if change > limit:
        return
    if x != y:
        _delta_of_atoms(loads, j, i, scratch.delta)
        change = exact_change(grid, costs, state, scratch, x, y)
        if change > limit:
            return
    state.cell_of[i] = b
    d_padded = atoms.padded[i]
    d_samples = atoms.samples[i]
    if j >= 0:
        state.cell_of[j] = a
        d_padded -= atoms.padded[j]
        d_samples -= atoms.samples[j]
    else:
        state.num_atoms[a] -= 1
        state.num_atoms[b] += 1
    state.num_samples[a] -= d_samples
    state.num_samples[b] += d_samples
    state.padded[a] -= d_padded
    state.padded[b] += d_padded
    state.tokens[a] -= d_tokens
    state.tokens[b] += d_tokens
    state.squares[a] -= d_squares
    state.squares[b] += d_squares
    for s in range(scratch.stage_a.shape[0]):
        state.stage_cost[a, s] = scratch.stage_a[s]
        state.stage_cost[b, s] = scratch.stage_b[s]
    commit(grid, state, scratch, x, y, d_floor, change)


@kernel
def anneal(atoms, grid, costs, loads, state, scratch, moves, temperature, num_steps, rng):
    """Run ``num_steps`` Metropolis proposals at one temperature (energy units); returns how many were scored.

    Infeasible proposals count as steps. A worse energy is accepted with probability exp(-change / temperature).
    """
    num_cells = grid.shard_row.shape[0]
    scored = 0
    for _ in range(num_steps):
        i = _draw_first(grid, state, moves.guided, rng)
        a = state.cell_of[i]
        j = -1
        if uniform(rng) <= moves.relocate:
            b = below(rng, num_cells)
        else:
            j = _draw_partner(atoms, i, rng)
            b = state.cell_of[j]
        if a != b and legal(atoms, grid, state, i, a, j, b):
            scored += 1
            limit = -temperature * math.log(uniform(rng))
            try_atoms(atoms, grid, costs, loads, state, scratch, i, a, j, b, limit)
    return scored
