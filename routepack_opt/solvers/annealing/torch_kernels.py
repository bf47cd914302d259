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
    """The feasible candidates of one round that are scored."""

    rows_2MS: torch.Tensor  # flat rows, see Draws
    homes_2MS: torch.Tensor
    atoms_2MST: torch.Tensor  # flat atoms i and j
    cells_2MST: torch.Tensor  # flat cells: i goes from the first to the second, j back
    after_2MSTF: torch.Tensor  # both cells after the move
    limit_MST: torch.Tensor
    real_MST: torch.Tensor  # False where there were fewer than T feasible candidates


class Costs(NamedTuple):
    """Costs of the rows of a slot, before and after each try."""

    old_2MS: torch.Tensor
    total_2MST: torch.Tensor
    old_experts_2MS: torch.Tensor
    experts_2MST: torch.Tensor


def run_round(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, draw: Draws) -> None:
    """Score and accept the proposals of one round."""
    tries = _feasible_tries(sizes, tables, state, draw)
    costs = _costs(sizes, tables, state, atom_loads, tries)
    d_2MST = costs.total_2MST - costs.old_2MS[..., None]
    if sizes.shards == 1:
        first = _first(tables, tries.real_MST & (d_2MST.sum(0) <= tries.limit_MST))
    elif tables.sync_row:
        change = _row_sync_change(sizes, tables, state, tries, costs, d_2MST)
        first = _first(tables, tries.real_MST & (change <= tries.limit_MST))
    else:
        first = _first_in_turn(sizes, tables, state, tries, d_2MST)
    _apply(sizes, tables, state, atom_loads, tries, costs, first)


def _fits(tables: Tables, cells: torch.Tensor) -> torch.Tensor:
    """Cell rule: within the cap, or a single (oversize) atom; never empty; at most max_samples."""
    atoms = cells[..., ATOMS]
    fits = ((cells[..., PADDED] <= tables.cap) & (atoms >= 1)) | (atoms == 1)
    return fits & (cells[..., SAMPLES] <= tables.max_samples)


def _feasible_tries(sizes: Sizes, tables: Tables, state: State, draw: Draws) -> Tries:
    """The first T feasible candidates of every slot."""
    homes, atoms = draw.homes_2MS, draw.atoms_2MSC
    cells = torch.where(draw.target_2MSC >= 0, draw.target_2MSC, state.cell_of_MN[atoms])
    after = state.cells_BF[cells] - draw.leaving_2MSCF
    feasible = (_fits(tables, after) & (cells // sizes.cells == homes[..., None])).all(0) & (cells[0] != cells[1])
    ranks = tables.rank_B[cells]
    feasible &= draw.free_MSC | (ranks[0] == ranks[1])

    # the k-th feasible candidate goes to place k; infeasible and surplus ones to a scrap place at the end
    place = (feasible.cumsum(-1) - 1).masked_fill_(~feasible, sizes.tries).clamp_(max=sizes.tries)
    kept = place.new_full((sizes.members, sizes.slots, sizes.tries + 1), sizes.candidates)
    kept = kept.scatter_(-1, place, tables.candidate_C.expand_as(place))[..., :-1]
    real = kept < sizes.candidates
    flat = (tables.slot_MS1 * sizes.candidates + kept.clamp(max=sizes.candidates - 1)).view(-1)
    shape = (2, *real.shape)
    return Tries(
        rows_2MS=draw.rows_2MS,
        homes_2MS=homes,
        atoms_2MST=atoms.view(2, -1).index_select(1, flat).view(shape),
        cells_2MST=cells.view(2, -1).index_select(1, flat).view(shape),
        after_2MSTF=after.view(2, -1, 5).index_select(1, flat).view(*shape, 5),
        limit_MST=draw.limit_MSC.view(-1).index_select(0, flat).view(real.shape),
        real_MST=real,
    )


def _costs(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, tries: Tries) -> Costs:
    old, old_experts = state.costs_MX[tries.rows_2MS], state.experts_MX[tries.rows_2MS]
    inside = tries.homes_2MS[0] == tries.homes_2MS[1]  # the row keeps its atoms
    experts = _experts(sizes, tables, state, atom_loads, tries)
    experts = torch.where(inside[..., None], old_experts[..., None], experts)
    untouched = (tries.rows_2MS != tries.homes_2MS)[..., None]
    total = torch.where(untouched, old[..., None], _attention(sizes, tables, state, tries) + experts)
    return Costs(old, total, old_experts, experts)


def _attention(sizes: Sizes, tables: Tables, state: State, tries: Tries) -> torch.Tensor:
    """Attention cost [2, M, S, T] of the rows with both cells changed; of untouched rows it means nothing."""
    old = stage_costs(tables, state.cells_BF.view(-1, sizes.cells, 5)[tries.rows_2MS])
    changed = stage_costs(tables, tries.after_2MSTF)
    new = old[..., None, :].repeat(1, 1, 1, 1, sizes.tries, 1)  # [A, 2, M, S, T, K]
    # where the changed cells are in their rows; of a try that is not real the nearest place
    places = (tries.cells_2MST - tries.homes_2MS[..., None] * sizes.cells).clamp_(0, sizes.cells - 1)
    inside = (tries.homes_2MS[0] == tries.homes_2MS[1])[..., None]
    # the second cell may be in the first row too; otherwise this write is undone by the next one
    also = torch.stack([torch.where(inside, places[1], places[0]), places[1]])
    new.scatter_(-1, also.expand_as(changed)[..., None], changed[:, 1:].expand_as(changed)[..., None])
    new.scatter_(-1, places.expand_as(changed)[..., None], changed[..., None])
    return sum_stages(new.amax(-1))


def _experts(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor, tries: Tries) -> torch.Tensor:
    """Expert cost [2, M, S, T] of the rows after the atoms changed places."""
    atoms = _load_rows(sizes, tables, atom_loads, tries.atoms_2MST)
    # on a CPU some members at a time keep the vectors in cache; a GPU wants them all at once
    width = sizes.slots * sizes.tries * sizes.ranks * sizes.layers
    step = max(1, _CACHED_ENTRIES // width) if atoms.device.type == "cpu" else sizes.members
    peaks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for start in range(0, sizes.members, step):
        part = slice(start, start + step)
        i, j = atoms[:, part].reshape(2, -1)
        entering = atom_loads.index_select(0, j)
        entering -= atom_loads.index_select(0, i)
        entering = entering.view(-1, sizes.tries, entering.shape[-1])
        for rows, sign, found in zip(tries.rows_2MS, (1, -1), peaks, strict=True):
            loads = state.loads_MXW.index_select(0, rows[part].reshape(-1))[:, None]
            found.append(_largest_rank(sizes, torch.add(loads, entering, alpha=sign)))
    return expert_costs(tables, torch.cat(peaks[0] + peaks[1])).view(tries.atoms_2MST.shape)


def _load_rows(sizes: Sizes, tables: Tables, atom_loads: torch.Tensor, atoms_2M: torch.Tensor) -> torch.Tensor:
    """Rows of ``atom_loads`` of flat atoms [2, M, ..]."""
    if atom_loads.shape[0] != sizes.atoms + 1:
        return atoms_2M
    base = tables.member_M * (sizes.atoms + 1)  # one placement for all members
    return atoms_2M - base.view(-1, *(1,) * (atoms_2M.ndim - 2))


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
    return tables.try_T.expand_as(accept).masked_fill(~accept, num_tries).amin(-1)


def _row_sync_change(
    sizes: Sizes, tables: Tables, state: State, tries: Tries, costs: Costs, d_2MST: torch.Tensor
) -> torch.Tensor:
    """Energy change [M, S, T] where each row waits for its slowest shard."""
    rows = tries.rows_2MS
    local = rows - (tables.member_M * sizes.rows)[:, None]
    shards_2MSG = (rows - local % sizes.shards)[..., None] + tables.shard_G  # all shards of both rows
    old = state.costs_MX[shards_2MSG][..., None, :]
    new = old
    for side in range(2):
        here = (shards_2MSG == rows[side][..., None])[..., None, :]
        new = torch.where(here, costs.total_2MST[side][..., None], new)
    rise = new.amax(-1) - old.amax(-1)
    together = (shards_2MSG[0, ..., 0] == shards_2MSG[1, ..., 0])[..., None]  # one row: count it once
    rises = rise[0] + rise[1].masked_fill(together, 0.0)
    return tables.slowest_share * rises + tables.mean_share * d_2MST.sum(0)


def _first_in_turn(sizes: Sizes, tables: Tables, state: State, tries: Tries, d_2MST: torch.Tensor) -> torch.Tensor:
    """First accepted try [M, S] of each slot, slots in turn, each seeing the shard sums the earlier ones left."""
    costs_MX = state.costs_MX.view(sizes.members, sizes.rows)[:, : sizes.real_rows]
    sums_MG = costs_MX.reshape(sizes.members, -1, sizes.shards).sum(1)
    d_MSTG = (d_2MST[..., None] * tables.shard_MXG[tries.rows_2MS][..., None, :]).sum(0)
    rest = tables.mean_share * d_2MST.sum(0) - tries.limit_MST
    rest = rest.masked_fill_(~tries.real_MST, float("inf"))
    slowest = sums_MG.amax(-1, keepdim=True)
    firsts = []
    for slot in range(sizes.slots):
        d_MTG = d_MSTG[:, slot]
        peaks_MT = (sums_MG[:, None] + d_MTG).amax(-1)
        first = _first(tables, tables.slowest_share * (peaks_MT - slowest) + rest[:, slot] <= 0.0)
        firsts.append(first)
        passed = tables.try_T != first[:, None]
        sums_MG = sums_MG + d_MTG.masked_fill(passed[..., None], 0.0).sum(1)
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
    pick = first.clamp(max=sizes.tries - 1).expand(2, -1, -1)[..., None]

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return values.gather(-1, pick).squeeze(-1)

    atoms, cells = chosen(tries.atoms_2MST), chosen(tries.cells_2MST)
    null = (tables.member_M * (sizes.atoms + 1) + sizes.atoms)[:, None]
    scrap = ((tables.member_M + 1) * sizes.rows * sizes.cells - 1)[:, None]
    state.cell_of_MN.scatter_(0, torch.where(accepted, atoms, null).view(-1), cells.flip(0).view(-1))
    after = tries.after_2MSTF.gather(-2, pick[..., None].expand(-1, -1, -1, -1, 5))
    state.cells_BF.index_copy_(0, torch.where(accepted, cells, scrap).view(-1), after.view(-1, 5))
    rows = tries.rows_2MS.reshape(-1)
    for target, new, old in (
        (state.experts_MX, costs.experts_2MST, costs.old_experts_2MS),
        (state.costs_MX, costs.total_2MST, costs.old_2MS),
    ):
        target.scatter_(0, rows, torch.where(accepted, chosen(new), old).view(-1))

    moved = accepted & (tries.homes_2MS[0] != tries.homes_2MS[1])
    # the null atom has no load: what does not move is a swap of null atoms
    i, j = _load_rows(sizes, tables, atom_loads, torch.where(moved, atoms, null)).view(2, -1)
    entering = atom_loads.index_select(0, j) - atom_loads.index_select(0, i)
    loads = state.loads_MXW.index_select(0, rows).view(2, -1, entering.shape[-1])
    new_loads = torch.stack([loads[0] + entering, loads[1] - entering])
    state.loads_MXW.index_copy_(0, rows, new_loads.view(-1, entering.shape[-1]))
    state.num_scored_M.add_(tries.real_MST.sum((1, 2)))
    state.num_accepted_M.add_(accepted.sum(1))
