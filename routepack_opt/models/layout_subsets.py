"""The optimal layout of a very small window by dynamic programming over sets of atoms, without a solver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers.subset_partition import (
    MAX_ITEMS,
    convolve,
    pair_split_of,
    pair_stages,
    split_of,
    subset_sums,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.models.layout_exact import ExactLayoutProblem


def refusal(problem: ExactLayoutProblem) -> str:
    """Why the problem is out of reach, or ""."""
    if problem.num_atoms > MAX_ITEMS:
        return f"{problem.num_atoms} atoms; at most {MAX_ITEMS} are possible"
    if not problem.cells_may_move:
        return "equal sample counts and rank groups tie the rows together"
    if max(map(len, problem.shards)) > 2 and len(_stages(problem)) > 1:
        return "several attention stages and more than two DP ranks in a shard"
    return ""


def num_steps(problem: ExactLayoutProblem) -> int:
    """Innermost steps :func:`best_layout` takes, about a nanosecond each: to decide whether a budget allows it."""
    num_atoms, num_shards = problem.num_atoms, len(problem.shards)
    sizes = {len(ranks) for ranks in problem.shards}
    stacks = len(sizes) if problem.cost.sync == "shard" else 1
    whole_last = num_shards == 1 or problem.cost.sync == "row"  # then the last row closes the set of all atoms only
    halves = sum(size - 1 for size in sizes) + stacks * max(0, problem.num_rows - 1 - whole_last)
    if problem.cost.sync == "row" or num_shards > 2:
        halves += 2 * (num_shards - 1)
    return int(halves * 3**num_atoms // 2 + (8 + problem.loads[0].size) * 2**num_atoms)


def _stages(problem: ExactLayoutProblem) -> list[tuple[float, float]]:
    return [(s.alpha, s.beta) for s in problem.cost.stages if s.alpha or s.beta]


def best_layout(problem: ExactLayoutProblem) -> NDArray[np.int64] | None:
    """int64 [n] of least slowest shard (``sync="row"``: sum of row maxima), or None when no layout is feasible.

    Optimal up to the rounding of float64 sums. Needs :func:`refusal` to be empty.
    """
    return _Tables(problem).layout()


class _Tables:
    """Tables over all 2^n sets of atoms, from cells to row-shards to rows and shards."""

    def __init__(self, problem: ExactLayoutProblem) -> None:
        self.problem = problem
        tokens = subset_sums(problem.tokens) / float(problem.cap)
        squares = subset_sums(problem.squares) / float(problem.cap) ** 2
        count = subset_sums(np.ones_like(problem.samples))
        allowed = (count == 1) | ((count > 0) & (subset_sums(problem.padded) <= problem.cap))
        if problem.max_samples:
            allowed &= subset_sums(problem.samples) <= problem.max_samples
        stages = _stages(problem) or [(0.0, 0.0)]
        self.stages = np.stack([alpha * tokens + beta * squares for alpha, beta in stages], axis=1)
        self.stages[~allowed] = np.inf
        self.experts = np.zeros(allowed.size)
        for layer, gamma in enumerate(problem.gamma.tolist()):
            self.experts += gamma * subset_sums(problem.loads[:, layer]).max(axis=1)
        self.experts /= problem.cap
        self.cell = self.stages.sum(axis=1)
        self.attention = {1: [self.cell]}  # by shard size: table of 1, 2, .. cells
        self.rows = {m: [self._row_shard(m)] for m in {len(ranks) for ranks in problem.shards}}

    def _row_shard(self, size: int) -> NDArray[np.float64]:
        """J of every set as one row-shard of ``size`` cells."""
        if size == 1:
            return np.asarray(self.cell + self.experts)
        if self.stages.shape[1] > 1:
            return np.asarray(pair_stages(self.stages) + self.experts)
        tables = self.attention.setdefault(size, [self.cell])
        while len(tables) < size:
            tables.append(convolve(tables[-1], self.cell, largest=True, alike=True))
        return np.asarray(tables[-1] + self.experts)

    def layout(self) -> NDArray[np.int64] | None:
        """Combine row-shards, then read the layout back."""
        problem = self.problem
        full = (1 << problem.num_atoms) - 1
        cell_of = np.full(problem.num_atoms, -1, dtype=np.int64)
        if problem.cost.sync == "row":
            across = [self.rows[len(problem.shards[0])][0]]
            alike = len(self.rows) == 1
            for ranks in problem.shards[1:]:
                across.append(convolve(across[-1], self.rows[len(ranks)][0], largest=True, alike=alike))
            rows = self._stack(across[-1], whole_last=True)
            if not np.isfinite(rows[-1][full]):
                return None
            for row, inside in enumerate(self._unstack(rows, full)):
                for shard, part in enumerate(self._uncross(across, [len(s) for s in problem.shards], inside)):
                    self._place(cell_of, row, shard, part)
            return cell_of
        single = len(problem.shards) == 1
        stacks = {size: self._stack(tables[0], whole_last=single) for size, tables in self.rows.items()}
        sums = [stacks[len(ranks)][-1] for ranks in problem.shards]
        across = [sums[0]]
        for k, table in enumerate(sums[1:], 2):
            across.append(convolve(across[-1], table, largest=True, only_full=k == len(sums)))
        if not np.isfinite(across[-1][full]):
            return None
        left = full
        for shard in range(len(sums) - 1, -1, -1):
            mine, left = split_of(across[shard - 1], sums[shard], left, largest=True) if shard else (left, 0)
            for row, part in enumerate(self._unstack(stacks[len(problem.shards[shard])], mine)):
                self._place(cell_of, row, shard, part)
        return cell_of

    def _stack(self, row: NDArray[np.float64], *, whole_last: bool) -> list[NDArray[np.float64]]:
        """Least sum over 1, 2, .. R rows for every set; with ``whole_last`` the last table knows the full set only."""
        tables = [row]
        num_rows = self.problem.num_rows
        while len(tables) < num_rows:
            tables.append(convolve(tables[-1], row, alike=True, only_full=whole_last and len(tables) == num_rows - 1))
        return tables

    def _unstack(self, tables: list[NDArray[np.float64]], whole: int) -> list[int]:
        parts = []
        for k in range(len(tables) - 1, 0, -1):
            part, whole = split_of(tables[k - 1], tables[0], whole)
            parts.append(part)
        return [*parts, whole]

    def _uncross(self, across: list[NDArray[np.float64]], sizes: list[int], whole: int) -> list[int]:
        parts = []
        for shard in range(len(sizes) - 1, 0, -1):
            part, whole = split_of(across[shard - 1], self.rows[sizes[shard]][0], whole, largest=True)
            parts.append(part)
        return [whole, *parts[::-1]]

    def _place(self, cell_of: NDArray[np.int64], row: int, shard: int, whole: int) -> None:
        """Split the set of a row-shard into cells."""
        ranks = self.problem.shards[shard]
        parts = []
        if len(ranks) == 2 and self.stages.shape[1] > 1:
            parts = list(pair_split_of(self.stages, whole))
        else:
            for k in range(len(ranks) - 1, 0, -1):
                part, whole = split_of(self.attention[len(ranks)][k - 1], self.cell, whole, largest=True)
                parts.append(part)
            parts.append(whole)
        for rank, part in zip(ranks, parts, strict=True):
            for atom in range(self.problem.num_atoms):
                if part >> atom & 1:
                    cell_of[atom] = row * self.problem.num_ranks + rank
