"""A population of annealing chains on a torch device; the counterpart of :class:`.chain.Chain` for many members.

Imported only when the torch engine is used: the package itself needs no torch. Shape suffixes: :mod:`.torch_state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from routepack_opt.solvers.annealing.exact_score import score_assignment, scores_of_counts
from routepack_opt.solvers.annealing.torch_draws import draw_block
from routepack_opt.solvers.annealing.torch_graph import RoundBlock
from routepack_opt.solvers.annealing.torch_kernels import run_round
from routepack_opt.solvers.annealing.torch_state import (
    SQUARES,
    TOKENS,
    Numbering,
    Sizes,
    build_tables,
    empty_state,
    recompute,
    recompute_costs,
    score_terms,
)
from routepack_opt.solvers.annealing.torch_swaps import (
    SwapState,
    build_atom_loads,
    build_vectors,
    draw_swaps,
    swap_round,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.cost import Score
    from routepack_opt.solvers.annealing.chain import ChainProblem

_BLOCK_ROUNDS = 16  # rounds between two looks at which atoms lie where, and the length of a captured graph
_SWAP_BLOCK_ROUNDS = 16
_EXACT_FLOAT32 = 1 << 24


@dataclass(frozen=True)
class Statistics:
    """What happened since the last call of :meth:`TorchPopulation.statistics`, per member [M].

    ``num_proposed`` counts all candidates of one member, ``num_scored`` the tries, ``num_accepted`` accepted moves,
    ``num_swaps`` accepted swaps of experts; ``mean_energy`` is over the ends of blocks (NaN without one).
    """

    num_proposed: int
    num_scored: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    num_swaps: NDArray[np.int64]
    mean_energy: NDArray[np.float64]


class TorchPopulation:
    """M layouts, with their placements, that ``anneal`` and ``refine`` change in place on a device."""

    def __init__(
        self,
        problem: ChainProblem,
        cell_of: NDArray[np.int64],
        rank_of: NDArray[np.int64],
        *,
        device: str | torch.device,
        seed: int,
        spread: float = 0.5,
        num_tries: int = 8,
        num_candidates: int | None = None,
        shared_placement: bool = False,
        use_graph: bool | None = None,
    ) -> None:
        """Start from given layouts and placements.

        Parameters
        ----------
        cell_of
            int64 [M, n], cell r * D + d of each atom; all feasible.
        rank_of
            int64 [L, E], or [M, L, E].
        device
            "cpu", "cuda", "cuda:1" ...
        seed
            Equal seeds give equal results on the same device and version of torch.
        spread
            How much of the energy is the mean over shards, see :mod:`.energy`.
        num_tries
            T, most proposals of a slot scored in a round. More cost less each; past the first accepted one they are
            wasted.
        num_candidates
            C, proposals drawn for a slot, of which the first T feasible ones are scored; None: 3 T.
        shared_placement
            Keep one placement [L, E] and one table of loads for all members; ``refine`` is then not allowed.
        use_graph
            Replay rounds as CUDA graphs. None: on CUDA devices.

        Raises
        ------
        ValueError
            Shapes that do not fit.
        """
        self.problem = problem
        self.device = torch.device(device)
        self.num_members = int(cell_of.shape[0])
        self.shared_placement = shared_placement
        sizes = self.sizes = Sizes.of(problem, self.num_members, num_tries, num_candidates or 3 * num_tries)
        if cell_of.shape != (sizes.members, sizes.atoms):
            raise ValueError(f"cell_of: shape {cell_of.shape}, expected (members, {sizes.atoms})")
        if rank_of.shape[-2:] != (sizes.layers, sizes.experts) or rank_of.shape[:-2] not in ((), (sizes.members,)):
            raise ValueError(f"rank_of: shape {rank_of.shape}, expected ([members,] {sizes.layers}, {sizes.experts})")
        if shared_placement and rank_of.ndim != 2:
            raise ValueError("rank_of: one placement [L, E] is needed with shared_placement")
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed % 2**63)
        self._numbering = Numbering.of(problem, sizes)
        self._tables = build_tables(problem, sizes, self._numbering, self.device, spread)
        self._state = empty_state(sizes, self.device)
        self._demand_LNE = self._float_demand()
        num_placements = 1 if shared_placement else sizes.members
        ranks = torch.from_numpy(np.ascontiguousarray(rank_of, dtype=np.int64)).to(self.device)
        self._rank_of = ranks.expand(num_placements, -1, -1).clone()
        self._atom_loads = torch.zeros(
            (num_placements * (sizes.atoms + 1), sizes.ranks * sizes.layers), dtype=torch.int32, device=self.device
        )
        self._load_cells(cell_of)
        self.rebuild()
        self._temperature_M = torch.zeros(sizes.members, dtype=torch.float64, device=self.device)
        graph = self.device.type == "cuda" if use_graph is None else use_graph
        self._use_graph = graph
        self._moves = RoundBlock(
            lambda draws, index: run_round(sizes, self._tables, self._state, self._atom_loads, draws, index),
            _BLOCK_ROUNDS,
            list(self._state),
            graph,
        )
        self._swaps: SwapState | None = None
        self._swap_block: RoundBlock | None = None
        self._best_cell = self._state.cell_of_MN.clone()
        self._best_rank = self._rank_of.to(torch.int16)
        self._best_score = score_terms(sizes, self._tables, self._state)
        self._num_swaps_M = torch.zeros_like(self._state.num_accepted_M)
        self._energy_sum_M = torch.zeros_like(self._temperature_M)
        self._num_energies = self._num_proposed = 0

    @staticmethod
    def member_bytes(problem: ChainProblem, num_tries: int = 8) -> int:
        """Rough device memory one member takes, its share of temporary tensors included."""
        sizes = Sizes.of(problem, 1, num_tries, 3 * num_tries)
        width = sizes.ranks * sizes.layers
        loads = 4 * width * (sizes.atoms + sizes.rows)
        tries = sizes.slots * num_tries * (4 * 4 * width + _BLOCK_ROUNDS * 750 + 100 * sizes.cells)
        swaps = 4 * sizes.layers * sizes.real_rows * (2 * sizes.experts + 4 * sizes.ranks + 8 * num_tries)
        return loads + tries + swaps + 30 * sizes.layers * sizes.experts + 32 * sizes.atoms

    def _float_demand(self) -> torch.Tensor:
        """[L, N, E] in the narrowest float type whose sums are exact here."""
        demand = self.problem.demand[self._numbering.order] >> self.problem.shift
        largest = max(
            int(demand.sum(axis=0, dtype=np.int64).max(initial=0)),
            int(demand.sum(axis=2, dtype=np.int64).max(initial=0)),
        )
        # CUDA may multiply float32 matrices in TF32, so float64 there
        narrow = largest < _EXACT_FLOAT32 and self.device.type == "cpu"
        tensor = torch.from_numpy(np.ascontiguousarray(demand.transpose(1, 0, 2))).to(self.device)
        return tensor.to(torch.float32 if narrow else torch.float64)

    def _load_cells(self, cell_of: NDArray[np.int64]) -> None:
        inner = self._numbering.inner_cell[cell_of[:, self._numbering.order]]
        inner = inner + np.arange(self.num_members)[:, None] * (self.sizes.rows * self.sizes.cells)
        cells = self._state.cell_of_MN.view(self.num_members, -1)
        cells[:, :-1].copy_(torch.from_numpy(inner).to(self.device))
        cells[:, -1].zero_()

    def rebuild(self) -> None:
        """Recompute loads of every atom from the placements, then everything else from the cells."""
        build_atom_loads(self.sizes, self._demand_LNE, self._rank_of, self._atom_loads)
        recompute(self.sizes, self._tables, self._state, self._atom_loads)

    def anneal(self, temperature: float | NDArray[np.float64], num_rounds: int, relocate_share: float = 0.15) -> int:
        """Run ``num_rounds`` rounds of Metropolis moves of atoms, at one temperature or one per member.

        Returns at once on a CUDA device: nothing waits for the result. Incumbents are offered every few rounds.

        Returns
        -------
        Number of candidates of all members together, feasible or not.
        """
        self._temperature_M.copy_(torch.as_tensor(temperature, dtype=torch.float64))
        left = num_rounds
        while left > 0:
            count = min(left, _BLOCK_ROUNDS)
            draws = draw_block(
                self.sizes, self._tables, self._state, self.generator, count, self._temperature_M, relocate_share
            )
            self._moves.run(draws, count)
            self._offer()
            self._energy_sum_M += self.energies()
            self._num_energies += 1
            left -= count
        proposed = num_rounds * self.sizes.slots * self.sizes.candidates
        self._num_proposed += proposed
        return proposed * self.num_members

    def refine(self, temperature: float | NDArray[np.float64], steps: int) -> int:
        """Metropolis swaps of experts against the standing rows, at least ``steps`` proposals a layer and member.

        Returns
        -------
        Number of proposals of all members and layers.

        Raises
        ------
        ValueError
            The population was made with ``shared_placement``.
        """
        if self.shared_placement:
            raise ValueError("refine: the members share one placement")
        sizes = self.sizes
        self._temperature_M.copy_(torch.as_tensor(temperature, dtype=torch.float64))
        swaps = self._start_swaps()
        assert self._swap_block is not None
        left = num_rounds = -(-steps // sizes.tries)
        while left > 0:
            count = min(left, _SWAP_BLOCK_ROUNDS)
            draws = draw_swaps(sizes, self._tables, self.generator, count, self._temperature_M)
            self._swap_block.run(draws, count)
            left -= count
        self._rank_of.copy_(swaps.rank_MLE)
        loads = self._state.loads_MXW.view(sizes.members, sizes.rows, sizes.ranks, sizes.layers)
        sums = swaps.sums_MLPX.view(sizes.members, sizes.layers, sizes.ranks, sizes.real_rows)
        loads[:, : sizes.real_rows].copy_(sums.permute(0, 3, 2, 1))
        build_atom_loads(sizes, self._demand_LNE, self._rank_of, self._atom_loads)
        recompute_costs(sizes, self._tables, self._state)
        self._num_swaps_M += swaps.num_accepted_M
        self._offer()
        return num_rounds * sizes.tries * sizes.layers * sizes.members

    def _start_swaps(self) -> SwapState:
        sizes, tables = self.sizes, self._tables
        members, num_x = sizes.members, sizes.real_rows
        if self._swaps is None:
            wide = {"dtype": torch.int64, "device": self.device}
            self._swaps = SwapState(
                torch.empty(members * sizes.layers * sizes.experts, num_x, dtype=torch.int32, device=self.device),
                torch.empty(members * sizes.layers * sizes.ranks, num_x, dtype=torch.int32, device=self.device),
                torch.empty(members, sizes.layers, sizes.experts, **wide),
                torch.empty(members, num_x, dtype=torch.float64, device=self.device),
                torch.empty(members, sizes.layers, **wide),
                torch.from_numpy(self.problem.home.astype(np.int64)).to(self.device),
                torch.from_numpy(self.problem.move_budget.astype(np.int64)).to(self.device),
                torch.zeros(members, **wide),
            )
            state = self._swaps
            self._swap_block = RoundBlock(
                lambda draws, index: swap_round(sizes, tables, state, draws, index),
                _SWAP_BLOCK_ROUNDS,
                list(state),
                self._use_graph,
            )
        swaps = self._swaps
        cell_MN = self._state.cell_of_MN.view(members, -1)[:, : sizes.atoms]
        demand_NW = self._demand_LNE.transpose(0, 1).reshape(sizes.atoms, -1)
        build_vectors(sizes, demand_NW, cell_MN, swaps.vectors_MLEX)
        loads = self._state.loads_MXW.view(members, sizes.rows, sizes.ranks, sizes.layers)[:, :num_x]
        swaps.sums_MLPX.view(members, sizes.layers, sizes.ranks, num_x).copy_(loads.permute(0, 3, 2, 1))
        swaps.rank_MLE.copy_(self._rank_of)
        attention = (self._state.costs_MX - self._state.experts_MX).view(members, sizes.rows)
        swaps.attention_MX.copy_(attention[:, :num_x])
        swaps.away_ML.copy_((swaps.rank_MLE != swaps.home_LE).sum(-1))
        swaps.num_accepted_M.zero_()
        return swaps

    def _offer(self) -> None:
        """Keep the states that are better than their member's incumbent."""
        score = score_terms(self.sizes, self._tables, self._state)
        (s0, s1, s2), (b0, b1, b2) = score.unbind(1), self._best_score.unbind(1)
        better = (s0 < b0) | ((s0 == b0) & ((s1 < b1) | ((s1 == b1) & (s2 < b2))))
        self._best_score.copy_(torch.where(better[:, None], score, self._best_score))
        cells, best = (t.view(self.num_members, -1) for t in (self._state.cell_of_MN, self._best_cell))
        best.copy_(torch.where(better[:, None], cells, best))
        if not self.shared_placement:
            ranks = torch.where(better[:, None, None], self._rank_of.to(torch.int16), self._best_rank)
            self._best_rank.copy_(ranks)

    def energies(self) -> torch.Tensor:
        """float64 [M] on the device, see :mod:`.energy`."""
        score = score_terms(self.sizes, self._tables, self._state)
        spread = self._tables.spread
        if self.sizes.shards == 1:
            return score[:, 1]
        return (1.0 - spread) * score[:, 0] + spread / self.sizes.shards * score[:, 1]

    def scores(self) -> NDArray[np.float64]:
        """float64 [M, 3], exact scores of the current states (waits for the device)."""
        sizes, problem = self.sizes, self.problem
        if problem.shift:  # loads on the device are rounded, so count afresh
            states = zip(*self.state(), strict=True)
            return np.array([score_assignment(problem, cell_of, rank_of) for cell_of, rank_of in states])
        peaks = self._state.loads_MXW.view(sizes.members, sizes.rows, sizes.ranks, sizes.layers).amax(2)
        peaks = peaks[:, : sizes.real_rows].reshape(sizes.members, -1, sizes.shards, sizes.layers)
        inner = torch.from_numpy(self._numbering.inner_cell).to(self.device)
        cells = self._state.cells_BF.view(sizes.members, -1, 5)[:, inner].cpu().numpy()
        counts = cells.reshape(sizes.members, problem.num_rows, problem.num_ranks, 5)
        wide = peaks.cpu().numpy().astype(np.int64)
        return np.array(scores_of_counts(problem, counts[..., TOKENS], counts[..., SQUARES], wide))

    def state(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Current ``cell_of`` [M, n] and ``rank_of`` [M, L, E] on the host, in the caller's numbering."""
        ranks = self._rank_of.expand(self.num_members, -1, -1).cpu().numpy()
        return self._outer_cells(self._state.cell_of_MN), np.array(ranks)

    def _outer_cells(self, cell_of_MN: torch.Tensor) -> NDArray[np.int64]:
        inner = cell_of_MN.view(self.num_members, -1)[:, :-1].cpu().numpy() % (self.sizes.rows * self.sizes.cells)
        result: NDArray[np.int64] = np.empty_like(inner)
        result[:, self._numbering.order] = self._numbering.outer_cell[inner]
        return result

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Score]:
        """Best state any member has seen at the end of a block: ``cell_of`` [n], ``rank_of`` [L, E], exact score."""
        scores = [tuple(row) for row in self._best_score.cpu().tolist()]
        member = min(range(self.num_members), key=lambda k: scores[k])
        cell_of = self._outer_cells(self._best_cell)[member]
        rank_of = self._best_rank[0 if self.shared_placement else member].cpu().numpy().astype(np.int64)
        return cell_of, rank_of, score_assignment(self.problem, cell_of, rank_of)

    def resample(self, indices: NDArray[np.int64]) -> None:
        """Member m becomes a copy of member ``indices[m]``; incumbents stay where they are."""
        sizes, state = self.sizes, self._state
        source = torch.as_tensor(np.ascontiguousarray(indices), dtype=torch.int64).to(self.device)
        if source.shape != (sizes.members,):
            raise ValueError(f"indices: shape {tuple(source.shape)}, expected ({sizes.members},)")
        cells = state.cell_of_MN.view(sizes.members, -1)
        shift = (self._tables.member_M - source) * (sizes.rows * sizes.cells)
        cells.copy_(cells.index_select(0, source) + shift[:, None])
        cells[:, -1].zero_()
        for tensor in (state.cells_BF, state.loads_MXW, state.experts_MX, state.costs_MX):
            shaped = tensor.view(sizes.members, -1)
            shaped.copy_(shaped.index_select(0, source))
        if self.shared_placement:
            return
        self._rank_of.copy_(self._rank_of.index_select(0, source))
        loads = self._atom_loads.view(sizes.members, sizes.atoms + 1, -1)
        for start in range(0, sizes.atoms, 64):  # by parts: the table is the largest tensor of all
            part = loads[:, start : start + 64]
            part.copy_(part.index_select(0, source))

    def statistics(self) -> Statistics:
        """Counts since the last call, then start anew (waits for the device)."""
        state = self._state
        mean = self._energy_sum_M / self._num_energies if self._num_energies else self._energy_sum_M * float("nan")
        tensors = (state.num_scored_M, state.num_accepted_M, self._num_swaps_M, mean)
        result = Statistics(self._num_proposed, *(np.array(t.cpu().numpy()) for t in tensors))
        for tensor in (state.num_scored_M, state.num_accepted_M, self._num_swaps_M, self._energy_sum_M):
            tensor.zero_()
        self._num_energies = self._num_proposed = 0
        return result

    def synchronize(self) -> None:
        """Wait until the device has done everything asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
