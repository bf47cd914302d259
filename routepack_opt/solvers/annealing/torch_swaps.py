"""Metropolis swaps of experts for M members and all layers at once (shape suffixes: :mod:`.torch_state`).

Rows stand still, so a layer's part of the cost depends on its own placement only and all layers move together. Each
(member, layer) gets T tries a round and takes its first accepted one. With several shards the energy is linear in J
with the weights of the state at the start of the round, as in the CPU kernel (there: of the layer). Loads stay
integers, so nothing drifts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.chain import ChainProblem
    from routepack_opt.solvers.annealing.torch_state import Sizes, State, Tables


class SwapState(NamedTuple):
    """Row demand and rank loads by layer; X counts real rows only."""

    vectors_MLEX: torch.Tensor  # int32 [M * L * E, X], demand of each row for each expert
    sums_MLPX: torch.Tensor  # int32 [M * L * P, X]
    rank_MLE: torch.Tensor  # int64 [M, L, E], EP rank of each expert
    attention_MX: torch.Tensor  # float64 [M, X], what swaps do not change
    scale_MLX: torch.Tensor  # float64 [M, L, X], 1 / mean load of a rank
    slope_MLX: torch.Tensor  # float64 [M, L, X], what a unit of the smooth stand-in weighs in the energy
    away_ML: torch.Tensor  # int64 [M, L], experts away from home
    home_LE: torch.Tensor  # int64 [L, E]
    budget_L: torch.Tensor  # int64 [L], most experts away from home, -1: any number
    num_accepted_M: torch.Tensor  # int64 [M]

    @classmethod
    def empty(cls, problem: ChainProblem, sizes: Sizes, device: torch.device) -> SwapState:
        """Tensors of the right shapes; only what belongs to the problem is filled."""
        m, num_layers, num_x = sizes.members, sizes.layers, sizes.real_rows

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            vectors_MLEX=zeros(m * num_layers * sizes.experts, num_x, dtype=torch.int32),
            sums_MLPX=zeros(m * num_layers * sizes.ranks, num_x, dtype=torch.int32),
            rank_MLE=zeros(m, num_layers, sizes.experts, dtype=torch.int64),
            attention_MX=zeros(m, num_x, dtype=torch.float64),
            scale_MLX=zeros(m, num_layers, num_x, dtype=torch.float64),
            slope_MLX=zeros(m, num_layers, num_x, dtype=torch.float64),
            away_ML=zeros(m, num_layers, dtype=torch.int64),
            home_LE=torch.from_numpy(problem.home.astype(np.int64)).to(device),
            budget_L=torch.from_numpy(problem.move_budget.astype(np.int64)).to(device),
            num_accepted_M=zeros(m, dtype=torch.int64),
        )


class SwapDraws(NamedTuple):
    """Pairs of experts and acceptance limits of a round, or with a leading axis Q of a block."""

    experts_2MLT: torch.Tensor  # int64
    limit_MLT: torch.Tensor  # float64


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


def load_swaps(sizes: Sizes, tables: Tables, state: State, rank_of: torch.Tensor, swaps: SwapState) -> None:
    """Fill a swap state, but for its vectors, from the rows and placements of the population."""
    shape = (sizes.members, sizes.rows, sizes.ranks, sizes.layers)
    loads = state.loads_MXW.view(shape)[:, : sizes.real_rows]
    sums = swaps.sums_MLPX.view(sizes.members, sizes.layers, sizes.ranks, sizes.real_rows)
    sums.copy_(loads.permute(0, 3, 2, 1))
    swaps.rank_MLE.copy_(rank_of)
    attention = (state.costs_MX - state.experts_MX).view(sizes.members, sizes.rows)
    swaps.attention_MX.copy_(attention[:, : sizes.real_rows])
    swaps.away_ML.copy_((swaps.rank_MLE != swaps.home_LE).sum(-1))
    mean = (sums.sum(2).to(torch.float64) / sizes.ranks).clamp_(min=1.0)
    weight = _energy_weights(sizes, tables, state.costs_MX.view(sizes.members, -1)[:, : sizes.real_rows])
    swaps.scale_MLX.copy_(1.0 / mean)
    swaps.slope_MLX.copy_(weight[:, None] * _gain(tables)[:, None] * mean / 12.0)
    swaps.num_accepted_M.zero_()


def store_swaps(sizes: Sizes, swaps: SwapState, state: State, rank_of: torch.Tensor) -> None:
    """Write placements and loads back; costs and loads of atoms are the caller's to recompute."""
    rank_of.copy_(swaps.rank_MLE)
    loads = state.loads_MXW.view(sizes.members, sizes.rows, sizes.ranks, sizes.layers)
    sums = swaps.sums_MLPX.view(sizes.members, sizes.layers, sizes.ranks, sizes.real_rows)
    loads[:, : sizes.real_rows].copy_(sums.permute(0, 3, 2, 1))


def draw_swaps(
    sizes: Sizes, tables: Tables, generator: torch.Generator, num_rounds: int, temperature_M: torch.Tensor
) -> SwapDraws:
    """Two experts of a layer, drawn uniformly, for every try."""
    shape = (num_rounds, 3, sizes.members, sizes.layers, sizes.tries)
    u = torch.rand(shape, generator=generator, device=tables.member_M.device)
    experts = (u[:, :2] * sizes.experts).to(torch.int64).clamp_(max=sizes.experts - 1)
    return SwapDraws(experts, -torch.log1p(-u[:, 2].to(torch.float64)) * temperature_M[:, None, None])


def swap_round(sizes: Sizes, tables: Tables, swaps: SwapState, smooth: bool, draw: SwapDraws) -> None:
    """Score and accept one round; ``smooth`` uses the stand-in of :func:`.rank_swaps.level_experts` for maxima."""
    members, layers, num_x = sizes.members, sizes.layers, sizes.real_rows
    experts, limit = draw
    layer_ML = torch.arange(members * layers, device=limit.device).view(members, layers, 1)
    ranks = swaps.rank_MLE.expand(2, -1, -1, -1).gather(-1, experts)
    e, f = swaps.vectors_MLEX[layer_ML * sizes.experts + experts]
    entering = f - e  # what the rank of e gains and that of f loses
    held = swaps.sums_MLPX[layer_ML * sizes.ranks + ranks]
    if smooth:
        change = _smooth_change(swaps, held, entering)
    else:
        change = _peak_change(sizes, tables, swaps, ranks, held, entering)
    further = _further_away(swaps.home_LE, experts, ranks)
    budget = swaps.budget_L[:, None]
    allowed = (budget < 0) | (further <= 0) | (swaps.away_ML[..., None] + further <= budget)
    accept = (ranks[0] != ranks[1]) & allowed & (_gain(tables)[:, None] > 0.0) & (change <= limit)

    first = tables.try_T.expand_as(accept).masked_fill(~accept, sizes.tries).amin(-1, keepdim=True)
    accepted = first < sizes.tries
    pick = first.clamp(max=sizes.tries - 1)
    experts, ranks = (v.gather(-1, pick.expand(2, -1, -1, -1)) for v in (experts, ranks))
    # a layer without an accepted try writes back what it holds
    for expert, old, new in ((experts[0], ranks[0], ranks[1]), (experts[1], ranks[1], ranks[0])):
        swaps.rank_MLE.scatter_(-1, expert, torch.where(accepted, new, old))
    entering = entering.gather(2, pick[..., None].expand(-1, -1, -1, num_x)) * accepted[..., None]
    for rank, sign in zip(ranks, (1, -1), strict=True):
        place = (layer_ML * sizes.ranks + rank).view(-1)
        sums = torch.add(swaps.sums_MLPX.index_select(0, place), entering.view(-1, num_x), alpha=sign)
        swaps.sums_MLPX.index_copy_(0, place, sums)
    swaps.away_ML.add_((further.gather(-1, pick) * accepted).squeeze(-1))
    swaps.num_accepted_M.add_(accepted.sum((1, 2)))


def _gain(tables: Tables) -> torch.Tensor:
    """float64 [L], what one assignment of the most loaded rank costs."""
    return tables.gamma_L / float(tables.cap)


def _smooth_change(swaps: SwapState, held_2MLTX: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
    """Change [M, L, T] of (m / 12) sum_p (W_p / m)^12 with m the mean: only the two ranks of a swap matter."""
    scale = swaps.scale_MLX[:, :, None]
    after = torch.stack([held_2MLTX[0] + entering, held_2MLTX[1] - entering])
    levels = torch.stack([after, held_2MLTX]) * scale
    fourth = levels.square().square()
    power = fourth * fourth * fourth
    return ((power[0] - power[1]).sum(0) * swaps.slope_MLX[:, :, None]).sum(-1)


def _peak_change(
    sizes: Sizes,
    tables: Tables,
    swaps: SwapState,
    ranks: torch.Tensor,
    held_2MLTX: torch.Tensor,
    entering: torch.Tensor,
) -> torch.Tensor:
    """Change [M, L, T] of the energy, linear in J with the weights of the moment."""
    tops = _largest_three(swaps.sums_MLPX.view(sizes.members, sizes.layers, sizes.ranks, sizes.real_rows))
    peak_MLX = tops[0][0]
    new = torch.maximum(held_2MLTX[0] + entering, held_2MLTX[1] - entering)
    new = torch.maximum(new, _largest_but(tops, *ranks))
    gain_L = _gain(tables)
    costs_MX = swaps.attention_MX + (peak_MLX * gain_L[:, None]).sum(1)
    weight = _energy_weights(sizes, tables, costs_MX)
    return ((new - peak_MLX[:, :, None]) * weight[:, None, None]).sum(-1) * gain_L[:, None]


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


def _energy_weights(sizes: Sizes, tables: Tables, costs_MX: torch.Tensor) -> torch.Tensor:
    """How much a unit of J weighs in the energy now, float64 [M, X]; the slowest shard or row carries the rest."""
    if sizes.shards == 1:
        return torch.ones_like(costs_MX)
    costs_MRG = costs_MX.reshape(sizes.members, -1, sizes.shards)
    if tables.sync_row:
        slowest = costs_MRG.argmax(-1, keepdim=True)
    else:
        slowest = costs_MRG.sum(1, keepdim=True).argmax(-1, keepdim=True)
    heavy = (tables.shard_G == slowest).expand_as(costs_MRG).reshape(costs_MX.shape)
    return tables.mean_share + tables.slowest_share * heavy


def _further_away(home_LE: torch.Tensor, experts_2MLT: torch.Tensor, ranks_2MLT: torch.Tensor) -> torch.Tensor:
    """How many more experts would be away from home [M, L, T] after the two changed ranks."""
    home = home_LE.expand(*experts_2MLT.shape[:2], -1, -1).gather(-1, experts_2MLT)
    return ((ranks_2MLT.flip(0) != home).long() - (ranks_2MLT != home).long()).sum(0)
