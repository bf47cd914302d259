"""A population of annealing chains on a torch device; the counterpart of :class:`.chain.Chain` for many members.

Imported only when the torch engine is used: the package itself needs no torch. Shape suffixes: :mod:`.torch_state`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from routepack_opt.solvers.annealing.exact_score import score_assignment, scores_of_counts
from routepack_opt.solvers.annealing.torch_draws import draw_block
from routepack_opt.solvers.annealing.torch_graph import RoundBlock
from routepack_opt.solvers.annealing.torch_incumbents import Incumbents
from routepack_opt.solvers.annealing.torch_kernels import run_round
from routepack_opt.solvers.annealing.torch_state import (
    SQUARES,
    TOKENS,
    Numbering,
    Sizes,
    Tables,
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
    load_swaps,
    store_swaps,
    swap_round,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.cost import Score
    from routepack_opt.solvers.annealing.chain import ChainProblem

_BLOCK_ROUNDS = 16  # rounds between two looks at which atoms lie where, and the length of a captured graph
_CANDIDATES_PER_TRY = 3  # a quarter to a half of the proposals is feasible in full cells
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


class _Moves(NamedTuple):
    """What a round of moves with one number of tries needs."""

    sizes: Sizes
    tables: Tables
    block: RoundBlock


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
        shared_placement: bool = False,
        use_graph: bool | None = None,
        compiled: bool = False,
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
            wasted: a good T times the share of accepted tries is 0.3 or less.
        shared_placement
            Keep one placement [L, E] and one table of loads for all members; ``refine`` is then not allowed.
        use_graph
            Replay rounds as CUDA graphs. None: on CUDA devices.
        compiled
            Fuse the kernels of a round with ``torch.compile``, see :class:`.torch_graph.RoundBlock`.

        Raises
        ------
        ValueError
            Shapes that do not fit.
        """
        self.problem = problem
        self.device = torch.device(device)
        self.num_members = int(cell_of.shape[0])
        self.shared_placement = shared_placement
        sizes = self.sizes = Sizes.of(problem, self.num_members, num_tries, _CANDIDATES_PER_TRY * num_tries)
        self._use_graph = self.device.type == "cuda" if use_graph is None else use_graph
        self._compiled = compiled
        self._generator = torch.Generator(self.device)
        self._generator.manual_seed(seed % 2**63)
        self._numbering = Numbering.of(problem, sizes)
        self._tables = build_tables(problem, sizes, self._numbering, self.device, spread)
        self._state = empty_state(sizes, self.device)
        self._demand_LNE = self._float_demand(problem)
        num_placements = 1 if shared_placement else sizes.members
        width = sizes.ranks * sizes.layers
        self._atom_loads = torch.zeros(
            (num_placements * (sizes.atoms + 1), width), dtype=torch.int32, device=self.device
        )
        self._rank_of = torch.zeros(
            (num_placements, sizes.layers, sizes.experts), dtype=torch.int64, device=self.device
        )
        self._load(cell_of, rank_of)
        self._moves: dict[int, _Moves] = {}
        self._swaps: SwapState | None = None
        self._swap_blocks: dict[bool, RoundBlock] = {}
        self._incumbents = Incumbents(self._score_terms(), self._cells_MN, self._rank_of)
        self._temperature_M = torch.zeros(sizes.members, dtype=torch.float64, device=self.device)
        self._num_swaps_M = torch.zeros_like(self._state.num_accepted_M)
        self._energy_sum_M = torch.zeros_like(self._temperature_M)
        self._num_energies = self._num_proposed = 0

    @staticmethod
    def member_bytes(problem: ChainProblem, num_tries: int = 8) -> int:
        """Rough device memory one member takes, its share of temporary tensors included."""
        sizes = Sizes.of(problem, 1, num_tries, _CANDIDATES_PER_TRY * num_tries)
        width = sizes.ranks * sizes.layers
        loads = 4 * width * (sizes.atoms + sizes.rows)
        draws = _BLOCK_ROUNDS * 250 * sizes.candidates * sizes.slots + 6 * sizes.rows * sizes.atoms
        tries = sizes.slots * num_tries * (4 * 4 * width + 100 * sizes.cells)
        swaps = 4 * sizes.layers * sizes.real_rows * (2 * sizes.experts + 4 * sizes.ranks + 30 * num_tries)
        return loads + draws + tries + swaps + 30 * sizes.layers * sizes.experts + 32 * sizes.atoms

    @property
    def _cells_MN(self) -> torch.Tensor:
        """int64 [M, N + 1], a view."""
        return self._state.cell_of_MN.view(self.num_members, -1)

    def _score_terms(self) -> torch.Tensor:
        return score_terms(self.sizes, self._tables, self._state)

    def _float_demand(self, problem: ChainProblem) -> torch.Tensor:
        """[L, N, E] in the narrowest float type whose sums are exact here."""
        demand = problem.demand_of(self._numbering.order) >> problem.shift
        largest = max(
            int(demand.sum(axis=0, dtype=np.int64).max(initial=0)),
            int(demand.sum(axis=2, dtype=np.int64).max(initial=0)),
        )
        # CUDA may multiply float32 matrices in TF32, so float64 there
        narrow = largest < _EXACT_FLOAT32 and self.device.type == "cpu"
        tensor = torch.from_numpy(np.ascontiguousarray(demand.transpose(1, 0, 2))).to(self.device)
        return tensor.to(torch.float32 if narrow else torch.float64)

    def _load(self, cell_of: NDArray[np.int64], rank_of: NDArray[np.int64]) -> None:
        sizes = self.sizes
        if cell_of.shape != (sizes.members, sizes.atoms):
            raise ValueError(f"cell_of: shape {cell_of.shape}, expected ({sizes.members}, {sizes.atoms})")
        if rank_of.shape[-2:] != (sizes.layers, sizes.experts) or rank_of.shape[:-2] not in ((), (sizes.members,)):
            raise ValueError(f"rank_of: shape {rank_of.shape}, expected ([members,] {sizes.layers}, {sizes.experts})")
        if self.shared_placement and rank_of.ndim != 2:
            raise ValueError("rank_of: one placement [L, E] is needed with shared_placement")
        inner = self._numbering.inner_cell[cell_of[:, self._numbering.order]]
        inner = inner + np.arange(self.num_members)[:, None] * (sizes.rows * sizes.cells)
        self._cells_MN[:, :-1].copy_(torch.from_numpy(inner).to(self.device))
        self._cells_MN[:, -1].zero_()
        self._rank_of.copy_(torch.from_numpy(np.ascontiguousarray(rank_of, dtype=np.int64)).to(self.device))
        self.rebuild()

    def restart(self, cell_of: NDArray[np.int64], rank_of: NDArray[np.int64]) -> None:
        """Start anew from other layouts [M, n] and placements, keeping captured graphs and compiled kernels."""
        self._load(cell_of, rank_of)
        self._incumbents.reset(self._score_terms(), self._cells_MN, self._rank_of)
        self.statistics()

    def rebuild(self) -> None:
        """Recompute loads of every atom from the placements, then everything else from the cells."""
        build_atom_loads(self.sizes, self._demand_LNE, self._rank_of, self._atom_loads)
        recompute(self.sizes, self._tables, self._state, self._atom_loads)

    def set_spread(self, spread: float) -> None:
        """Change how much of the energy is the mean over shards, see :mod:`.energy`."""
        self._tables.slowest_share.fill_(1.0 - spread)
        self._tables.mean_share.fill_(spread / self.sizes.shards)

    def anneal(
        self,
        temperature: float | NDArray[np.float64],
        num_rounds: int,
        relocate_share: float = 0.15,
        num_tries: int | None = None,
    ) -> int:
        """Run ``num_rounds`` rounds of Metropolis moves of atoms, at one temperature or one per member.

        On a CUDA device it returns before the work is done, unless temperatures come as an array. Incumbents are
        offered every few rounds. ``num_tries`` replaces that of the population; every new value means a new graph.

        Returns
        -------
        Number of candidates of all members together, feasible or not.
        """
        self._set_temperature(temperature)
        sizes, tables, block = self._moves_with(num_tries or self.sizes.tries)
        for start in range(0, num_rounds, _BLOCK_ROUNDS):
            count = min(num_rounds - start, _BLOCK_ROUNDS)
            draws = draw_block(sizes, tables, self._state, self._generator, count, self._temperature_M, relocate_share)
            block.run(draws, count)
            self._incumbents.offer(self._score_terms(), self._cells_MN, self._rank_of)
            self._energy_sum_M += self.energies()
            self._num_energies += 1
        proposed = num_rounds * sizes.slots * sizes.candidates
        self._num_proposed += proposed
        return proposed * self.num_members

    def _set_temperature(self, temperature: float | NDArray[np.float64]) -> None:
        if np.ndim(temperature) == 0:
            self._temperature_M.fill_(float(temperature))  # unlike a copy from the host this does not wait
        else:
            self._temperature_M.copy_(torch.from_numpy(np.asarray(temperature, dtype=np.float64)))

    def _moves_with(self, num_tries: int) -> _Moves:
        if num_tries not in self._moves:
            state, atom_loads = self._state, self._atom_loads
            sizes = replace(self.sizes, tries=num_tries, candidates=_CANDIDATES_PER_TRY * num_tries)
            tables = self._tables._replace(
                try_T=torch.arange(sizes.tries, device=self.device),
                candidate_C=torch.arange(sizes.candidates, device=self.device),
            )
            block = RoundBlock(
                lambda draw: run_round(sizes, tables, state, atom_loads, draw),
                _BLOCK_ROUNDS,
                list(state),
                self._use_graph,
                self._compiled,
            )
            self._moves[num_tries] = _Moves(sizes, tables, block)
        return self._moves[num_tries]

    def refine(self, temperature: float | NDArray[np.float64], steps: int, smooth: bool = False) -> int:
        """Metropolis swaps of experts against the standing rows, at least ``steps`` proposals a layer and member.

        ``smooth`` swaps on the smooth stand-in for the maximum of :func:`.rank_swaps.level_experts`.

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
        sizes, tables = self.sizes, self._tables
        self._set_temperature(temperature)
        swaps, block = self._swaps_with(smooth)
        demand_NW = self._demand_LNE.transpose(0, 1).reshape(sizes.atoms, -1)
        build_vectors(sizes, demand_NW, self._cells_MN[:, :-1], swaps.vectors_MLEX)
        load_swaps(sizes, tables, self._state, self._rank_of, swaps)
        num_rounds = -(-steps // sizes.tries)
        for start in range(0, num_rounds, _BLOCK_ROUNDS):
            count = min(num_rounds - start, _BLOCK_ROUNDS)
            block.run(draw_swaps(sizes, tables, self._generator, count, self._temperature_M), count)
        store_swaps(sizes, swaps, self._state, self._rank_of)
        build_atom_loads(sizes, self._demand_LNE, self._rank_of, self._atom_loads)
        recompute_costs(sizes, tables, self._state)
        self._num_swaps_M += swaps.num_accepted_M
        self._incumbents.offer(self._score_terms(), self._cells_MN, self._rank_of)
        return num_rounds * sizes.tries * sizes.layers * sizes.members

    def _swaps_with(self, smooth: bool) -> tuple[SwapState, RoundBlock]:
        sizes, tables = self.sizes, self._tables
        if self._swaps is None:
            self._swaps = SwapState.empty(self.problem, sizes, self.device)
        swaps = self._swaps
        if smooth not in self._swap_blocks:
            self._swap_blocks[smooth] = RoundBlock(
                lambda draw: swap_round(sizes, tables, swaps, smooth, draw),
                _BLOCK_ROUNDS,
                [swaps.sums_MLPX, swaps.rank_MLE, swaps.away_ML, swaps.num_accepted_M],
                self._use_graph,
                self._compiled,
            )
        return swaps, self._swap_blocks[smooth]

    def energies(self) -> torch.Tensor:
        """float64 [M] on the device, see :mod:`.energy`."""
        slowest, total, _ = self._score_terms().unbind(1)
        if self.sizes.shards == 1:
            return total
        return self._tables.slowest_share * slowest + self._tables.mean_share * total

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
        return self._outer_cells(self._cells_MN), np.array(ranks)

    def _outer_cells(self, cell_of_MN: torch.Tensor) -> NDArray[np.int64]:
        inner = cell_of_MN[:, :-1].cpu().numpy() % (self.sizes.rows * self.sizes.cells)
        result: NDArray[np.int64] = np.empty_like(inner)
        result[:, self._numbering.order] = self._numbering.outer_cell[inner]
        return result

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Score]:
        """Best state any member has seen at the end of a block: ``cell_of`` [n], ``rank_of`` [L, E], exact score."""
        member = self._incumbents.best()
        cell_of = self._outer_cells(self._incumbents.cells_MN)[member]
        ranks = self._incumbents.rank_MLE[0 if self.shared_placement else member]
        rank_of = ranks.cpu().numpy().astype(np.int64)
        return cell_of, rank_of, score_assignment(self.problem, cell_of, rank_of)

    def resample(self, indices: NDArray[np.int64]) -> None:
        """Member m becomes a copy of member ``indices[m]``; incumbents stay where they are."""
        sizes, state = self.sizes, self._state
        source = torch.as_tensor(np.ascontiguousarray(indices), dtype=torch.int64).to(self.device)
        if source.shape != (sizes.members,):
            raise ValueError(f"indices: shape {tuple(source.shape)}, expected ({sizes.members},)")
        shift = (self._tables.member_M - source) * (sizes.rows * sizes.cells)
        self._cells_MN.copy_(self._cells_MN.index_select(0, source) + shift[:, None])
        self._cells_MN[:, -1].zero_()
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
