"""Metropolis moves of atoms for M layouts at once, in tensor operations (shape suffixes: :mod:`.torch_state`).

A round pairs the rows of every member at random (a slot is a pair, sometimes a row with itself) and gives each slot T
tries. A try swaps an atom of the first row with one of the second, or relocates it there: a swap with the null atom.
Rows of different slots are disjoint and J of a row depends on that row alone, so every try is scored exactly. A slot
takes its first accepted try and drops the later ones, which is what a sequential chain would have done up to there.

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
    SQUARES,
    TOKENS,
    attention_costs,
    expert_costs,
)

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.torch_state import Sizes, State, Tables


class Draws(NamedTuple):
    """All proposals of a block of Q rounds: everything that does not depend on what the block itself accepts."""

    x_QMS: torch.Tensor  # int64, flat row the moved atom leaves
    y_QMS: torch.Tensor  # int64, flat row it enters: another one, or x
    z_QMS: torch.Tensor  # int64, second row of the slot: y, or an untouched one of the slot where y is x
    i_QMST: torch.Tensor  # int64, flat atom that leaves x
    j_QMST: torch.Tensor  # int64, flat atom that leaves y, the null atom for relocations
    target_QMST: torch.Tensor  # int64, flat cell of a relocation, -1 for swaps
    delta_QMSTF: torch.Tensor  # int64, features of i minus those of j
    tied_QMST: torch.Tensor  # bool, the move may not change DP ranks
    limit_QMST: torch.Tensor  # float64, largest energy change to accept


def draw_block(
    sizes: Sizes,
    tables: Tables,
    state: State,
    generator: torch.Generator,
    num_rounds: int,
    temperature_M: torch.Tensor,
    relocate_share: float,
) -> Draws:
    """Draw the proposals of a block.

    Atoms are drawn from the rows they are in now; by the time of a later round of the block some have left, and that
    round finds them infeasible. Partners of similar length fit more often in full cells: the distance in the order of
    the row's lengths is drawn log-uniformly.
    """
    m, n, s, t = sizes.members, sizes.atoms, sizes.slots, sizes.tries
    device = tables.member_M.device
    unit1, unit2 = torch.rand(num_rounds, m, 2 * s, generator=generator, device=device).argsort(-1).split(s, dim=2)
    idle1 = unit1 >= sizes.num_units
    unit1, unit2 = torch.where(idle1, unit2, unit1), torch.where(idle1, unit1, unit2)
    chance = torch.rand(3, num_rounds, m, s, generator=generator, device=device)
    alone = sizes.cells * sizes.unit == 1  # a row of one cell has nothing to move inside
    inside = unit2 >= sizes.num_units
    if not alone:
        inside = inside | (chance[0] < 1.0 / sizes.num_units)
    x, y = unit1 * sizes.unit, torch.where(inside, unit1, unit2) * sizes.unit
    z = unit2 * sizes.unit
    if sizes.unit > 1:
        x = x + _pick(chance[1], sizes.unit)
        y = y + _pick(chance[2], sizes.unit)
        z = torch.where(x == y, z, y)
    base = (tables.member_M * sizes.rows)[:, None]
    x, y, z = x + base, y + base, z + base

    keys, starts = _rows_in_order(sizes, state)
    u = torch.rand(6, num_rounds, m, s, t, generator=generator, device=device)
    x4, y4 = x[..., None], y[..., None]
    first, count = starts[x4], starts[x4 + 1] - starts[x4]
    i = keys[first + _pick(u[0], count)] - x4 * n
    first, count = starts[y4], starts[y4 + 1] - starts[y4]
    nearest = torch.searchsorted(keys, y4 * n + i)
    reach = torch.exp(u[1] * torch.log(count + 1.0)).to(torch.int64) - 1
    k = torch.where(u[2] < 0.5, nearest + reach + (x4 == y4), nearest - 1 - reach)
    outside = (k < first) | (k >= first + count)
    j = keys[torch.where(outside, first + _pick(u[3], count), k)] - y4 * n
    relocate = u[4] < relocate_share
    j = j.masked_fill(relocate, n)
    target = y4 * sizes.cells + _pick(u[3], tables.num_cells_MX[y4])
    delta = tables.features_NF[i] - tables.features_NF[j]
    tied = tables.pinned_N[i] | tables.pinned_N[j]
    if tables.equal_samples:
        tied = tied | (delta[..., SAMPLES] != 0)
    atom_base = (tables.member_M * (n + 1))[:, None, None]
    return Draws(
        x_QMS=x,
        y_QMS=y,
        z_QMS=z,
        i_QMST=i + atom_base,
        j_QMST=j + atom_base,
        target_QMST=target.masked_fill(~relocate, -1),
        delta_QMSTF=delta,
        tied_QMST=tied,
        limit_QMST=-torch.log1p(-u[5].to(torch.float64)) * temperature_M[:, None, None],
    )


def _pick(uniform: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Integer in [0, count) from a uniform number in [0, 1); the product may round up to count."""
    return (uniform * count).to(torch.int64).clamp(max=count - 1)


def _rows_in_order(sizes: Sizes, state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms by flat row, then length: keys [M * N] = row * N + atom, and where each row starts, [M * X + 1]."""
    cell_MN = state.cell_of_MN.view(sizes.members, -1)[:, : sizes.atoms]
    atom_N = torch.arange(sizes.atoms, device=cell_MN.device)
    keys = (cell_MN // sizes.cells * sizes.atoms + atom_N).sort(dim=1).values.view(-1)
    bounds = torch.arange(sizes.members * sizes.rows + 1, device=keys.device) * sizes.atoms
    return keys, torch.searchsorted(keys, bounds)


class _Scored(NamedTuple):
    """Tries of one round with their consequences."""

    a_MST: torch.Tensor  # flat cell i leaves
    b_MST: torch.Tensor  # flat cell i enters
    feasible_MST: torch.Tensor
    after_a_MSTF: torch.Tensor
    after_b_MSTF: torch.Tensor
    experts_x_MST: torch.Tensor
    experts_z_MST: torch.Tensor
    costs_x_MST: torch.Tensor
    costs_z_MST: torch.Tensor


def run_round(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, draws: Draws, index: int) -> None:
    """Score and accept round ``index`` of a block."""
    draw = Draws(*(tensor[index] for tensor in draws))
    scored = _score(sizes, tables, state, atom_loads, draw)
    dx = scored.costs_x_MST - state.costs_MX[draw.x_QMS][..., None]
    dz = scored.costs_z_MST - state.costs_MX[draw.z_QMS][..., None]
    if tables.sync_row and sizes.shards > 1:
        change = _row_sync_change(sizes, tables, state, draw, scored, dx, dz)
        first = _first(tables, scored.feasible_MST & (change <= draw.limit_QMST))
    elif sizes.shards > 1:
        first = _first_in_turn(sizes, tables, state, draw, scored.feasible_MST, dx, dz)
    else:
        first = _first(tables, scored.feasible_MST & (dx + dz <= draw.limit_QMST))
    _apply(sizes, tables, state, atom_loads, draw, scored, first)


def _fits(tables: Tables, cells: torch.Tensor) -> torch.Tensor:
    """Cell rule: within the cap, or a single (oversize) atom; never empty; at most max_samples."""
    atoms = cells[..., ATOMS]
    fits = ((cells[..., PADDED] <= tables.cap) & (atoms >= 1)) | (atoms == 1)
    return fits & (cells[..., SAMPLES] <= tables.max_samples)


def _score(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, draw: Draws) -> _Scored:
    a, b = state.cell_of_MN[draw.i_QMST], state.cell_of_MN[draw.j_QMST]
    b = torch.where(draw.target_QMST >= 0, draw.target_QMST, b)
    x, y, z = draw.x_QMS, draw.y_QMS, draw.z_QMS
    after_a = state.cells_BF[a] - draw.delta_QMSTF
    after_b = state.cells_BF[b] + draw.delta_QMSTF
    feasible = _fits(tables, after_a) & _fits(tables, after_b) & (a != b)
    feasible &= (a // sizes.cells == x[..., None]) & (b // sizes.cells == y[..., None])
    feasible &= ~draw.tied_QMST | (tables.rank_B[a] == tables.rank_B[b])

    attention_x, attention_z = _attention(sizes, tables, state, draw, a, b, after_a, after_b)
    experts_x, experts_z = _experts(sizes, tables, state, atom_loads, draw)
    inside = (x == y)[..., None]  # the row keeps its atoms, and z is not touched
    experts_x = torch.where(inside, state.experts_MX[x][..., None], experts_x)
    experts_z = torch.where(inside, state.experts_MX[z][..., None], experts_z)
    costs_z = torch.where(inside, state.costs_MX[z][..., None], attention_z + experts_z)
    return _Scored(a, b, feasible, after_a, after_b, experts_x, experts_z, attention_x + experts_x, costs_z)


def _attention(
    sizes: Sizes,
    tables: Tables,
    state: State,
    draw: Draws,
    a: torch.Tensor,
    b: torch.Tensor,
    after_a: torch.Tensor,
    after_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention cost [M, S, T] of rows x and z with cells a and b changed."""
    cells = state.cells_BF.view(-1, sizes.cells, 5)
    old_x, old_z = cells[draw.x_QMS], cells[draw.z_QMS]
    ids_x = (draw.x_QMS[..., None] * sizes.cells + tables.cell_K)[:, :, None]
    ids_z = (draw.z_QMS[..., None] * sizes.cells + tables.cell_K)[:, :, None]
    is_a, is_b_x, is_b_z = ids_x == a[..., None], ids_x == b[..., None], ids_z == b[..., None]
    total_x = torch.zeros(a.shape, dtype=torch.float64, device=a.device)
    total_z = torch.zeros_like(total_x)
    for cost_x, cost_z, cost_a, cost_b in zip(
        *(attention_costs(tables, c[..., TOKENS], c[..., SQUARES]) for c in (old_x, old_z, after_a, after_b)),
        strict=True,
    ):
        new = torch.where(is_a, cost_a[..., None], cost_x[:, :, None])
        total_x = total_x + torch.where(is_b_x, cost_b[..., None], new).amax(-1)
        total_z = total_z + torch.where(is_b_z, cost_b[..., None], cost_z[:, :, None]).amax(-1)
    return total_x, total_z


def _experts(
    sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, draw: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert cost [M, S, T] of rows x and z after i and j changed places."""
    i, j = draw.i_QMST, draw.j_QMST
    if atom_loads.shape[0] == sizes.atoms + 1:  # one placement for all members
        base = (tables.member_M * (sizes.atoms + 1))[:, None, None]
        i, j = i - base, j - base
    loads_x = state.loads_MXW.index_select(0, draw.x_QMS.reshape(-1))
    loads_z = state.loads_MXW.index_select(0, draw.z_QMS.reshape(-1))
    # on a CPU one try at a time keeps the vectors in cache; a GPU wants them all at once
    step = 1 if i.device.type == "cpu" else sizes.tries
    parts_x: list[torch.Tensor] = []
    parts_z: list[torch.Tensor] = []
    for start in range(0, sizes.tries, step):
        pick = slice(start, start + step)
        delta = atom_loads.index_select(0, j[..., pick].reshape(-1))
        delta -= atom_loads.index_select(0, i[..., pick].reshape(-1))
        delta = delta.view(loads_x.shape[0], step, -1)
        for loads, parts, sign in ((loads_x, parts_x, 1), (loads_z, parts_z, -1)):
            new = torch.add(loads[:, None], delta, alpha=sign)
            peaks = new.view(-1, sizes.ranks, sizes.layers).amax(1)
            parts.append(expert_costs(tables, peaks).view(sizes.members, sizes.slots, step))
    return torch.cat(parts_x, -1), torch.cat(parts_z, -1)


def _first(tables: Tables, accept: torch.Tensor) -> torch.Tensor:
    """Index of the first accepted try [..], T where there is none."""
    num_tries = tables.try_T.shape[0]
    return torch.where(accept, tables.try_T, num_tries).amin(-1)


def _row_sync_change(
    sizes: Sizes, tables: Tables, state: State, draw: Draws, scored: _Scored, dx: torch.Tensor, dz: torch.Tensor
) -> torch.Tensor:
    """Energy change [M, S, T] where each row waits for its slowest shard."""
    shards = sizes.shards
    base = (tables.member_M * sizes.rows)[:, None]
    local_x, local_z = draw.x_QMS - base, draw.z_QMS - base
    start_x = (draw.x_QMS - local_x % shards)[..., None] + tables.shard_G
    start_z = (draw.z_QMS - local_z % shards)[..., None] + tables.shard_G
    old_x, old_z = state.costs_MX[start_x][:, :, None], state.costs_MX[start_z][:, :, None]
    is_x = (start_x == draw.x_QMS[..., None])[:, :, None]
    is_z_in_x = (start_x == draw.z_QMS[..., None])[:, :, None]
    is_z = (start_z == draw.z_QMS[..., None])[:, :, None]
    new_x = torch.where(is_x, scored.costs_x_MST[..., None], old_x)
    new_x = torch.where(is_z_in_x, scored.costs_z_MST[..., None], new_x)
    new_z = torch.where(is_z, scored.costs_z_MST[..., None], old_z)
    apart = (start_x[..., 0] != start_z[..., 0])[..., None]
    peaks = new_x.amax(-1) - old_x.amax(-1) + torch.where(apart, new_z.amax(-1) - old_z.amax(-1), 0.0)
    return (1.0 - tables.spread) * peaks + tables.spread / shards * (dx + dz)


def _first_in_turn(
    sizes: Sizes, tables: Tables, state: State, draw: Draws, feasible: torch.Tensor, dx: torch.Tensor, dz: torch.Tensor
) -> torch.Tensor:
    """First accepted try [M, S] of each slot, slots in turn, each seeing the shard sums the earlier ones left."""
    costs = state.costs_MX.view(sizes.members, sizes.rows)[:, : sizes.real_rows]
    sums_MG = costs.reshape(sizes.members, -1, sizes.shards).sum(1)
    d_MSTG = dx[..., None] * tables.shard_MXG[draw.x_QMS][:, :, None]
    d_MSTG = d_MSTG + dz[..., None] * tables.shard_MXG[draw.z_QMS][:, :, None]
    rest = (tables.spread / sizes.shards * (dx + dz) - draw.limit_QMST).masked_fill(~feasible, float("inf"))
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
    draw: Draws,
    scored: _Scored,
    first: torch.Tensor,
) -> None:
    """Carry out the chosen tries; whatever a slot without one writes goes to scrap places or stays as it is."""
    accepted = first < sizes.tries
    pick = first.clamp(max=sizes.tries - 1)[..., None]

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return values.gather(-1, pick).squeeze(-1)

    pick_F = pick[..., None].expand(-1, -1, -1, 5)
    i, j, a, b = (chosen(v) for v in (draw.i_QMST, draw.j_QMST, scored.a_MST, scored.b_MST))
    null = (tables.member_M * (sizes.atoms + 1) + sizes.atoms)[:, None]
    scrap = ((tables.member_M + 1) * sizes.rows * sizes.cells - 1)[:, None]
    state.cell_of_MN.scatter_(0, torch.where(accepted, i, null).view(-1), b.view(-1))
    state.cell_of_MN.scatter_(0, torch.where(accepted, j, null).view(-1), a.view(-1))
    for cell, after in ((a, scored.after_a_MSTF), (b, scored.after_b_MSTF)):
        after = after.gather(2, pick_F).view(-1, 5)
        state.cells_BF.index_copy_(0, torch.where(accepted, cell, scrap).view(-1), after)

    x, z = draw.x_QMS.reshape(-1), draw.z_QMS.reshape(-1)
    for row, new in ((x, scored.experts_x_MST), (z, scored.experts_z_MST)):
        state.experts_MX.scatter_(0, row, torch.where(accepted.view(-1), chosen(new).view(-1), state.experts_MX[row]))
    for row, new in ((x, scored.costs_x_MST), (z, scored.costs_z_MST)):
        state.costs_MX.scatter_(0, row, torch.where(accepted.view(-1), chosen(new).view(-1), state.costs_MX[row]))

    moved = accepted & (draw.x_QMS != draw.y_QMS)
    # the null atom has no load: what does not move is a swap of null atoms
    i, j = torch.where(moved, i, null), torch.where(moved, j, null)
    if atom_loads.shape[0] == sizes.atoms + 1:
        base = (tables.member_M * (sizes.atoms + 1))[:, None]
        i, j = i - base, j - base
    delta = atom_loads.index_select(0, j.view(-1)) - atom_loads.index_select(0, i.view(-1))
    state.loads_MXW.index_copy_(0, x, state.loads_MXW.index_select(0, x) + delta)
    state.loads_MXW.index_copy_(0, z, state.loads_MXW.index_select(0, z) - delta)
    state.num_scored_M.add_(scored.feasible_MST.sum((1, 2)))
    state.num_accepted_M.add_(accepted.sum(1))
