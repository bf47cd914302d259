"""Exact layouts of small windows, placement fixed: CP-SAT, MIP, or dynamic programming over sets of atoms."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt import __version__
from routepack_opt.cost import Score, attention_costs, expert_costs, score_of
from routepack_opt.errors import InvalidInput
from routepack_opt.models.layout_program import LayoutProgram
from routepack_opt.solvers.integer_program import ProgramResult, solve_program
from routepack_opt.topology import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.models.layout_search import LayoutTask

LayoutEngine = Literal["cp-sat", "highs", "subsets"]
_FLOAT_MARGIN = 1e-12  # relative; covers the rounding of float64 sums


@dataclass(frozen=True)
class ExactLayoutProblem:
    """A layout problem with the placement folded into per-rank loads.

    Parameters
    ----------
    padded, tokens, squares, samples
        int64 [n] of each atom: tokens the cap counts, true tokens, sum of squared lengths, samples.
    loads
        int64 [n, L, P], assignments of each atom to the experts of each EP rank.
    shards
        DP ranks of each EDP shard.
    num_rows, cap
        R and C.
    cost
        Exact cost model; ``cost.sync`` decides the objective.
    max_samples
        Most samples in a cell, 0 for any number.
    equal_samples
        Every DP rank holds the same number of samples.
    rank_groups
        int64 [n]; atoms with equal value share a DP rank.
    """

    padded: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    samples: NDArray[np.int64]
    loads: NDArray[np.int64]
    shards: tuple[tuple[int, ...], ...]
    num_rows: int
    cap: int
    cost: CostModel
    max_samples: int = 0
    equal_samples: bool = False
    rank_groups: NDArray[np.int64] | None = None

    @classmethod
    def from_task(cls, task: LayoutTask, rank_of: NDArray[np.int64] | None = None) -> ExactLayoutProblem:
        """Of a task and a placement ``rank_of`` int64 [L, E], the task's own by default."""
        ranks = task.rank_of if rank_of is None else rank_of
        demand = task.atoms.demand_of(np.arange(task.atoms.num_atoms))
        loads = np.zeros((demand.shape[0], demand.shape[1], task.topology.ep), dtype=np.int64)
        for p in range(task.topology.ep):
            loads[:, :, p] = np.where(ranks == p, demand, 0).sum(axis=2, dtype=np.int64)
        return cls(
            padded=task.atoms.padded,
            tokens=task.atoms.tokens,
            squares=task.atoms.squares,
            samples=task.atoms.samples,
            loads=loads,
            shards=task.topology.shards,
            num_rows=task.num_rows,
            cap=task.token_cap,
            cost=task.cost,
            max_samples=task.constraints.max_samples_per_cell or 0,
            equal_samples=task.constraints.equal_samples_per_rank,
            rank_groups=task.atoms.rank_groups,
        )

    @property
    def num_atoms(self) -> int:
        """n."""
        return int(self.padded.size)

    @property
    def num_ranks(self) -> int:
        """D."""
        return sum(map(len, self.shards))

    @property
    def gamma(self) -> NDArray[np.float64]:
        """float64 [L], expert weight of each layer."""
        return self.cost.expert_weights(self.loads.shape[1])

    @property
    def cells_may_move(self) -> bool:
        """Whether a whole cell may go to another DP rank of its shard."""
        return not self.equal_samples and self.rank_groups is None

    def score(self, cell_of: NDArray[np.int64]) -> Score:
        """Exact score of a layout int64 [n] of cell numbers r*D + d."""
        topology = Topology(self.num_ranks, self.loads.shape[2], self.shards)
        shape = (self.num_rows, self.num_ranks)
        tokens = np.zeros(self.num_rows * self.num_ranks, dtype=np.int64)
        squares = np.zeros_like(tokens)
        np.add.at(tokens, cell_of, self.tokens)
        np.add.at(squares, cell_of, self.squares)
        loads = np.zeros((self.num_rows, len(self.shards), *self.loads.shape[1:]), dtype=np.int64)
        rows, ranks = np.divmod(cell_of, self.num_ranks)
        np.add.at(loads, (rows, topology.shard_of_rank[ranks]), self.loads)
        attention = attention_costs(self.cost.stages, tokens.reshape(shape), squares.reshape(shape), topology, self.cap)
        return score_of(attention + expert_costs(loads, self.gamma, self.cap), self.cost.sync)

    def is_feasible(self, cell_of: NDArray[np.int64]) -> bool:
        """Whether a layout keeps every rule."""
        num_cells = self.num_rows * self.num_ranks
        if cell_of.shape != (self.num_atoms,) or cell_of.min() < 0 or cell_of.max() >= num_cells:
            return False
        count = np.bincount(cell_of, minlength=num_cells)
        padded, samples = np.zeros(num_cells, dtype=np.int64), np.zeros(num_cells, dtype=np.int64)
        np.add.at(padded, cell_of, self.padded)
        np.add.at(samples, cell_of, self.samples)
        if count.min() == 0 or ((padded > self.cap) & (count > 1)).any():
            return False
        if self.max_samples and samples.max() > self.max_samples:
            return False
        by_rank = samples.reshape(self.num_rows, self.num_ranks).sum(axis=0)
        if self.equal_samples and by_rank.min() != by_rank.max():
            return False
        if self.rank_groups is None:
            return True
        pairs = np.unique(np.stack((self.rank_groups, cell_of % self.num_ranks)), axis=1)
        return int(pairs.shape[1]) == np.unique(self.rank_groups).size


@dataclass(frozen=True)
class ExactLayout:
    """What an engine found and what it proved.

    Attributes
    ----------
    status
        "optimal": no layout is better by more than ``rounding`` (relative); "feasible": a layout without that proof;
        "infeasible": proved that none exists; "unknown": neither a layout nor a proof.
    cell_of
        int64 [n], cell number r*D + d of each atom, or None.
    objective
        First component of the exact score of ``cell_of`` (inf without one); ``score`` is the whole score.
    bound
        No layout under this placement scores less; 0 when nothing was proved.
    rounding
        Relative error of "optimal" through integer costs.
    """

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    cell_of: NDArray[np.int64] | None
    score: Score | None
    objective: float
    bound: float
    rounding: float
    solver: str
    version: str
    runtime_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def gap(self) -> float:
        """(objective - bound) / bound."""
        return (self.objective - self.bound) / self.bound if self.bound > 0 else self.objective


def solve_layout_exact(
    problem: ExactLayoutProblem | LayoutTask,
    *,
    engine: LayoutEngine = "cp-sat",
    time_limit_s: float = 10.0,
    seed: int = 0,
    hint: NDArray[np.int64] | None = None,
    num_workers: int = 1,
    lexicographic: bool = False,
) -> ExactLayout:
    """Layout of least slowest shard (with ``sync="row"``: least sum of row maxima) for a fixed placement.

    Parameters
    ----------
    engine
        "cp-sat", "highs", or "subsets": dynamic programming over all sets of atoms, for at most
        ``solvers.subset_partition.MAX_ITEMS`` atoms and without rules that tie rows together.
    time_limit_s
        Seconds; the best layout so far comes back with what is proved ("subsets" has no limit).
    hint
        int64 [n], a layout to start from, such as the annealer's; ignored when it breaks a rule. The answer is
        never worse than a valid hint.
    lexicographic
        Once the first component of the score is proved, use what is left of the time to lower the total, then the
        worst row, without giving the first up ("subsets" does not).

    Raises
    ------
    InvalidInput
        Unknown engine, or a problem that "subsets" cannot take.
    """
    if engine not in ("cp-sat", "highs", "subsets"):
        raise InvalidInput(f"engine: {engine!r} is unknown; expected 'cp-sat', 'highs' or 'subsets'")
    if not isinstance(problem, ExactLayoutProblem):
        problem = ExactLayoutProblem.from_task(problem)
    if hint is not None and not problem.is_feasible(hint):
        hint = None
    if engine == "subsets":
        return _by_subsets(problem, hint)
    start = time.perf_counter()
    layout = LayoutProgram(problem)

    def solve(start_from: NDArray[np.int64] | None) -> ProgramResult:
        left_s = max(0.0, time_limit_s - (time.perf_counter() - start))
        values = None if start_from is None else layout.values_of(start_from)
        return solve_program(
            layout.program, engine=engine, time_limit_s=left_s, seed=seed, num_workers=num_workers, hint=values
        )

    exact = _checked(problem, layout, solve(hint), hint)
    if lexicographic and exact.status == "optimal" and exact.cell_of is not None:
        for component in (1, 2):
            layout.minimise_next(component, exact.cell_of)
            exact = _with_better_rest(problem, layout, solve(exact.cell_of), exact)
    settings = {"seed": seed, "num_workers": num_workers if engine == "cp-sat" else 1, "time_limit_s": time_limit_s}
    return replace(exact, settings=settings, runtime_s=time.perf_counter() - start)


def _with_better_rest(
    problem: ExactLayoutProblem, layout: LayoutProgram, result: ProgramResult, exact: ExactLayout
) -> ExactLayout:
    """``exact`` with the layout of a later phase where its exact score is better."""
    if result.values is None or exact.score is None:
        return exact
    cell_of = layout.cell_of(result.values)
    if not problem.is_feasible(cell_of) or problem.score(cell_of) >= exact.score:
        return exact
    score = problem.score(cell_of)
    return replace(exact, cell_of=cell_of, score=score, objective=score.slowest_shard)


def _checked(
    problem: ExactLayoutProblem, layout: LayoutProgram, result: ProgramResult, hint: NDArray[np.int64] | None
) -> ExactLayout:
    """Re-score the engine's answer and translate its bound; an answer that breaks a rule counts as none."""
    status, note = result.status, result.note
    cell_of = None if result.values is None else layout.cell_of(result.values)
    if cell_of is not None and not problem.is_feasible(cell_of):
        cell_of, status, note = None, "unknown", f"{result.solver} returned a layout that breaks a rule"
    if hint is not None and (cell_of is None or problem.score(hint) < problem.score(cell_of)):
        cell_of = hint.copy()
        if status != "optimal":
            status = "feasible"
    score = None if cell_of is None else problem.score(cell_of)
    objective = float("inf") if score is None else score.slowest_shard
    bound = max(0.0, float(result.bound / layout.costs.scale) * (1.0 - _FLOAT_MARGIN))
    rounding = float(layout.costs.loss / layout.costs.scale) / objective if 0 < objective < float("inf") else 0.0
    return ExactLayout(
        status=status,
        cell_of=cell_of,
        score=score,
        objective=objective,
        bound=min(bound, objective),
        rounding=rounding,
        solver=result.solver,
        version=result.version,
        runtime_s=result.runtime_s,
        settings=result.settings,
        note=note,
    )


def _by_subsets(problem: ExactLayoutProblem, hint: NDArray[np.int64] | None) -> ExactLayout:
    from routepack_opt.models import layout_subsets

    why_not = layout_subsets.refusal(problem)
    if why_not:
        raise InvalidInput(f"engine: 'subsets' cannot take this problem: {why_not}")
    start = time.perf_counter()
    cell_of = layout_subsets.best_layout(problem)
    if hint is not None and (cell_of is None or problem.score(hint) < problem.score(cell_of)):
        cell_of = hint.copy()  # as fast, and better in what comes second
    score = None if cell_of is None else problem.score(cell_of)
    objective = float("inf") if score is None else score.slowest_shard
    return ExactLayout(
        status="infeasible" if cell_of is None else "optimal",
        cell_of=cell_of,
        score=score,
        objective=objective,
        bound=objective if score is None else objective * (1.0 - _FLOAT_MARGIN),
        rounding=_FLOAT_MARGIN,
        solver="subsets",
        version=__version__,
        runtime_s=time.perf_counter() - start,
    )
