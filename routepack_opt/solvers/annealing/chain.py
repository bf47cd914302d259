"""One annealing chain on the CPU: a layout and a placement that move together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.cost import Score, expert_costs, score_of
from routepack_opt.solvers.annealing import rank_swaps, sample_moves
from routepack_opt.solvers.annealing.random import new_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LANES = 8  # int32 lanes the layer axis is padded to
_INT32_LIMIT = 2**30
SMALL_MOVES = sample_moves.Moves(relocate=0.3, swap_cells=0.0, guided=0.1)
DEFAULT_MOVES = sample_moves.Moves(relocate=0.15, swap_cells=0.0, guided=0.0)


@dataclass(frozen=True)
class ChainProblem:
    """Everything a chain needs, as arrays (see docs/annealing.md).

    Parameters
    ----------
    padded, tokens, squares, samples
        int64 [n] per atom: tokens the cap counts, true tokens, sum of squared lengths, samples.
    pinned
        bool [n], atoms that may not change their DP rank.
    demand, source
        int32 [n, L, E] in storage order, and int64 [n], the storage row of each atom (None: in order).
    shards
        DP ranks of each shard.
    num_rows, num_ranks, cap, max_samples, equal_samples
        The grid R x D and its rules; ``max_samples`` 0 means any number.
    alpha, beta
        float64 [S]; gamma: float64 [L].
    sync
        "shard" or "row".
    num_expert_ranks
        P.
    home, move_budget
        int64 [L, E] standing EP rank of each expert and [L] how many may be away from it (-1: any number).
    """

    padded: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    samples: NDArray[np.int64]
    pinned: NDArray[np.bool_]
    demand: NDArray[np.int32]
    shards: tuple[tuple[int, ...], ...]
    num_rows: int
    num_ranks: int
    cap: int
    max_samples: int
    equal_samples: bool
    alpha: NDArray[np.float64]
    beta: NDArray[np.float64]
    gamma: NDArray[np.float64]
    sync: Literal["shard", "row"]
    num_expert_ranks: int
    home: NDArray[np.int64]
    move_budget: NDArray[np.int64]
    source: NDArray[np.int64] | None = None

    @property
    def rows_of_atoms(self) -> NDArray[np.int64]:
        """int64 [n], the row of ``demand`` that holds each atom."""
        return np.arange(self.demand.shape[0]) if self.source is None else self.source

    def demand_of(self, atoms: NDArray[Any]) -> NDArray[np.int32]:
        """int32 [k, L, E], a copy of the demand of some atoms (numbers or a mask)."""
        return np.asarray(self.demand[self.rows_of_atoms[atoms]])

    @property
    def shift(self) -> int:
        """Right shift that keeps the loads of a row-shard in int32; 0 for every real window.

        Otherwise the chain moves on rounded loads, and :meth:`Chain.score` counts afresh.
        """
        bound = int(self.demand.max(initial=0)) * self.demand.shape[2]  # cheap upper bound a sample, then exact
        if bound * self.demand.shape[0] < _INT32_LIMIT:
            return 0
        totals = self.demand.sum(axis=2, dtype=np.int64).max(axis=1)[self.rows_of_atoms]
        per_token = float((totals / self.padded).max())
        most_tokens = max(map(len, self.shards)) * max(self.cap, int(self.padded.max()))
        most = min(int(totals.sum()), int(per_token * most_tokens * 1.001) + 1)
        return max(0, most.bit_length() - 30)


class Chain:
    """A layout with its placement; ``anneal`` and ``refine`` change it in place."""

    def __init__(
        self,
        problem: ChainProblem,
        cell_of: NDArray[np.int64],
        rank_of: NDArray[np.int64],
        *,
        seed: int,
        stream: int,
        spread: float = 0.5,
    ) -> None:
        """Start from ``cell_of`` [n] (cell r*D + d) and ``rank_of`` [L, E]."""
        self.problem = problem
        self.rng = new_state(seed, stream)
        self.rank_of = rank_of.astype(np.int64, order="C").copy()
        self.shift = problem.shift
        self._source = np.ascontiguousarray(problem.rows_of_atoms, dtype=np.int64)
        n, num_layers, num_experts = problem.demand.shape
        num_x = problem.num_rows * len(problem.shards)
        padded_layers = -(-num_layers // _LANES) * _LANES
        gamma = np.zeros(padded_layers)
        gamma[:num_layers] = problem.gamma * float(2**self.shift)
        # an attention-free cost still needs one stage for the kernels' loops
        alpha = problem.alpha if problem.alpha.size else np.zeros(1)
        beta = problem.beta if problem.beta.size else np.zeros(1)
        uniform = bool((problem.gamma == problem.gamma[0]).all())
        self.atoms = _atoms(problem)
        self.grid = _grid(problem, spread)
        self.costs = sample_moves.Costs(alpha, beta, gamma, uniform, float(problem.cap))
        self.loads = np.zeros((n, problem.num_expert_ranks, padded_layers), dtype=np.int32)
        self.expert_rows = np.zeros((num_x, num_layers, num_experts), dtype=np.int32)
        self.state = _empty_state(problem, cell_of, alpha.shape[0], padded_layers)
        self._scratch = sample_moves.Scratch(
            peaks_x=np.zeros(padded_layers, dtype=np.int32),
            peaks_y=np.zeros(padded_layers, dtype=np.int32),
            delta=np.zeros((problem.num_expert_ranks, padded_layers), dtype=np.int32),
            stage_a=np.zeros(alpha.shape[0]),
            stage_b=np.zeros(alpha.shape[0]),
            after=np.zeros(4),
        )
        self._swap_scratch = rank_swaps.SwapScratch(
            vectors=np.zeros((num_experts, num_x), dtype=np.int32),
            sums=np.zeros((problem.num_expert_ranks, num_x), dtype=np.int32),
            peak=np.zeros(num_x, dtype=np.int32),
            new_peak=np.zeros(num_x, dtype=np.int32),
            weight=np.zeros(num_x),
            shares=np.zeros((num_experts, num_x)),
            level=np.zeros((problem.num_expert_ranks, num_x)),
            power=np.zeros((problem.num_expert_ranks, num_x)),
            slope=np.zeros(num_x),
        )
        self._cells_may_move = not problem.equal_samples and not problem.pinned.any()
        rank_swaps.build_loads(self.problem.demand, self._source, self.rank_of, self.loads, self.shift)
        self._fill_floors()
        self.recompute()

    def _fill_floors(self) -> None:
        """Expert cost of every atom under perfect balance, whatever the placement; a hair below the true value."""
        scale = 1.0 / (self.problem.cap * self.problem.num_expert_ranks)
        by_layer = self.loads.sum(axis=1, dtype=np.int64)
        self.atoms.floor[:] = by_layer @ self.costs.gamma * (scale * (1.0 - 1e-12))

    @property
    def energy(self) -> float:
        """Current energy (incremental; :meth:`recompute` removes float drift)."""
        return float(self.state.summary[0])

    def score(self) -> Score:
        """Exact score of the current state (row-shard costs are recomputed from integers at every accepted move)."""
        costs = self.state.costs if self.shift == 0 else self.state.attention + self._exact_experts()
        return score_of(costs.reshape(self.problem.num_rows, self.grid.num_shards), self.problem.sync)

    def _exact_experts(self) -> NDArray[np.float64]:
        """float64 [R*G], expert costs from the demand itself, for chains on shifted loads."""
        problem = self.problem
        num_layers = problem.demand.shape[1]
        shard_row = self.grid.shard_row[self.state.cell_of]
        peaks = np.empty((self.state.costs.size, num_layers), dtype=np.int64)
        for x in range(peaks.shape[0]):
            together = problem.demand_of(shard_row == x).sum(axis=0, dtype=np.int64)
            loads = np.zeros((num_layers, problem.num_expert_ranks), dtype=np.int64)
            np.add.at(loads, (np.arange(num_layers)[:, None], self.rank_of), together)
            peaks[x] = loads.max(axis=1)
        return expert_costs(peaks[:, None, :, None], problem.gamma, problem.cap)[:, 0]

    def set_spread(self, spread: float) -> None:
        """Change how much of the energy is the mean over shards, see :mod:`.energy`."""
        self.grid = self.grid._replace(spread=float(spread))
        self.recompute()

    def rebuild(self) -> None:
        """Recompute per-rank loads of every atom after the placement changed, then everything else."""
        rank_swaps.build_loads(self.problem.demand, self._source, self.rank_of, self.loads, self.shift)
        self.recompute()

    def recompute(self) -> None:
        """Recompute the state from the cells of the atoms."""
        sample_moves.recompute(self.atoms, self.grid, self.costs, self.loads, self.state, self._scratch)

    def anneal(self, temperature: float, num_steps: int, moves: sample_moves.Moves | None = None) -> int:
        """Metropolis moves of atoms; returns how many proposals were scored."""
        moves = DEFAULT_MOVES if moves is None else moves
        state = (self.atoms, self.grid, self.costs, self.loads, self.state, self._scratch)
        scored = 0
        if moves.swap_cells > 0.0 and self._cells_may_move:
            from routepack_opt.solvers.annealing.cell_moves import anneal_cells  # compiled only where it is used

            share = round(num_steps * moves.swap_cells)
            num_steps -= share
            scored += int(anneal_cells(*state, float(temperature), share, self.rng))
        return scored + int(sample_moves.anneal(*state, moves, float(temperature), int(num_steps), self.rng))

    def refine(self, temperature: float, steps_per_layer: int, *, smooth: bool = False) -> int:
        """Metropolis swaps of experts against the standing rows; returns how many were accepted.

        ``smooth`` anneals on a stand-in for the maximum (:func:`.rank_swaps.level_experts`): better early, while the
        last swaps should see the maximum itself.
        """
        rank_swaps.build_expert_rows(
            self.problem.demand, self._source, self.state.cell_of, self.grid.shard_row, self.expert_rows, self.shift
        )
        swap = rank_swaps.level_experts if smooth else rank_swaps.swap_experts
        accepted = int(
            swap(
                self.expert_rows,
                self.rank_of,
                self.state.loads,
                self.costs,
                self.grid.num_shards,
                self.grid.sync_row,
                self.grid.spread,
                self.state.costs,
                self.state.shard_sums,
                float(temperature),
                int(steps_per_layer),
                self.problem.home,
                self.problem.move_budget,
                self._swap_scratch,
                self.rng,
            )
        )
        if accepted:
            self.rebuild()
        return accepted

    def copy_from(self, cell_of: NDArray[np.int64], rank_of: NDArray[np.int64]) -> None:
        """Jump to another layout and placement."""
        self.state.cell_of[:] = cell_of
        if np.array_equal(rank_of, self.rank_of):
            self.recompute()
        else:
            self.rank_of[:] = rank_of
            self.rebuild()


def _atoms(problem: ChainProblem) -> sample_moves.Atoms:
    n = problem.padded.shape[0]
    order = np.argsort(problem.padded, kind="stable")
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)
    return sample_moves.Atoms(
        padded=problem.padded,
        tokens=problem.tokens,
        squares=problem.squares,
        samples=problem.samples,
        pinned=problem.pinned.astype(np.uint8),
        order=order.astype(np.int64),
        position=position,
        floor=np.zeros(n),
    )


def _grid(problem: ChainProblem, spread: float) -> sample_moves.Grid:
    num_shards = len(problem.shards)
    shard_of_rank = np.empty(problem.num_ranks, dtype=np.int64)
    cells = np.full((problem.num_rows * num_shards, max(map(len, problem.shards))), -1, dtype=np.int64)
    for g, ranks in enumerate(problem.shards):
        shard_of_rank[list(ranks)] = g
        for r in range(problem.num_rows):
            cells[r * num_shards + g, : len(ranks)] = r * problem.num_ranks + np.asarray(ranks)
    rows, ranks_of_cells = np.divmod(np.arange(problem.num_rows * problem.num_ranks, dtype=np.int64), problem.num_ranks)
    return sample_moves.Grid(
        shard_row=rows * num_shards + shard_of_rank[ranks_of_cells],
        rank=ranks_of_cells,
        cells=cells,
        num_shards=num_shards,
        cap=int(problem.cap),
        max_samples=int(problem.max_samples) or 2**62,
        equal_samples=bool(problem.equal_samples),
        sync_row=problem.sync == "row",
        spread=float(spread),
    )


def _empty_state(
    problem: ChainProblem, cell_of: NDArray[np.int64], num_stages: int, padded_layers: int
) -> sample_moves.State:
    num_cells = problem.num_rows * problem.num_ranks
    num_x = problem.num_rows * len(problem.shards)
    return sample_moves.State(
        cell_of=cell_of.astype(np.int64).copy(),
        num_atoms=np.zeros(num_cells, dtype=np.int64),
        num_samples=np.zeros(num_cells, dtype=np.int64),
        padded=np.zeros(num_cells, dtype=np.int64),
        tokens=np.zeros(num_cells, dtype=np.int64),
        squares=np.zeros(num_cells, dtype=np.int64),
        stage_cost=np.zeros((num_cells, num_stages)),
        loads=np.zeros((num_x, problem.num_expert_ranks, padded_layers), dtype=np.int32),
        attention=np.zeros(num_x),
        experts=np.zeros(num_x),
        floor=np.zeros(num_x),
        costs=np.zeros(num_x),
        shard_sums=np.zeros(len(problem.shards)),
        summary=np.zeros(2),
    )


def warmup() -> None:
    """Compile all kernels of a chain, or load them from the disk cache."""
    ones = np.ones(2, dtype=np.int64)
    problem = ChainProblem(
        padded=ones,
        tokens=ones,
        squares=ones,
        samples=ones,
        pinned=np.zeros(2, dtype=np.bool_),
        demand=np.ones((2, 1, 2), dtype=np.int32),
        shards=((0,), (1,)),
        num_rows=1,
        num_ranks=2,
        cap=2,
        max_samples=0,
        equal_samples=False,
        alpha=np.ones(1),
        beta=np.ones(1),
        gamma=np.ones(1),
        sync="shard",
        num_expert_ranks=2,
        home=np.array([[0, 1]]),
        move_budget=np.array([-1]),
    )
    chain = Chain(problem, np.array([0, 1]), np.array([[0, 1]]), seed=0, stream=0)
    chain.anneal(1.0, 4)
    chain.refine(1.0, 4)
    chain.refine(1.0, 4, smooth=True)
