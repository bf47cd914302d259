"""A plain numpy Metropolis chain on layouts, one proposal at a time: what one would write first. A baseline only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.chain import ChainProblem


class NumpyChain:
    """Swaps of two atoms, scored incrementally; the placement is fixed and only the cap is obeyed."""

    def __init__(self, problem: ChainProblem, cell_of: np.ndarray, rank_of: np.ndarray, seed: int) -> None:
        self.problem, self.cell_of = problem, cell_of.copy()
        self.rng = np.random.default_rng(seed)
        n, num_layers, _ = problem.demand.shape
        num_shards = len(problem.shards)
        shard = np.empty(problem.num_ranks, dtype=np.int64)
        for g, ranks in enumerate(problem.shards):
            shard[list(ranks)] = g
        cells = np.arange(problem.num_rows * problem.num_ranks)
        self.row_of_cell = cells // problem.num_ranks * num_shards + shard[cells % problem.num_ranks]
        num_x = problem.num_rows * num_shards
        self.cells_of_row = [np.flatnonzero(self.row_of_cell == x) for x in range(num_x)]
        demand = problem.demand_of(np.arange(n))
        self.loads = np.zeros((n, problem.num_expert_ranks, num_layers), dtype=np.int64)
        for layer in range(num_layers):
            for p in range(problem.num_expert_ranks):
                self.loads[:, p, layer] = demand[:, layer, rank_of[layer] == p].sum(axis=1)
        self.padded, self.tokens, self.squares = (
            np.bincount(cell_of, weights=values, minlength=cells.size)
            for values in (problem.padded, problem.tokens, problem.squares)
        )
        self.row_loads = np.zeros((num_x, *self.loads.shape[1:]), dtype=np.int64)
        np.add.at(self.row_loads, self.row_of_cell[cell_of], self.loads)
        self.costs = np.array([self.row_cost(x, self.row_loads[x], self.tokens, self.squares) for x in range(num_x)])
        self.order = np.argsort(problem.padded, kind="stable")
        self.position = np.argsort(self.order)
        self.num_scored = 0

    def row_cost(self, x: int, loads: np.ndarray, tokens: np.ndarray, squares: np.ndarray) -> float:
        problem, cells = self.problem, self.cells_of_row[x]
        share = np.outer(problem.alpha, tokens[cells]) + np.outer(problem.beta, squares[cells] / problem.cap)
        return float((share.max(axis=1).sum() + problem.gamma @ loads.max(axis=0)) / problem.cap)

    @property
    def slowest_shard(self) -> float:
        return float(self.costs.reshape(self.problem.num_rows, -1).sum(axis=0).max())

    def energy(self, costs: np.ndarray) -> float:
        """Half slowest shard, half mean over shards, as the engines."""
        sums = costs.reshape(self.problem.num_rows, -1).sum(axis=0)
        return float(0.5 * sums.max() + 0.5 * sums.mean())

    def anneal(self, temperature: float, num_steps: int) -> None:
        problem, rng = self.problem, self.rng
        n = self.cell_of.size
        for _ in range(num_steps):
            i = int(rng.integers(n))
            reach = int(n ** rng.random()) * (1 if rng.random() < 0.5 else -1)
            j = int(self.order[(self.position[i] + reach) % n])
            a, b = int(self.cell_of[i]), int(self.cell_of[j])
            d_padded = problem.padded[i] - problem.padded[j]
            if a == b or self.padded[a] - d_padded > problem.cap or self.padded[b] + d_padded > problem.cap:
                continue
            self.num_scored += 1
            x, y = int(self.row_of_cell[a]), int(self.row_of_cell[b])
            delta = self.loads[j] - self.loads[i]
            tokens, squares, costs = self.tokens.copy(), self.squares.copy(), self.costs.copy()
            for total, values in ((tokens, problem.tokens), (squares, problem.squares)):
                total[a] += values[j] - values[i]
                total[b] += values[i] - values[j]
            moved = x != y
            costs[x] = self.row_cost(x, self.row_loads[x] + delta if moved else self.row_loads[x], tokens, squares)
            if moved:
                costs[y] = self.row_cost(y, self.row_loads[y] - delta, tokens, squares)
            if self.energy(costs) - self.energy(self.costs) > -temperature * np.log(1.0 - rng.random()):
                continue
            self.cell_of[i], self.cell_of[j] = b, a
            self.padded[a] -= d_padded
            self.padded[b] += d_padded
            self.tokens, self.squares, self.costs = tokens, squares, costs
            if moved:
                self.row_loads[x] += delta
                self.row_loads[y] -= delta
