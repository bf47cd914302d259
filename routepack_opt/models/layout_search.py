"""Search for the best layout of a given row count: seeds, then annealing with co-refinement, scored exactly."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.cost import Score, score
from routepack_opt.models.exhaustive import exhaustive
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.placement import slots_from_ranks
from routepack_opt.models.rows import ffd_rows, pack_into
from routepack_opt.models.seeds import edp_aware_pair, level_packing
from routepack_opt.solvers.annealing.chain import Chain, ChainProblem
from routepack_opt.solvers.annealing.population import LevelStatistics, PopulationResult, run_population
from routepack_opt.solvers.annealing.schedule import Schedule

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.cost import CostModel
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.models.rows import RowsProblem
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

logger = logging.getLogger(__name__)

_STEP_MODE_CHAINS = 2  # fixed, so that a plan does not depend on the cores of the machine it is made on
_MAX_CHAINS = 16
_GPU_MEMBERS = 64
_TORCH_CPU_MEMBERS = 16
_TRY_ALL_S = 0.005  # what trying all layouts of a tiny window takes (median 0.8 ms, longest 9 ms)
_SEED_SHARE = 0.25  # of the time left that seeds may take
_PAIRING_WORK = 20_000_000  # array entries EDPAwarePair may touch; beyond, seeds would eat the budget


@dataclass(frozen=True)
class LayoutTask:
    """A window with its rows decided and its experts placed: what is left is where atoms go.

    Attributes
    ----------
    cells
        R*D packed cells of atoms, index r*D + d, all constraints met.
    rank_of, lpt_ranks
        int64 [L, E], EP ranks of the best window placement and of LPT.
    standing
        int64 [L, E], EP ranks in force.
    bound
        Lower bound on the slowest shard.
    previous_placement
        Whether ``standing`` is the placement of an earlier plan, worth a seed of its own.
    """

    window: Window
    topology: Topology
    token_cap: int
    cost: CostModel
    constraints: Constraints
    atoms: AtomSet
    rows_problem: RowsProblem
    cells: list[list[int]]
    rank_of: NDArray[np.int64]
    lpt_ranks: NDArray[np.int64]
    standing: NDArray[np.int64]
    bound: float
    previous_placement: bool = False

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.cells) // self.topology.dp

    @property
    def cells_may_move(self) -> bool:
        """Whether a whole cell may go to another DP rank."""
        return not self.constraints.equal_samples_per_rank and self.atoms.rank_groups is None

    def chain_problem(self) -> ChainProblem:
        """The same as arrays for the annealing kernels."""
        num_layers, num_experts = self.window.num_layers, self.window.num_experts
        share = self.constraints.max_moved
        budget = -1 if share is None else int(share * num_experts)
        return ChainProblem(
            padded=self.atoms.padded,
            tokens=self.atoms.tokens,
            squares=self.atoms.squares,
            samples=self.atoms.samples,
            pinned=self.atoms.pinned,
            demand=self.atoms.demand,
            source=self.atoms.source,
            shards=self.topology.shards,
            num_rows=self.num_rows,
            num_ranks=self.topology.dp,
            cap=self.token_cap,
            max_samples=self.constraints.max_samples_per_cell or 0,
            equal_samples=self.constraints.equal_samples_per_rank,
            alpha=np.array([s.alpha for s in self.cost.stages], dtype=np.float64),
            beta=np.array([s.beta for s in self.cost.stages], dtype=np.float64),
            gamma=self.cost.expert_weights(num_layers),
            sync=self.cost.sync,
            num_expert_ranks=self.topology.ep,
            home=self.standing,
            move_budget=np.full(num_layers, budget, dtype=np.int64),
        )


@dataclass(frozen=True)
class Candidate:
    """A layout with its placement and exact score."""

    score: Score
    cell_of: NDArray[np.int64]
    rank_of: NDArray[np.int64]


@dataclass
class SearchResult:
    """Best layout found, the LPT + FFD baseline (with the rows FFD needs) and what the search did."""

    best: Candidate
    baseline: Score | None
    baseline_rows: int | None
    num_scored: int = 0
    seeds_s: float = 0.0
    note: str = ""
    levels: list[LevelStatistics] = field(default_factory=list)


def search_layout(
    task: LayoutTask,
    *,
    deadline: float | None,
    steps: int | None,
    seed: int,
    stop: threading.Event | None = None,
    refine: bool = True,
    schedule: Schedule | None = None,
    device: str = "cpu",
) -> SearchResult:
    """Best layout within a deadline (``time.perf_counter()`` value) or a number of proposals per chain.

    ``device`` "cpu" is the compiled engine, "torch" the torch engine on the CPU, "cuda" or "cuda:1" on a GPU.
    ``schedule`` None takes the one measured best for the size. With ``refine`` False no expert is moved: the placement
    stays ``task.rank_of`` (or LPT, where its FFD layout wins).
    """
    start = time.perf_counter()
    problem = task.chain_problem()
    ffd = ffd_rows(task.rows_problem)
    until = None if deadline is None else start + _SEED_SHARE * (deadline - start)
    packings = _seed_packings(task, ffd, seed, until)
    first = Chain(problem, _assignment(packings[0], task.atoms.num_atoms), task.rank_of, seed=seed, stream=0)
    seeds = []
    for cell_of in _seed_assignments(task, packings, first, until):
        first.copy_from(cell_of, task.rank_of)
        seeds.append(Candidate(first.score(), cell_of, task.rank_of))
    baseline, baseline_rows = _baseline(task, ffd, first, seeds)
    if task.previous_placement:  # where little changed since, the experts may stay where they are
        best_cells = min(seeds, key=lambda candidate: candidate.score).cell_of
        first.copy_from(best_cells, task.standing)
        seeds.append(Candidate(first.score(), best_cells, task.standing))
    seeds.sort(key=lambda candidate: candidate.score)  # stable: equal seeds keep their order
    result = SearchResult(seeds[0], baseline, baseline_rows, seeds_s=time.perf_counter() - start)
    best = result.best.score
    if task.topology.num_shards == 1 and best.slowest_shard <= task.bound * (1.0 + 1e-9):
        result.note = "refinement bypassed: the seed already meets the lower bound"
        return result
    if steps == 0 or (deadline is not None and deadline - time.perf_counter() < 1e-3):
        return result
    time_to_try_all = deadline is None or deadline - time.perf_counter() > _TRY_ALL_S
    if refine and time_to_try_all and _try_all(task, problem, first, result):
        return result
    if schedule is None:
        schedule = Schedule.for_size(task.atoms.num_atoms, len(task.cells))
    if not refine or task.constraints.max_moved == 0.0:
        schedule = schedule.without_refinement()
    settings: dict[str, Any] = {
        "deadline": deadline,
        "steps": steps,
        "unit": max(best.total, 1e-300) / task.atoms.num_atoms,
        "schedule": schedule,
        "seed": seed,
        "stop": stop,
    }
    if device == "cpu":
        population = run_population(_chains(task, problem, first, seeds, steps, seed), **settings)
    else:
        population = _run_torch(problem, seeds, device, settings)
    result.num_scored = population.num_scored
    result.levels = population.levels
    for incumbent in population.incumbents:
        if incumbent.score < result.best.score:
            result.best = Candidate(incumbent.score, incumbent.cell_of, incumbent.rank_of)
    return result


def _run_torch(
    problem: ChainProblem, seeds: list[Candidate], device: str, settings: dict[str, Any]
) -> PopulationResult:
    from routepack_opt.solvers.annealing.torch_run import run_torch_population

    on_gpu = device.startswith("cuda")
    return run_torch_population(
        problem,
        [(s.cell_of, s.rank_of) for s in seeds[:4]],
        num_members=_GPU_MEMBERS if on_gpu else _TORCH_CPU_MEMBERS,
        device=device if on_gpu else "cpu",
        **settings,
    )


def _try_all(task: LayoutTask, problem: ChainProblem, chain: Chain, result: SearchResult) -> bool:
    """Optimum of a tiny window into ``result``; False when the window is larger."""
    tried = exhaustive(problem, cells_may_move=task.cells_may_move, rank_groups=task.atoms.rank_groups)
    if tried is None:
        return False
    chain.copy_from(*tried)
    if chain.score() < result.best.score:
        result.best = Candidate(chain.score(), *tried)
    result.note = "optimal: every layout and every placement of this small window was tried"
    return True


def _assignment(cells: list[list[int]], num_atoms: int) -> NDArray[np.int64]:
    result = np.empty(num_atoms, dtype=np.int64)
    for k, members in enumerate(cells):
        result[members] = k
    return result


def _time_left(until: float | None) -> bool:
    return until is None or time.perf_counter() < until


def _seed_packings(
    task: LayoutTask, ffd: list[list[int]] | None, seed: int, until: float | None
) -> list[list[list[int]]]:
    """R*D cells each: the packing of the row count (always there), level, FFD and a random one."""
    packings = [task.cells]
    if task.cells_may_move and _time_left(until):
        level = level_packing(task.atoms, len(task.cells), task.token_cap, task.cost, task.constraints)
        if level is not None:
            packings.append(level)
    if ffd is not None and len(ffd) == len(task.cells):
        packings.append(ffd)
    other = pack_into(task.rows_problem, task.num_rows, seed=seed) if _time_left(until) else None
    if other is not None:
        packings.append(other)
    return packings


def _seed_assignments(
    task: LayoutTask, packings: list[list[list[int]]], chain: Chain, until: float | None
) -> Iterator[NDArray[np.int64]]:
    """Cell number of each atom: the packings as they are, then some of them dealt by EDPAwarePair."""
    for cells in packings:
        yield _assignment(cells, task.atoms.num_atoms)
    num_x = task.num_rows * task.topology.num_shards
    work = len(task.cells) * num_x * task.window.num_layers * task.topology.ep
    if task.cells_may_move and num_x > 1 and work < _PAIRING_WORK:
        for cells in packings[:3]:
            if _time_left(until):
                yield edp_aware_pair(chain.loads, cells, task.topology, task.num_rows)


def _baseline(
    task: LayoutTask, ffd: list[list[int]] | None, chain: Chain, seeds: list[Candidate]
) -> tuple[Score | None, int | None]:
    """LPT + FFD, what users run today; appended to the seeds when it is legal here."""
    if ffd is None:
        return None, None
    cell_of = _assignment(ffd, task.atoms.num_atoms)
    rows = len(ffd) // task.topology.dp
    if rows == task.num_rows:
        chain.copy_from(cell_of, task.lpt_ranks)
        if task.constraints.max_moved is None:
            seeds.append(Candidate(chain.score(), cell_of, task.lpt_ranks))
        return chain.score(), rows
    cells = cells_from_assignment(task.atoms, cell_of, rows, task.topology.dp)
    slots = slots_from_ranks(task.lpt_ranks, task.topology.ep)
    return score(task.window, cells, slots, task.topology, task.token_cap, task.cost), rows


def _chains(
    task: LayoutTask, problem: ChainProblem, first: Chain, seeds: list[Candidate], steps: int | None, seed: int
) -> list[Chain]:
    if steps is not None:
        count = _STEP_MODE_CHAINS
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # chains of a large window together stay under half its own size
        room = max(1, int(0.5 * max(problem.demand.nbytes, 1 << 28) / max(first.loads.nbytes, 1)))
        count = max(1, min(cores, room, _MAX_CHAINS))
    first.copy_from(seeds[0].cell_of, seeds[0].rank_of)
    others = (seeds[k % len(seeds)] for k in range(1, count))
    return [first, *(Chain(problem, s.cell_of, s.rank_of, seed=seed, stream=k) for k, s in enumerate(others, 1))]
