"""Compiled Metropolis moves of atoms between cells, scored incrementally.

Knows arrays only: atoms with token counts and per-rank loads, cells, row-shards. A row-shard x is one row of one
EDP shard; its cost is J[x] = sum over stages of its slowest cell + sum over layers of its most loaded rank.
Loads are int32 laid out [.., P, Lp] with the layer innermost, so that maxima over ranks run in vector lanes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from routepack_opt.solvers.annealing.energy import energy_change, full_energy
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
    """Cost coefficients, already divided by the cap."""

    alpha: np.ndarray  # float64 [S]
    beta: np.ndarray  # float64 [S]
    gamma: np.ndarray  # float64 [Lp], expert weight of each layer, 0 on padding
    uniform_gamma: bool
    cap: float


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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def swap_peaks(state_loads, x, loads, plus, minus, peaks):
    """Fill peaks [Lp] with max_p of row-shard x after atom ``plus`` replaced atom ``minus``."""
    num_ranks, num_layers = state_loads.shape[1], state_loads.shape[2]
    for layer in range(num_layers):
        peaks[layer] = state_loads[x, 0, layer] + loads[plus, 0, layer] - loads[minus, 0, layer]
    for p in range(1, num_ranks):
        for layer in range(num_layers):
            value = np.int32(state_loads[x, p, layer] + loads[plus, p, layer] - loads[minus, p, layer])
            peaks[layer] = max(peaks[layer], value)


@njit(cache=True, nogil=True)
def shift_peaks(state_loads, x, loads, atom, sign, peaks):
    """Fill peaks [Lp] with max_p of row-shard x after ``atom`` entered (sign 1) or left (sign -1)."""
    num_ranks, num_layers = state_loads.shape[1], state_loads.shape[2]
    for layer in range(num_layers):
        peaks[layer] = state_loads[x, 0, layer] + sign * loads[atom, 0, layer]
    for p in range(1, num_ranks):
        for layer in range(num_layers):
            value = np.int32(state_loads[x, p, layer] + sign * loads[atom, p, layer])
            peaks[layer] = max(peaks[layer], value)


@njit(cache=True, nogil=True)
def _add_loads(state_loads, x, loads, atom, sign):
    for p in range(state_loads.shape[1]):
        for layer in range(state_loads.shape[2]):
            state_loads[x, p, layer] += sign * loads[atom, p, layer]


@njit(cache=True, nogil=True)
def _stage_costs(tokens, squares, costs, out):
    t = tokens / costs.cap
    q = squares / (costs.cap * costs.cap)
    for s in range(costs.alpha.shape[0]):
        out[s] = costs.alpha[s] * t + costs.beta[s] * q


@njit(cache=True, nogil=True)
def _attention_after(grid, state, x, cell_a, new_a, cell_b, new_b):
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


@njit(cache=True, nogil=True)
def recompute(atoms, grid, costs, loads, state, peaks):
    """Fill everything in ``state`` from ``state.cell_of``: the slow, obviously right path."""
    num_cells = grid.shard_row.shape[0]
    state.num_atoms[:] = 0
    state.num_samples[:] = 0
    state.padded[:] = 0
    state.tokens[:] = 0
    state.squares[:] = 0
    state.loads[:] = 0
    for atom in range(atoms.padded.shape[0]):
        cell = state.cell_of[atom]
        state.num_atoms[cell] += 1
        state.num_samples[cell] += atoms.samples[atom]
        state.padded[cell] += atoms.padded[atom]
        state.tokens[cell] += atoms.tokens[atom]
        state.squares[cell] += atoms.squares[atom]
        _add_loads(state.loads, grid.shard_row[cell], loads, atom, np.int32(1))
    for cell in range(num_cells):
        _stage_costs(state.tokens[cell], state.squares[cell], costs, state.stage_cost[cell])
    num_ranks = state.loads.shape[1]
    for x in range(state.costs.shape[0]):
        state.attention[x] = _attention_after(grid, state, x, -1, state.stage_cost[0], -1, state.stage_cost[0])
        total = 0.0
        for layer in range(state.loads.shape[2]):
            peak = np.int32(0)
            mean = 0
            for p in range(num_ranks):
                peak = max(peak, state.loads[x, p, layer])
                mean += state.loads[x, p, layer]
            peaks[layer] = peak
            total += costs.gamma[layer] * mean
        state.experts[x] = weighted_peaks(peaks, costs)
        state.floor[x] = total / num_ranks / costs.cap
        state.costs[x] = state.attention[x] + state.experts[x]
    state.summary[0] = full_energy(state.costs, grid.num_shards, grid.sync_row, grid.spread, state.shard_sums)


@njit(cache=True, nogil=True)
def _fits(grid, padded, samples, num_atoms):
    """Cell rule: within the cap, or a single (oversize) atom; never empty; at most max_samples."""
    return (padded <= grid.cap or num_atoms == 1) and num_atoms >= 1 and samples <= grid.max_samples


@njit(cache=True, nogil=True)
def anneal(atoms, grid, costs, loads, state, temperature, num_steps, relocate_share, rng, peaks_x, peaks_y):
    """Run ``num_steps`` proposals at one temperature (energy units); returns how many were scored.

    A proposal swaps two atoms of different cells or relocates one; infeasible ones count as steps. A proposal is
    rejected before its expert part is computed when even perfect expert balance could not make it acceptable.
    """
    n = atoms.padded.shape[0]
    num_cells = grid.shard_row.shape[0]
    num_stages = costs.alpha.shape[0]
    new_a = np.empty(num_stages)
    new_b = np.empty(num_stages)
    scored = 0
    accepted = 0
    for _ in range(num_steps):
        i = below(rng, n)
        a = state.cell_of[i]
        j = -1
        if uniform(rng) < relocate_share:
            b = below(rng, num_cells)
            if b == a:
                continue
            if grid.rank[a] != grid.rank[b] and (grid.equal_samples or atoms.pinned[i]):
                continue
            if not _fits(
                grid, state.padded[b] + atoms.padded[i], state.num_samples[b] + atoms.samples[i], state.num_atoms[b] + 1
            ) or not _fits(
                grid, state.padded[a] - atoms.padded[i], state.num_samples[a] - atoms.samples[i], state.num_atoms[a] - 1
            ):
                continue
            d_tokens, d_squares, d_padded, d_samples = (
                atoms.tokens[i],
                atoms.squares[i],
                atoms.padded[i],
                atoms.samples[i],
            )
        else:
            # partners of similar length fit more often in full cells: draw the distance in sorted order log-uniformly
            reach = np.int64(math.exp(uniform(rng) * math.log(n))) + 1
            k = atoms.position[i] + (reach if uniform(rng) < 0.5 else -reach)
            if k < 0 or k >= n:
                k = below(rng, n)
            j = atoms.order[k]
            b = state.cell_of[j]
            if b == a:
                continue
            d_padded = atoms.padded[i] - atoms.padded[j]
            d_samples = atoms.samples[i] - atoms.samples[j]
            if grid.rank[a] != grid.rank[b] and (
                atoms.pinned[i] or atoms.pinned[j] or (grid.equal_samples and d_samples != 0)
            ):
                continue
            if not _fits(grid, state.padded[b] + d_padded, state.num_samples[b] + d_samples, state.num_atoms[b]):
                continue
            if not _fits(grid, state.padded[a] - d_padded, state.num_samples[a] - d_samples, state.num_atoms[a]):
                continue
            d_tokens = atoms.tokens[i] - atoms.tokens[j]
            d_squares = atoms.squares[i] - atoms.squares[j]
        scored += 1
        x = grid.shard_row[a]
        y = grid.shard_row[b]
        _stage_costs(state.tokens[a] - d_tokens, state.squares[a] - d_squares, costs, new_a)
        _stage_costs(state.tokens[b] + d_tokens, state.squares[b] + d_squares, costs, new_b)
        attention_x = _attention_after(grid, state, x, a, new_a, b, new_b)
        limit = -temperature * math.log(uniform(rng))
        experts_x = state.experts[x]
        experts_y = 0.0
        attention_y = 0.0
        if x == y:
            change = energy_change(
                state.costs,
                grid.num_shards,
                grid.sync_row,
                grid.spread,
                state.shard_sums,
                x,
                attention_x + experts_x,
                y,
                0.0,
            )
            if change > limit:
                continue
        else:
            attention_y = _attention_after(grid, state, y, a, new_a, b, new_b)
            # the two floors together do not change: at best both row-shards become perfectly balanced
            waste = state.experts[x] - state.floor[x] + state.experts[y] - state.floor[y]
            if (
                grid.num_shards == 1
                and attention_x + attention_y - state.attention[x] - state.attention[y] - waste > limit
            ):
                continue
            if j >= 0:
                swap_peaks(state.loads, x, loads, j, i, peaks_x)
                experts_x = weighted_peaks(peaks_x, costs)
                swap_peaks(state.loads, y, loads, i, j, peaks_y)
            else:
                shift_peaks(state.loads, x, loads, i, np.int32(-1), peaks_x)
                experts_x = weighted_peaks(peaks_x, costs)
                shift_peaks(state.loads, y, loads, i, np.int32(1), peaks_y)
            experts_y = weighted_peaks(peaks_y, costs)
            change = energy_change(
                state.costs,
                grid.num_shards,
                grid.sync_row,
                grid.spread,
                state.shard_sums,
                x,
                attention_x + experts_x,
                y,
                attention_y + experts_y,
            )
            if change > limit:
                continue
        accepted += 1
        state.cell_of[i] = b
        state.num_samples[a] -= d_samples
        state.num_samples[b] += d_samples
        state.padded[a] -= d_padded
        state.padded[b] += d_padded
        state.tokens[a] -= d_tokens
        state.tokens[b] += d_tokens
        state.squares[a] -= d_squares
        state.squares[b] += d_squares
        for s in range(num_stages):
            state.stage_cost[a, s] = new_a[s]
            state.stage_cost[b, s] = new_b[s]
        if j >= 0:
            state.cell_of[j] = a
        else:
            state.num_atoms[a] -= 1
            state.num_atoms[b] += 1
        if x != y:
            moved_floor = 0.0
            if j >= 0:
                _add_loads(state.loads, x, loads, j, np.int32(1))
                _add_loads(state.loads, y, loads, j, np.int32(-1))
                moved_floor -= _floor_of(loads, j, costs)
            _add_loads(state.loads, x, loads, i, np.int32(-1))
            _add_loads(state.loads, y, loads, i, np.int32(1))
            moved_floor += _floor_of(loads, i, costs)
            state.floor[x] -= moved_floor
            state.floor[y] += moved_floor
            state.attention[y] = attention_y
            state.experts[y] = experts_y
            new_y = attention_y + experts_y
            state.shard_sums[y % grid.num_shards] += new_y - state.costs[y]
            state.costs[y] = new_y
        state.attention[x] = attention_x
        state.experts[x] = experts_x
        new_x = attention_x + experts_x
        state.shard_sums[x % grid.num_shards] += new_x - state.costs[x]
        state.costs[x] = new_x
        state.summary[0] += change
    state.summary[1] += accepted
    return scored


@njit(cache=True, nogil=True)
def _floor_of(loads, atom, costs):
    total = 0.0
    for layer in range(loads.shape[2]):
        mean = 0
        for p in range(loads.shape[1]):
            mean += loads[atom, p, layer]
        total += costs.gamma[layer] * mean
    return total / loads.shape[1] / costs.cap
