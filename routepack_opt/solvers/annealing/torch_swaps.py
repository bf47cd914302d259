"""Metropolis swaps of experts for M members and all layers at once (shape suffixes: :mod:`.torch_state`).

Rows stand still, so a layer's part of the cost depends on its own placement only and all layers move together. Each
(member, layer) gets T tries a round and takes its first accepted one. Energy is linear in J with the weights of the
state at the start of the round, as in the CPU kernel (there: of the layer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.torch_state import Sizes, Tables


class SwapState(NamedTuple):
    """Row demand and rank loads by layer; X counts real rows only."""

    vectors_MLEX: torch.Tensor  # int32 [M * L * E, X], demand of each row for each expert
    sums_MLPX: torch.Tensor  # int32 [M * L * P, X]
    rank_MLE: torch.Tensor  # int64 [M, L, E], EP rank of each expert
    attention_MX: torch.Tensor  # float64 [M, X], what swaps do not change
    away_ML: torch.Tensor  # int64 [M, L], experts away from home
    home_LE: torch.Tensor  # int64 [L, E]
    budget_L: torch.Tensor  # int64 [L], most experts away from home, -1: any number
    num_accepted_M: torch.Tensor  # int64 [M]


class SwapDraws(NamedTuple):
    """Pairs of experts and acceptance limits of a block of rounds."""

    e_QMLT: torch.Tensor
    f_QMLT: torch.Tensor
    limit_QMLT: torch.Tensor  # float64


def build_vectors(sizes: Sizes, demand_NW: torch.Tensor, cell_MN: torch.Tensor, out_MLEX: torch.Tensor) -> None:
    """Demand of every row: a product with the 0/1 matrix of rows and atoms, exact as long as totals fit the mantissa.

    Parameters
    ----------
    demand_NW
        float32 or float64 [N, L * E].
    cell_MN
        int64 [M, N], flat cells.
    out_MLEX
        int32 [M * L * E, X], filled.
    """
    row_X = torch.arange(sizes.real_rows, device=cell_MN.device)
    out = out_MLEX.view(sizes.members, sizes.layers * sizes.experts, sizes.real_rows)
    chunk = max(1, (1 << 25) // (sizes.real_rows * demand_NW.shape[1]))
    for start in range(0, sizes.members, chunk):
        rows = cell_MN[start : start + chunk] // sizes.cells % sizes.rows
        member_XN = (rows[:, None] == row_X[:, None]).to(demand_NW.dtype)
        product = member_XN.flatten(0, 1) @ demand_NW
        out[start : start + chunk].copy_(product.view(rows.shape[0], sizes.real_rows, -1).transpose(1, 2))


def build_atom_loads(sizes: Sizes, demand_LNE: torch.Tensor, rank_MLE: torch.Tensor, out: torch.Tensor) -> None:
    """Per-rank loads of every atom from the placements of the members [C, L, E]; ``out`` is int32 [C * (N + 1), P * L].

    The row of the null atom is left alone.
    """
    rank_P = torch.arange(sizes.ranks, device=rank_MLE.device)
    shaped = out.view(-1, sizes.atoms + 1, sizes.ranks, sizes.layers)
    width = sizes.layers * sizes.ranks * max(sizes.experts, sizes.atoms)
    chunk = max(1, (1 << 25) // width)
    for start in range(0, shaped.shape[0], chunk):
        ranks = rank_MLE[start : start + chunk]
        placed = (ranks[..., None] == rank_P).to(demand_LNE.dtype).permute(1, 2, 0, 3)  # [L, E, c, P]
        product = torch.bmm(demand_LNE, placed.reshape(sizes.layers, sizes.experts, -1))  # [L, N, c * P]
        product = product.view(sizes.layers, sizes.atoms, ranks.shape[0], sizes.ranks)
        shaped[start : start + chunk, :-1].copy_(product.permute(2, 1, 3, 0))


def draw_swaps(
    sizes: Sizes, tables: Tables, generator: torch.Generator, num_rounds: int, temperature_M: torch.Tensor
) -> SwapDraws:
    """Two experts of a layer, drawn uniformly, for every try."""
    shape = (3, num_rounds, sizes.members, sizes.layers, sizes.tries)
    u = torch.rand(shape, generator=generator, device=tables.member_M.device)
    e, f = (u[:2] * sizes.experts).to(torch.int64).clamp_(max=sizes.experts - 1)
    return SwapDraws(e, f, -torch.log1p(-u[2].to(torch.float64)) * temperature_M[:, None, None])


def swap_round(sizes: Sizes, tables: Tables, state: SwapState, draws: SwapDraws, index: int) -> None:
    """Score and accept round ``index`` of a block."""
    e, f, limit = (tensor[index] for tensor in draws)
    members, layers, ranks, num_x = sizes.members, sizes.layers, sizes.ranks, sizes.real_rows
    layer_ML = torch.arange(members * layers, device=e.device).view(members, layers, 1)
    p, q = state.rank_MLE.gather(-1, e), state.rank_MLE.gather(-1, f)
    sums = state.sums_MLPX.view(members, layers, ranks, num_x)
    tops = _largest_three(sums)
    peak_MLX = tops[0][0]
    delta = state.vectors_MLEX[layer_ML * sizes.experts + f] - state.vectors_MLEX[layer_ML * sizes.experts + e]
    new = torch.maximum(
        state.sums_MLPX[layer_ML * ranks + p] + delta,
        state.sums_MLPX[layer_ML * ranks + q] - delta,
    )
    new = torch.maximum(new, _largest_but(tops, p, q))
    gain_L = tables.gamma_L / float(tables.cap)
    weight = _energy_weights(sizes, tables, state, peak_MLX, gain_L)
    rise = (new - peak_MLX[:, :, None]) * weight[:, None, None]
    change = rise.sum(-1) * gain_L[:, None]
    further = _further_away(state.home_LE, e, f, p, q)
    budget = state.budget_L[:, None]
    allowed = (budget < 0) | (further <= 0) | (state.away_ML[..., None] + further <= budget)
    accept = (p != q) & allowed & (gain_L[:, None] > 0.0) & (change <= limit)

    first = torch.where(accept, tables.try_T, sizes.tries).amin(-1)
    accepted = first < sizes.tries
    pick = first.clamp(max=sizes.tries - 1)[..., None]
    e, f, p, q, further = (v.gather(-1, pick) for v in (e, f, p, q, further))
    # a layer without an accepted try writes back what it holds
    state.rank_MLE.scatter_(-1, e, torch.where(accepted[..., None], q, p))
    held = state.rank_MLE.gather(-1, f)
    state.rank_MLE.scatter_(-1, f, torch.where(accepted[..., None], p, held))
    delta = delta.gather(2, pick[..., None].expand(-1, -1, -1, num_x)).view(-1, num_x)
    delta = delta * accepted.view(-1, 1)
    for rank, sign in ((p, 1), (q, -1)):
        place = (layer_ML * ranks + rank).view(-1)
        old = state.sums_MLPX.index_select(0, place)
        state.sums_MLPX.index_copy_(0, place, torch.add(old, delta, alpha=sign).to(torch.int32))
    state.away_ML.add_(further.squeeze(-1) * accepted)
    state.num_accepted_M.add_(accepted.sum(1))


def _largest_three(sums_MLPX: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The three largest ranks of every row and layer: loads and rank numbers [M, L, X]; -1 beyond the last rank."""
    tops = []
    for _ in range(3):
        value, rank = sums_MLPX.max(2)
        tops.append((value, rank))
        sums_MLPX = sums_MLPX.scatter(2, rank[:, :, None], -1)
    return tops


def _largest_but(tops: list[tuple[torch.Tensor, torch.Tensor]], p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Largest load [M, L, T, X] among the ranks other than p and q."""
    (first, rank1), (second, rank2), (third, _) = ((v[:, :, None], r[:, :, None]) for v, r in tops)
    p, q = p[..., None], q[..., None]
    rest = torch.where((rank2 == p) | (rank2 == q), third, second)
    return torch.where((rank1 == p) | (rank1 == q), rest, first)


def _energy_weights(
    sizes: Sizes, tables: Tables, state: SwapState, peak_MLX: torch.Tensor, gain_L: torch.Tensor
) -> torch.Tensor:
    """How much a unit of J weighs in the energy now, float64 [M, X]; the slowest shard or row carries the rest."""
    costs = state.attention_MX + (peak_MLX * gain_L[:, None]).sum(1)
    if sizes.shards == 1:
        return torch.ones_like(costs)
    costs_MRG = costs.view(sizes.members, -1, sizes.shards)
    if tables.sync_row:
        slowest = costs_MRG.argmax(-1, keepdim=True)
    else:
        slowest = costs_MRG.sum(1, keepdim=True).argmax(-1, keepdim=True)
    heavy = (tables.shard_G == slowest).expand_as(costs_MRG).reshape(costs.shape)
    return tables.spread / sizes.shards + (1.0 - tables.spread) * heavy


def _further_away(
    home_LE: torch.Tensor, e: torch.Tensor, f: torch.Tensor, p: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """How many more experts would be away from home after e and f changed ranks."""
    home = home_LE.expand(e.shape[0], -1, -1)
    home_e, home_f = home.gather(-1, e), home.gather(-1, f)
    return (q != home_e).long() - (p != home_e).long() + (p != home_f).long() - (q != home_f).long()
