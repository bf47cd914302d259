"""Metropolis moves of atoms for M layouts at once, in tensor operations (shape suffixes: :mod:`.torch_state`).

A round pairs the rows of every member at random (a slot is a pair, sometimes a row with itself) and gives each slot C
candidates, of which the first T feasible ones are scored. A candidate swaps an atom of the first row with one of the
second, or relocates it there: a swap with the null atom. Rows of different slots are disjoint and J of a row depends
on that row alone, so every try is scored exactly. A slot takes its first accepted try and drops the later ones, which
is what a sequential chain would have done up to there.

With G > 1 and ``sync="shard"`` the slowest shard couples the slots. They are therefore accepted in order, each seeing
the shard sums the earlier ones left: a few tiny operations a slot, and still an exact Metropolis chain. With
``sync="row"`` a slot owns whole rows (all shards of both), so nothing couples.

Nothing here waits for the host or looks at a value from Python, and shapes are fixed: a block of rounds can be
captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from routepack_opt.solvers.annealing.torch_state import (
    ATOMS,
    PADDED,
    SAMPLES,
    expert_costs,
    stage_costs,
    sum_stages,
)

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.torch_draws import Draws
    from routepack_opt.solvers.annealing.torch_state import Sizes, State, Tables


_CACHED_ENTRIES = 1 << 19  # int32 entries of a temporary on a CPU


class Tries(NamedTuple):
    """The feasible candidates of one round that are tries."""

    x_MS: torch.Tensor  # flat rows, see Draws
    y_MS: torch.Tensor
    z_MS: torch.Tensor
    i_MST: torch.Tensor  # flat atoms
    j_MST: torch.Tensor
    a_MST: torch.Tensor  # flat cell i leaves
    b_MST: torch.Tensor  # flat cell i enters
    after_a_MSTF: torch.Tensor
    after_b_MSTF: torch.Tensor
    limit_MST: torch.Tensor
    real_MST: torch.Tensor  # False where there were fewer than T feasible candidates


class Costs(NamedTuple):
    """Costs of rows x and z after each try, [M, S, T]."""

    experts_x: torch.Tensor
    experts_z: torch.Tensor
    total_x: torch.Tensor
    total_z: torch.Tensor


def run_round(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, draws: Draws, index: int) -> None:
    """Score and accept round ``index`` of a block."""
    tries = _feasible_tries(sizes, tables, state, draws, index)
    costs = _costs(sizes, tables, state, atom_loads, tries)
    dx = costs.total_x - state.costs_MX[tries.x_MS][..., None]
    dz = costs.total_z - state.costs_MX[tries.z_MS][..., None]
    if tables.sync_row and sizes.shards > 1:
        change = _row_sync_change(sizes, tables, state, tries, costs, dx, dz)
        first = _first(tables, tries.real_MST & (change <= tries.limit_MST))
    elif sizes.shards > 1:
        first = _first_in_turn(sizes, tables, state, tries, dx, dz)
    else:
        first = _first(tables, tries.real_MST & (dx + dz <= tries.limit_MST))
    _apply(sizes, tables, state, atom_loads, tries, costs, first)


def _fits(tables: Tables, cells: torch.Tensor) -> torch.Tensor:
    """Cell rule: within the cap, or a single (oversize) atom; never empty; at most max_samples."""
    atoms = cells[..., ATOMS]
    fits = ((cells[..., PADDED] <= tables.cap) & (atoms >= 1)) | (atoms == 1)
    return fits & (cells[..., SAMPLES] <= tables.max_samples)


def _feasible_tries(sizes: Sizes, tables: Tables, state: State, draws: Draws, index: int) -> Tries:
    """The first T feasible candidates of every slot."""
    x, y, i, j, target, delta = (
        draws.x_QMS[index],
        draws.y_QMS[index],
        draws.i_QMSC[index],
        draws.j_QMSC[index],
        draws.target_QMSC[index],
        draws.delta_QMSCF[index],
    )
    a, b = state.cell_of_MN[i], state.cell_of_MN[j]
    b = torch.where(target >= 0, target, b)
    after_a = state.cells_BF[a] - delta
    after_b = state.cells_BF[b] + delta
    feasible = _fits(tables, after_a) & _fits(tables, after_b) & (a != b)
    feasible &= (a // sizes.cells == x[..., None]) & (b // sizes.cells == y[..., None])
    feasible &= ~draws.tied_QMSC[index] | (tables.rank_B[a] == tables.rank_B[b])

    # the k-th feasible candidate goes to place k; infeasible and surplus ones to a scrap place at the end
    place = feasible.cumsum(-1) - 1
    place = torch.where(feasible, place, sizes.tries).clamp_(max=sizes.tries)
    kept = place.new_full((sizes.members, sizes.slots, sizes.tries + 1), sizes.candidates)
    kept = kept.scatter_(-1, place, tables.candidate_C.expand_as(place))[..., :-1]
    real = kept < sizes.candidates
    slot = torch.arange(sizes.members * sizes.slots, device=a.device).view(sizes.members, sizes.slots, 1)
    flat = (slot * sizes.candidates + kept.clamp(max=sizes.candidates - 1)).view(-1)

    def keep(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).index_select(0, flat).view(real.shape)

    def keep_cells(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, 5).index_select(0, flat).view(*real.shape, 5)

    return Tries(
        x_MS=x,
        y_MS=y,
        z_MS=draws.z_QMS[index],
        i_MST=keep(i),
        j_MST=keep(j),
        a_MST=keep(a),
        b_MST=keep(b),
        after_a_MSTF=keep_cells(after_a),
        after_b_MSTF=keep_cells(after_b),
        limit_MST=keep(draws.limit_QMSC[index]),
        real_MST=real,
    )


def _costs(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, tries: Tries) -> Costs:
    x, z = tries.x_MS, tries.z_MS
    attention_x, attention_z = _attention(sizes, tables, state, tries)
    experts_x, experts_z = _experts(sizes, tables, state, atom_loads, tries)
    inside = (x == tries.y_MS)[..., None]  # the row keeps its atoms, and z is not touched
    experts_x = torch.where(inside, state.experts_MX[x][..., None], experts_x)
    experts_z = torch.where(inside, state.experts_MX[z][..., None], experts_z)
    total_z = torch.where(inside, state.costs_MX[z][..., None], attention_z + experts_z)
    return Costs(experts_x, experts_z, attention_x + experts_x, total_z)


def _attention(sizes: Sizes, tables: Tables, state: State, tries: Tries) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention cost [M, S, T] of rows x and z with cells a and b changed; z means nothing where y is x."""
    old_AMSK = [stage_costs(tables, state.cells_BF.view(-1, sizes.cells, 5)[row]) for row in (tries.x_MS, tries.z_MS)]
    a_AMST, b_AMST = (stage_costs(tables, after) for after in (tries.after_a_MSTF, tries.after_b_MSTF))
    new_x, new_z = (old[..., None, :].repeat(1, 1, 1, sizes.tries, 1) for old in old_AMSK)
    # places of the changed cells; of a try that is not real the nearest place
    last = sizes.cells - 1
    place_a = (tries.a_MST - tries.x_MS[..., None] * sizes.cells).clamp(0, last)
    place_b = (tries.b_MST - tries.y_MS[..., None] * sizes.cells).clamp(0, last)
    inside = (tries.x_MS == tries.y_MS)[..., None]
    place_b_x = torch.where(inside, place_b, place_a)  # written before a: of no effect where b is not in x

    def put(target: torch.Tensor, place: torch.Tensor, value: torch.Tensor) -> None:
        index = place.expand(value.shape)[..., None]
        target.scatter_(-1, index, value[..., None])

    put(new_x, place_b_x, b_AMST)
    put(new_x, place_a, a_AMST)
    put(new_z, place_b, b_AMST)
    return sum_stages(new_x.amax(-1)), sum_stages(new_z.amax(-1))


def _experts(
    sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, tries: Tries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert cost [M, S, T] of rows x and z after i and j changed places."""
    i, j = tries.i_MST, tries.j_MST
    if atom_loads.shape[0] == sizes.atoms + 1:  # one placement for all members
        base = (tables.member_M * (sizes.atoms + 1))[:, None, None]
        i, j = i - base, j - base
    # on a CPU some members at a time keep the vectors in cache; a GPU wants them all at once
    width = sizes.slots * sizes.tries * sizes.ranks * sizes.layers
    step = max(1, _CACHED_ENTRIES // width) if i.device.type == "cpu" else sizes.members
    peaks_x: list[torch.Tensor] = []
    peaks_z: list[torch.Tensor] = []
    for start in range(0, sizes.members, step):
        part = slice(start, start + step)
        delta = atom_loads.index_select(0, j[part].reshape(-1))
        delta -= atom_loads.index_select(0, i[part].reshape(-1))
        delta = delta.view(-1, sizes.tries, delta.shape[-1])
        for rows, peaks, sign in ((tries.x_MS, peaks_x, 1), (tries.z_MS, peaks_z, -1)):
            loads = state.loads_MXW.index_select(0, rows[part].reshape(-1))[:, None]
            peaks.append(_largest_rank(sizes, torch.add(loads, delta, alpha=sign)))
    shape = (2, sizes.members, sizes.slots, sizes.tries)
    x, z = expert_costs(tables, torch.cat(peaks_x + peaks_z)).view(shape)
    return x, z


def _largest_rank(sizes: Sizes, loads: torch.Tensor) -> torch.Tensor:
    """Peaks [.., L] of loads [.., P * L]."""
    num_ranks = sizes.ranks
    if loads.device.type == "cpu":  # vector maxima of halves beat the strided reduction there
        while num_ranks % 2 == 0:
            num_ranks //= 2
            half = num_ranks * sizes.layers
            loads = torch.maximum(loads[..., :half], loads[..., half:])
    return loads.view(-1, num_ranks, sizes.layers).amax(1) if num_ranks > 1 else loads.flatten(0, -2)


def _first(tables: Tables, accept: torch.Tensor) -> torch.Tensor:
    """Index of the first accepted try [..], T where there is none."""
    num_tries = tables.try_T.shape[0]
    return torch.where(accept, tables.try_T, num_tries).amin(-1)


def _row_sync_change(
    sizes: Sizes, tables: Tables, state: State, tries: Tries, costs: Costs, dx: torch.Tensor, dz: torch.Tensor
) -> torch.Tensor:
    """Energy change [M, S, T] where each row waits for its slowest shard."""
    shards = sizes.shards
    base = (tables.member_M * sizes.rows)[:, None]
    local_x, local_z = tries.x_MS - base, tries.z_MS - base
    start_x = (tries.x_MS - local_x % shards)[..., None] + tables.shard_G
    start_z = (tries.z_MS - local_z % shards)[..., None] + tables.shard_G
    old_x, old_z = state.costs_MX[start_x][:, :, None], state.costs_MX[start_z][:, :, None]
    is_x = (start_x == tries.x_MS[..., None])[:, :, None]
    is_z_in_x = (start_x == tries.z_MS[..., None])[:, :, None]
    is_z = (start_z == tries.z_MS[..., None])[:, :, None]
    new_x = torch.where(is_x, costs.total_x[..., None], old_x)
    new_x = torch.where(is_z_in_x, costs.total_z[..., None], new_x)
    new_z = torch.where(is_z, costs.total_z[..., None], old_z)
    apart = (start_x[..., 0] != start_z[..., 0])[..., None]
    peaks = new_x.amax(-1) - old_x.amax(-1) + torch.where(apart, new_z.amax(-1) - old_z.amax(-1), 0.0)
    return (1.0 - tables.spread) * peaks + tables.spread / shards * (dx + dz)


def _first_in_turn(
    sizes: Sizes, tables: Tables, state: State, tries: Tries, dx: torch.Tensor, dz: torch.Tensor
) -> torch.Tensor:
    """First accepted try [M, S] of each slot, slots in turn, each seeing the shard sums the earlier ones left."""
    costs_MX = state.costs_MX.view(sizes.members, sizes.rows)[:, : sizes.real_rows]
    sums_MG = costs_MX.reshape(sizes.members, -1, sizes.shards).sum(1)
    d_MSTG = dx[..., None] * tables.shard_MXG[tries.x_MS][:, :, None]
    d_MSTG = d_MSTG + dz[..., None] * tables.shard_MXG[tries.z_MS][:, :, None]
    rest = (tables.spread / sizes.shards * (dx + dz) - tries.limit_MST).masked_fill(~tries.real_MST, float("inf"))
    slowest = sums_MG.amax(-1, keepdim=True)
    firsts = []
    for slot in range(sizes.slots):
        d_MTG = d_MSTG[:, slot]
        peaks_MT = (sums_MG[:, None] + d_MTG).amax(-1)
        first = _first(tables, (1.0 - tables.spread) * (peaks_MT - slowest) + rest[:, slot] <= 0.0)
        firsts.append(first)
        taken = tables.try_T == first[:, None]
        sums_MG = sums_MG + torch.where(taken[..., None], d_MTG, 0.0).sum(1)
        slowest = sums_MG.amax(-1, keepdim=True)
    return torch.stack(firsts, dim=1)


def _apply(
    sizes: Sizes,
    tables: Tables,
    state: State,
    atom_loads: torch.Tensor,
    tries: Tries,
    costs: Costs,
    first: torch.Tensor,
) -> None:
    """Carry out the chosen tries; whatever a slot without one writes goes to scrap places or stays as it is."""
    accepted = first < sizes.tries
    pick = first.clamp(max=sizes.tries - 1)[..., None]

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return values.gather(-1, pick).squeeze(-1)

    pick_F = pick[..., None].expand(-1, -1, -1, 5)
    i, j, a, b = (chosen(v) for v in (tries.i_MST, tries.j_MST, tries.a_MST, tries.b_MST))
    null = (tables.member_M * (sizes.atoms + 1) + sizes.atoms)[:, None]
    scrap = ((tables.member_M + 1) * sizes.rows * sizes.cells - 1)[:, None]
    state.cell_of_MN.scatter_(0, torch.where(accepted, i, null).view(-1), b.view(-1))
    state.cell_of_MN.scatter_(0, torch.where(accepted, j, null).view(-1), a.view(-1))
    for cell, after in ((a, tries.after_a_MSTF), (b, tries.after_b_MSTF)):
        after = after.gather(2, pick_F).view(-1, 5)
        state.cells_BF.index_copy_(0, torch.where(accepted, cell, scrap).view(-1), after)

    x, z = tries.x_MS.reshape(-1), tries.z_MS.reshape(-1)
    for row, new in ((x, costs.experts_x), (z, costs.experts_z)):
        state.experts_MX.scatter_(0, row, torch.where(accepted.view(-1), chosen(new).view(-1), state.experts_MX[row]))
    for row, new in ((x, costs.total_x), (z, costs.total_z)):
        state.costs_MX.scatter_(0, row, torch.where(accepted.view(-1), chosen(new).view(-1), state.costs_MX[row]))

    moved = accepted & (tries.x_MS != tries.y_MS)
    # the null atom has no load: what does not move is a swap of null atoms
    i, j = torch.where(moved, i, null), torch.where(moved, j, null)
    if atom_loads.shape[0] == sizes.atoms + 1:
        base = (tables.member_M * (sizes.atoms + 1))[:, None]
        i, j = i - base, j - base
    delta = atom_loads.index_select(0, j.view(-1)) - atom_loads.index_select(0, i.view(-1))
    state.loads_MXW.index_copy_(0, x, state.loads_MXW.index_select(0, x) + delta)
    state.loads_MXW.index_copy_(0, z, state.loads_MXW.index_select(0, z) - delta)
    state.num_scored_M.add_(tries.real_MST.sum((1, 2)))
    state.num_accepted_M.add_(accepted.sum(1))
