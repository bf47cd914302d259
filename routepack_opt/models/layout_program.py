"""The layout problem as an integer program: one formulation for CP-SAT and for a MIP engine.

Costs become integers by rounding down, so the program never charges a layout more than it costs: any lower bound of
the program, divided by the scale, is one of the layout problem.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers.integer_program import LARGEST, IntegerProgram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.models.layout_exact import ExactLayoutProblem

_UNITS = 10**8  # integer units the objective is measured in, at least
_ROUNDING = 1e-7  # relative loss by rounding down that is accepted


@dataclass(frozen=True)
class IntegerCosts:
    """Costs in units of 1 / scale, rounded down.

    Attributes
    ----------
    attention
        int64 [S, n], of each atom at each stage.
    experts
        Per layer, of one assignment.
    scale
        Units per unit of score, exact.
    loss
        No layout's cost falls by more than this many units through rounding.
    """

    attention: NDArray[np.int64]
    experts: tuple[int, ...]
    scale: Fraction
    loss: int


def integer_costs(problem: ExactLayoutProblem) -> IntegerCosts:
    """Choose the scale: exact expert costs where all layers weigh the same, else finer until rounding is small."""
    gamma = [Fraction(float(g)) / problem.cap for g in problem.gamma]
    atoms = range(problem.num_atoms)
    attention = [
        [
            Fraction(stage.alpha) * int(problem.tokens[i]) / problem.cap
            + Fraction(stage.beta) * int(problem.squares[i]) / problem.cap**2
            for i in atoms
        ]
        for stage in problem.cost.stages
    ]
    totals = problem.loads.sum(axis=0).sum(axis=1).tolist()  # [L]
    peaks = problem.loads.sum(axis=0).max(axis=1).tolist()
    work = sum((a for row in attention for a in row), Fraction(0))
    least = work / problem.num_ranks
    least += sum((g * peak for g, peak in zip(gamma, peaks, strict=True)), Fraction(0)) / len(problem.shards)
    most = work + sum((g * total for g, total in zip(gamma, totals, strict=True)), Fraction(0))
    scale = Fraction(_UNITS) / least if least else Fraction(1)
    if gamma and gamma[0] and len(set(gamma)) == 1:
        scale = Fraction(max(1, round(scale * gamma[0]))) / gamma[0]
    while True:
        scaled_gamma = [scale * g for g in gamma]
        rounded = [[int(scale * a) for a in row] for row in attention]
        loss = len(rounded) * problem.num_atoms
        loss += -int(-sum((w % 1) * total for w, total in zip(scaled_gamma, totals, strict=True)))
        finer = scale * 8
        if not least or loss <= _ROUNDING * float(least * scale) or finer * most > LARGEST // 4:
            break
        scale = finer
    shape = (len(rounded), problem.num_atoms)
    return IntegerCosts(
        np.array(rounded, dtype=np.int64).reshape(shape), tuple(int(w) for w in scaled_gamma), scale, loss
    )


def exchangeable(problem: ExactLayoutProblem) -> list[list[NDArray[np.int64]]]:
    """Chains of cell sets that may be exchanged, position by position, without changing cost or feasibility.

    Coarse chains first. A layout can be relabelled so that in every chain the sets follow each other by their smallest
    atom: exchanging sets of a later chain leaves the smallest atoms of earlier chains where they are.
    """
    num_rows, num_ranks = problem.num_rows, problem.num_ranks
    cell = np.arange(num_rows * num_ranks).reshape(num_rows, num_ranks)
    by_shard = [cell[:, list(ranks)] for ranks in problem.shards]  # each [R, m]
    sizes = sorted({part.shape[1] for part in by_shard})
    alike = [[part for part in by_shard if part.shape[1] == size] for size in sizes]
    chains: list[list[NDArray[np.int64]]] = []
    if problem.cost.sync == "row":
        chains.append(list(cell))
        if problem.cells_may_move:
            chains += [[part[r] for part in parts] for parts in alike for r in range(num_rows)]
        else:
            chains += [[part.ravel() for part in parts] for parts in alike]
    else:
        chains += [[part.ravel() for part in parts] for parts in alike]
        chains += [list(part) for part in by_shard]
    for part in by_shard:
        if problem.cells_may_move:
            chains += [[part[r, k : k + 1] for k in range(part.shape[1])] for r in range(num_rows)]
        else:
            chains.append(list(part.T))
    return [chain for chain in chains if len(chain) > 1]


def canonical(problem: ExactLayoutProblem, order: NDArray[np.int64], cell_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """``cell_of`` relabelled so that every chain of :func:`exchangeable` is in order of its smallest atom."""
    position = np.empty(problem.num_atoms, dtype=np.int64)
    position[order] = np.arange(problem.num_atoms)
    result = cell_of.copy()
    for chain in exchangeable(problem):
        first = [position[np.isin(result, cells)].min(initial=problem.num_atoms) for cells in chain]
        target = np.arange(problem.num_rows * problem.num_ranks)
        for cells, k in zip(chain, np.argsort(first, kind="stable").tolist(), strict=True):
            target[chain[k]] = cells
        result = target[result]
    return result


class LayoutProgram:
    """The integer program of a layout problem with its variables by meaning.

    Atoms are numbered by falling tokens inside (``order``); x[i, c] says that atom i runs in cell c.
    """

    def __init__(self, problem: ExactLayoutProblem) -> None:
        """Build variables, rows and objective."""
        self.problem = problem
        self.costs = integer_costs(problem)
        self.order = np.argsort(-problem.tokens, kind="stable")
        self.program = IntegerProgram()
        shape = (problem.num_atoms, problem.num_rows * problem.num_ranks)
        self.x = np.array([[self.program.add_variable(0, 1) for _ in range(shape[1])] for _ in range(shape[0])])
        # maxima, each as (variable, rows of (variables, weights) it is the largest of); filled in by dependence
        self.maxima: list[tuple[int, list[tuple[list[int], list[int]]]]] = []
        self._feasible()
        self._ordered()
        self._charged()

    def _feasible(self) -> None:
        problem, program = self.problem, self.program
        for row in self.x:
            program.add_row(row, low=1, high=1)
        padded = np.minimum(problem.padded, problem.cap)[self.order]  # an atom over the cap leaves no room for another
        samples = problem.samples[self.order]
        for cells in self.x.T:
            program.add_row(cells, low=1)
            program.add_row(cells, padded, high=problem.cap)
            if problem.max_samples:
                program.add_row(cells, samples, high=problem.max_samples)
        by_rank = self.x.reshape(problem.num_atoms, problem.num_rows, problem.num_ranks)
        if problem.equal_samples:
            share, left = divmod(int(samples.sum()), problem.num_ranks)
            for rank in range(problem.num_ranks):  # a remainder makes the program infeasible, as it should
                weights = np.repeat(samples, problem.num_rows)
                program.add_row(by_rank[:, :, rank].ravel(), weights, low=share + (left > 0), high=share)
        if problem.rank_groups is not None:
            groups = problem.rank_groups[self.order]
            for group in np.unique(groups):
                first, *rest = np.flatnonzero(groups == group).tolist()
                for other in rest:
                    for rank in range(problem.num_ranks):
                        pair = [*by_rank[first, :, rank], *by_rank[other, :, rank]]
                        signs = [1] * problem.num_rows + [-1] * problem.num_rows
                        program.add_row(pair, signs, low=0, high=0)

    def _ordered(self) -> None:
        """An atom opens a set only when a smaller one is in the set before (value precedence)."""
        for chain in exchangeable(self.problem):
            for before, here in itertools.pairwise(chain):
                for i in range(self.problem.num_atoms):
                    earlier = self.x[:i, before].ravel()
                    mine = self.x[i, here]
                    self.program.add_row([*mine, *earlier], [1] * mine.size + [-1] * earlier.size, high=0)

    def _largest(self, entries: list[tuple[list[int], list[int]]]) -> int:
        """A variable that is at least every entry."""
        tops = [sum(w * self.program.upper[v] for v, w in zip(*entry, strict=True)) for entry in entries]
        variable = self.program.add_variable(0, max(tops), continuous=True)
        self.maxima.append((variable, entries))
        for variables, weights in entries:
            self.program.add_row([variable, *variables], [1, *(-w for w in weights)], low=0)
        return variable

    def _charged(self) -> None:
        """Row-shard costs J and the first component of the score as the objective."""
        problem, costs = self.problem, self.costs
        loads = problem.loads[self.order]
        attention = costs.attention[:, self.order]
        self.row_shards: list[list[tuple[list[int], list[int]]]] = []
        for r in range(problem.num_rows):
            self.row_shards.append([])
            for ranks in problem.shards:
                terms: list[int] = []
                weights: list[int] = []
                for stage in attention:
                    cells = [(self.x[:, r * problem.num_ranks + d].tolist(), stage.tolist()) for d in ranks]
                    terms.append(self._largest(cells))
                    weights.append(1)
                inside = self.x[:, [r * problem.num_ranks + d for d in ranks]]
                for layer, weight in enumerate(costs.experts):
                    if not weight or not loads[:, layer].any():
                        continue
                    by_rank = [
                        (inside.ravel().tolist(), np.repeat(loads[:, layer, p], len(ranks)).tolist())
                        for p in range(loads.shape[2])
                    ]
                    terms.append(self._largest(by_rank))
                    weights.append(weight)
                self.row_shards[-1].append((terms, weights))
        if len(problem.shards) == 1:
            self.program.cost = {
                v: w for row in self.row_shards for terms, ws in row for v, w in zip(terms, ws, strict=True)
            }
            return
        if problem.cost.sync == "row":
            tops = [self._largest(row) for row in self.row_shards]
            self.program.cost = dict.fromkeys(tops, 1)
            return
        sums = [
            ([v for row in self.row_shards for v in row[g][0]], [w for row in self.row_shards for w in row[g][1]])
            for g in range(len(problem.shards))
        ]
        self.program.cost = {self._largest(sums): 1}

    def minimise_next(self, component: int, cell_of: NDArray[np.int64]) -> None:
        """Keep the objective no worse than that of ``cell_of`` and minimise component 1 (total) or 2 (worst row)."""
        cost = self.program.cost
        self.program.add_row(list(cost), list(cost.values()), high=self.program.objective(self.values_of(cell_of)))
        every = [row_shard for row in self.row_shards for row_shard in row]
        if component == 1:
            self.program.cost = {v: w for terms, ws in every for v, w in zip(terms, ws, strict=True)}
        else:
            self.program.cost = {self._largest(every): 1}

    def values_of(self, cell_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [variables] of a layout in canonical form; maxima are as small as they can be."""
        values = np.zeros(len(self.program.lower), dtype=np.int64)
        cells = canonical(self.problem, self.order, cell_of)[self.order]
        values[self.x[np.arange(cells.size), cells]] = 1
        for variable, entries in self.maxima:  # later maxima build on earlier ones
            values[variable] = max(
                sum(w * int(values[v]) for v, w in zip(variables, weights, strict=True))
                for variables, weights in entries
            )
        return values

    def cell_of(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], the layout of a solution."""
        result = np.empty(self.problem.num_atoms, dtype=np.int64)
        result[self.order] = values[self.x].argmax(axis=1)
        return result
