"""State of a population of layouts on a torch device: what is fixed, what changes, and how it is rebuilt.

Shape suffixes of tensors in the three ``torch_*`` modules, fused axes written together (``MX`` is one axis of M * X):

    M members    N atoms, plus a null atom that weighs nothing    X rows of the state: row-shards, idle rows, scrap
    K cells of a row-shard (widest)    B = M * X * K cells of all members    F cell features    A attention stages
    P EP ranks   L MoE layers   E experts   G EDP shards   S slots: disjoint pairs of rows
    C candidates drawn for a slot   T tries: feasible candidates that are scored   Q rounds of a block
    2 sides of a move: atom i with the cell and the row it leaves, then atom j with the cell and the row i enters

Atoms are numbered by ascending padded length. Row-shard x = r * G + g, as in the CPU kernels. Cells and rows are
numbered through all members (cell ``(m * X + x) * K + k``), so that one flat index reaches everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.solvers.annealing.chain import ChainProblem

PADDED, TOKENS, SQUARES, SAMPLES, ATOMS = range(5)
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Sizes:
    """Numbers of everything; see the module legend.

    ``unit`` is the number of rows of the state that a slot owns twice: 1, or G with ``sync="row"``, where the shards
    of a row share one maximum and so may not be changed by two slots at once.
    """

    members: int
    atoms: int
    ranks: int
    layers: int
    experts: int
    shards: int
    real_rows: int
    rows: int
    cells: int
    unit: int
    num_units: int
    slots: int
    tries: int
    candidates: int

    @classmethod
    def of(cls, problem: ChainProblem, num_members: int, num_tries: int, num_candidates: int) -> Sizes:
        """Sizes of a population."""
        n, num_layers, num_experts = problem.demand.shape
        num_shards = len(problem.shards)
        real_rows = problem.num_rows * num_shards
        unit = num_shards if problem.sync == "row" else 1
        num_units = real_rows // unit
        slots = -(-num_units // 2)
        return cls(
            members=num_members,
            atoms=n,
            ranks=problem.num_expert_ranks,
            layers=num_layers,
            experts=num_experts,
            shards=num_shards,
            real_rows=real_rows,
            rows=2 * slots * unit + 1,  # an odd number of units is paired with an idle one; the last row is scrap
            cells=max(map(len, problem.shards)),
            unit=unit,
            num_units=num_units,
            slots=slots,
            tries=num_tries,
            candidates=num_candidates,
        )


class Tables(NamedTuple):
    """What never changes, on the device; then the rules and prices as plain numbers."""

    features_NF: torch.Tensor  # int64 [N + 1, F], the null atom last
    pinned_N: torch.Tensor  # bool [N + 1]
    rank_B: torch.Tensor  # int64 [B], DP rank of each cell
    num_cells_MX: torch.Tensor  # int64 [M * X], 0 for idle rows
    shard_MXG: torch.Tensor  # float64 [M * X, G], one-hot shard of each row
    member_M: torch.Tensor  # int64 [M], 0 .. M - 1
    slot_MS1: torch.Tensor  # int64 [M, S, 1], number of each slot
    try_T: torch.Tensor  # int64 [T]
    candidate_C: torch.Tensor  # int64 [C]
    cell_K: torch.Tensor  # int64 [K]
    shard_G: torch.Tensor  # int64 [G]
    gamma_L: torch.Tensor  # float64 [L], times 2^shift
    alpha_A: torch.Tensor  # float64 [A], at least one stage
    beta_A: torch.Tensor  # float64 [A]
    slowest_share: torch.Tensor  # float64, weight of the slowest shard in the energy: 1 - spread, see :mod:`.energy`
    mean_share: torch.Tensor  # float64, weight of the sum over shards: spread / G
    uniform_gamma: float | None  # the one gamma, when all agree: integers are summed first, as the evaluator does
    cap: int
    max_samples: int
    equal_samples: bool
    sync_row: bool


class State(NamedTuple):
    """M layouts and everything derived from them; changed in place."""

    cell_of_MN: torch.Tensor  # int64 [M * (N + 1)], flat cell of each atom; the null atom's entry is scrap
    cells_BF: torch.Tensor  # int64 [B, F]
    loads_MXW: torch.Tensor  # int32 [M * X, P * L]
    experts_MX: torch.Tensor  # float64 [M * X], expert part of the cost
    costs_MX: torch.Tensor  # float64 [M * X], J
    num_scored_M: torch.Tensor  # int64 [M], feasible proposals
    num_accepted_M: torch.Tensor  # int64 [M]


@dataclass(frozen=True)
class Numbering:
    """Between the caller's atoms and cells (r * D + d) and ours, on the host."""

    order: NDArray[np.int64]  # [n], the caller's index of each of our atoms
    inner_cell: NDArray[np.int64]  # [R * D] -> x * K + k
    outer_cell: NDArray[np.int64]  # [X * K] -> r * D + d, -1 where there is no cell

    @classmethod
    def of(cls, problem: ChainProblem, sizes: Sizes) -> Numbering:
        """Atoms by ascending padded length; cells by row-shard."""
        inner = np.empty(problem.num_rows * problem.num_ranks, dtype=np.int64)
        for row in range(problem.num_rows):
            for shard, ranks in enumerate(problem.shards):
                x = row * sizes.shards + shard
                inner[row * problem.num_ranks + np.asarray(ranks)] = x * sizes.cells + np.arange(len(ranks))
        outer = np.full(sizes.rows * sizes.cells, -1, dtype=np.int64)
        outer[inner] = np.arange(inner.size)
        return cls(np.argsort(problem.padded, kind="stable"), inner, outer)


def build_tables(
    problem: ChainProblem, sizes: Sizes, numbering: Numbering, device: torch.device, spread: float
) -> Tables:
    """Everything fixed, moved to the device once."""
    features = np.zeros((sizes.atoms + 1, 5), dtype=np.int64)
    columns = (problem.padded, problem.tokens, problem.squares, problem.samples, np.ones_like(problem.padded))
    features[:-1] = np.stack(columns, axis=1)[numbering.order]
    pinned = np.append(problem.pinned[numbering.order], False)
    rank = np.where(numbering.outer_cell >= 0, numbering.outer_cell % problem.num_ranks, -1)
    num_cells = (numbering.outer_cell.reshape(sizes.rows, sizes.cells) >= 0).sum(axis=1)
    shard = np.eye(sizes.shards)[np.arange(sizes.rows) % sizes.shards]
    gamma = problem.gamma * float(2**problem.shift)

    def on_device(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Tables(
        features_NF=on_device(features),
        pinned_N=on_device(pinned),
        rank_B=on_device(np.tile(rank, sizes.members)),
        num_cells_MX=on_device(np.tile(num_cells, sizes.members)),
        shard_MXG=on_device(np.tile(shard, (sizes.members, 1))),
        member_M=torch.arange(sizes.members, device=device),
        slot_MS1=torch.arange(sizes.members * sizes.slots, device=device).view(sizes.members, sizes.slots, 1),
        try_T=torch.arange(sizes.tries, device=device),
        candidate_C=torch.arange(sizes.candidates, device=device),
        cell_K=torch.arange(sizes.cells, device=device),
        shard_G=torch.arange(sizes.shards, device=device),
        gamma_L=on_device(gamma),
        uniform_gamma=float(gamma[0]) if (gamma == gamma[0]).all() else None,
        alpha_A=on_device(problem.alpha if problem.alpha.size else np.zeros(1)),
        beta_A=on_device(problem.beta if problem.beta.size else np.zeros(1)),
        slowest_share=torch.full((), 1.0 - spread, dtype=torch.float64, device=device),
        mean_share=torch.full((), spread / sizes.shards, dtype=torch.float64, device=device),
        cap=int(problem.cap),
        max_samples=int(problem.max_samples) or _NO_LIMIT,
        equal_samples=bool(problem.equal_samples),
        sync_row=problem.sync == "row",
    )


def empty_state(sizes: Sizes, device: torch.device) -> State:
    """Zeroed tensors of the right shapes."""
    num_rows = sizes.members * sizes.rows
    return State(
        cell_of_MN=torch.zeros(sizes.members * (sizes.atoms + 1), dtype=torch.int64, device=device),
        cells_BF=torch.zeros((num_rows * sizes.cells, 5), dtype=torch.int64, device=device),
        loads_MXW=torch.zeros((num_rows, sizes.ranks * sizes.layers), dtype=torch.int32, device=device),
        experts_MX=torch.zeros(num_rows, dtype=torch.float64, device=device),
        costs_MX=torch.zeros(num_rows, dtype=torch.float64, device=device),
        num_scored_M=torch.zeros(sizes.members, dtype=torch.int64, device=device),
        num_accepted_M=torch.zeros(sizes.members, dtype=torch.int64, device=device),
    )


def stage_costs(tables: Tables, cells: torch.Tensor) -> torch.Tensor:
    """float64 [A, ..], alpha * T + beta * Q of cells [.., F], in the evaluator's order of operations."""
    shape = (-1,) + (1,) * (cells.ndim - 1)
    tokens = cells[..., TOKENS].to(torch.float64) / float(tables.cap)  # integers alone would divide in float32
    squares = cells[..., SQUARES].to(torch.float64) / float(tables.cap) ** 2
    return tables.alpha_A.view(shape) * tokens + tables.beta_A.view(shape) * squares


def sum_stages(costs: torch.Tensor) -> torch.Tensor:
    """Sum [A, ..] over stages one after the other, as the evaluator does."""
    total = costs[0]
    for stage in range(1, costs.shape[0]):
        total = total + costs[stage]
    return total


def expert_costs(tables: Tables, peaks: torch.Tensor) -> torch.Tensor:
    """(1/C) sum_l gamma_l peaks [.., L]; integer sum first when all gammas agree, as the evaluator does."""
    if tables.uniform_gamma is not None:
        return tables.uniform_gamma * peaks.sum(-1).to(torch.float64) / float(tables.cap)
    return (peaks * tables.gamma_L).sum(-1) / float(tables.cap)


def recompute(sizes: Sizes, tables: Tables, state: State, atom_loads: torch.Tensor) -> None:
    """Fill the state from ``cell_of_MN``: the slow, obviously right path.

    Parameters
    ----------
    atom_loads
        int32 [(N + 1), P * L] shared by all members, or [M * (N + 1), P * L].
    """
    cell_MN = state.cell_of_MN.view(sizes.members, -1)[:, : sizes.atoms].reshape(-1)
    state.cells_BF.zero_()
    state.cells_BF.index_add_(0, cell_MN, tables.features_NF[:-1].repeat(sizes.members, 1))
    state.loads_MXW.zero_()
    row_MN = cell_MN.view(sizes.members, -1) // sizes.cells
    shared = atom_loads.shape[0] == sizes.atoms + 1
    for member in range(sizes.members):  # one member at a time bounds the memory
        start = 0 if shared else member * (sizes.atoms + 1)
        state.loads_MXW.index_add_(0, row_MN[member], atom_loads[start : start + sizes.atoms])
    recompute_costs(sizes, tables, state)


def recompute_costs(sizes: Sizes, tables: Tables, state: State) -> None:
    """Costs of every row from its integers."""
    peaks = state.loads_MXW.view(-1, sizes.ranks, sizes.layers).amax(1)
    state.experts_MX.copy_(expert_costs(tables, peaks))
    cells = state.cells_BF.view(-1, sizes.cells, 5)
    state.costs_MX.copy_(sum_stages(stage_costs(tables, cells).amax(-1)) + state.experts_MX)
    scrap = slice(sizes.rows - 1, None, sizes.rows)
    state.costs_MX[scrap].zero_()


def score_terms(sizes: Sizes, tables: Tables, state: State) -> torch.Tensor:
    """float64 [M, 3], the score of every member up to the rounding of float sums."""
    costs = state.costs_MX.view(sizes.members, sizes.rows)[:, : sizes.real_rows]
    costs_MRG = costs.view(sizes.members, -1, sizes.shards)
    shard_MG = costs_MRG.sum(1)
    first = costs_MRG.amax(2).sum(1) if tables.sync_row else shard_MG.amax(1)
    return torch.stack([first, shard_MG.sum(1), costs.amax(1)], dim=1)
