"""Exact scores of a :class:`.chain.ChainProblem`'s states from integer counts, in the evaluator's own arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.cost import Score, expert_costs, score_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.solvers.annealing.chain import ChainProblem


def scores_of_counts(
    problem: ChainProblem, tokens: NDArray[np.int64], squares: NDArray[np.int64], peaks: NDArray[np.int64]
) -> list[Score]:
    """Scores of M states.

    Parameters
    ----------
    tokens, squares
        int64 [M, R, D], sums of lengths and of squared lengths of each cell.
    peaks
        int64 [M, R, G, L], loads of the most loaded EP rank.
    """
    cap = float(problem.cap)
    tokens_share, squares_share = tokens / cap, squares / cap**2
    costs = np.zeros(peaks.shape[:3])
    for alpha, beta in zip(problem.alpha.tolist(), problem.beta.tolist(), strict=True):
        stage = alpha * tokens_share + beta * squares_share
        for shard, ranks in enumerate(problem.shards):
            costs[..., shard] += stage[..., list(ranks)].max(axis=-1)
    flat = peaks.reshape(-1, *peaks.shape[2:])[..., None]  # peaks as loads of a single rank
    costs += expert_costs(flat, problem.gamma, problem.cap).reshape(costs.shape)
    return [score_of(state, problem.sync) for state in costs]


def score_assignment(problem: ChainProblem, cell_of: NDArray[np.int64], rank_of: NDArray[np.int64]) -> Score:
    """Score of one state from scratch: ``cell_of`` [n] (cell r * D + d) and ``rank_of`` [L, E]."""
    num_rows, num_ranks, num_shards = problem.num_rows, problem.num_ranks, len(problem.shards)
    num_cells = num_rows * num_ranks
    tokens, squares = np.zeros(num_cells, dtype=np.int64), np.zeros(num_cells, dtype=np.int64)
    np.add.at(tokens, cell_of, problem.tokens)
    np.add.at(squares, cell_of, problem.squares)
    shard_of_rank = np.empty(num_ranks, dtype=np.int64)
    for shard, ranks in enumerate(problem.shards):
        shard_of_rank[list(ranks)] = shard
    row_shard = cell_of // num_ranks * num_shards + shard_of_rank[cell_of % num_ranks]
    num_layers, num_experts = rank_of.shape
    rows = np.zeros((num_rows * num_shards, num_layers, num_experts), dtype=np.int64)
    for x in range(rows.shape[0]):
        rows[x] = problem.demand_of(row_shard == x).sum(axis=0, dtype=np.int64)
    loads = np.zeros((num_layers, problem.num_expert_ranks, rows.shape[0]), dtype=np.int64)
    np.add.at(loads, (np.arange(num_layers)[:, None], rank_of), rows.transpose(1, 2, 0))
    peaks = np.ascontiguousarray(loads.max(axis=1).T).reshape(1, num_rows, num_shards, num_layers)
    shape = (1, num_rows, num_ranks)
    return scores_of_counts(problem, tokens.reshape(shape), squares.reshape(shape), peaks)[0]
