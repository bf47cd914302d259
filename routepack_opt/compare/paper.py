"""The paper's pipeline as printed, the yardstick: LPT kept, its seeds, population annealing, no co-refinement.

Algorithms 2 and 3 in our own code (routepack.md section 6). The row count is our certified one, so that methods are
compared with as many rows. Budgets and temperatures are not published; ours are chosen so that it does well.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.compare.case import Answer
from routepack_opt.compare.paper_moves import empty_best, paper_steps
from routepack_opt.compare.paper_seeds import Seed, choose_members, make_seeds
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.placement import slots_from_ranks
from routepack_opt.solvers.annealing.chain import Chain
from routepack_opt.solvers.annealing.population import systematic_resample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.compare.case import Case
    from routepack_opt.cost import Score
    from routepack_opt.models.layout_search import LayoutTask

_BLOCK = 500  # proposals between two looks at the clock
_S1_WEIGHT = 1e-6  # the paper's energy is s0 + 1e-6 s1 + 1e-9 s2


@dataclass(frozen=True)
class PaperOptions:
    """Names of the paper; it gives no values.

    Parameters
    ----------
    seeds, width
        M seeds and the width w of their random choices.
    population
        P_pop members.
    temperatures, hot, cold
        N temperatures, geometric from ``hot`` to ``cold``, as shares of the energy.
    relocate, guided
        rho, and the probability of a guided proposal.
    score_weight
        eta of the choice of members.
    """

    seeds: int = 16
    width: int = 4
    population: int = 8
    temperatures: int = 24
    hot: float = 3e-5
    cold: float = 3e-7
    relocate: float = 0.3
    guided: float = 0.8
    score_weight: float = 1.0


def paper_pipeline(case: Case, budget_s: float, seed: int, options: PaperOptions | None = None) -> Answer:
    """Seeds, members, annealing with resampling, best state by exact score; never worse than the best seed."""
    from routepack_opt.compare.builtin import lpt_task

    options = options or PaperOptions()
    start = time.perf_counter()
    deadline = start + 0.97 * budget_s
    task = lpt_task(case, 0.2 * budget_s, seed)
    rng = np.random.default_rng(seed)
    population = _Population(task, options, seed)
    until = start + 0.25 * budget_s
    seeds = make_seeds(task, population.score, most=options.seeds, width=options.width, until=until, rng=rng)
    members = choose_members(seeds, task, options.population, score_weight=options.score_weight, rng=rng)
    best = population.run(members, deadline, rng)
    cells = cells_from_assignment(task.atoms, best.cell_of, task.num_rows, case.topology.dp)
    slots = slots_from_ranks(task.rank_of, case.topology.ep)
    return Answer(cells, slots, proposals=population.num_steps)


class _Population:
    """Members as assignments; one chain a thread takes them in turn."""

    def __init__(self, task: LayoutTask, options: PaperOptions, seed: int) -> None:
        self.options = options
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        problem = task.chain_problem()
        num_shards = task.topology.num_shards
        start = np.concatenate([np.full(len(cell), k) for k, cell in enumerate(task.cells)])
        cell_of = np.empty_like(start)
        cell_of[np.concatenate([np.asarray(cell) for cell in task.cells])] = start
        spread = _S1_WEIGHT * num_shards
        self.chains = [
            Chain(problem, cell_of, task.rank_of, seed=seed, stream=k, spread=spread)
            for k in range(max(1, min(cores, options.population)))
        ]
        self.rank_of = task.rank_of
        self.rates = np.array([options.relocate, options.guided])
        self.num_steps = 0

    def score(self, cell_of: NDArray[np.int64]) -> Score:
        """Exact."""
        self.chains[0].copy_from(cell_of, self.rank_of)
        return self.chains[0].score()

    def run(self, members: list[Seed], deadline: float, rng: np.random.Generator) -> Seed:
        """Population annealing: terminal states are resampled, best-of-trajectory ones only feed the incumbent."""
        best = min(members, key=lambda member: member.score)
        states = [member.cell_of for member in members]
        options = self.options
        ratio = options.cold / options.hot
        temperatures = options.hot * ratio ** (np.arange(options.temperatures) / max(1, options.temperatures - 1))
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(self.chains)) as pool:
            for n, temperature in enumerate(temperatures):
                until = begin + (deadline - begin) * (n + 1) / len(temperatures)
                if time.perf_counter() >= deadline:
                    break
                parts = [range(k, len(states), len(self.chains)) for k in range(len(self.chains))]
                energies = np.zeros(len(states))
                work = [
                    pool.submit(self._anneal, chain, part, states, energies, float(temperature), until)
                    for chain, part in zip(self.chains, parts, strict=True)
                ]
                for seed, steps in (job.result() for job in work):
                    self.num_steps += steps
                    if seed is not None and seed.score < best.score:
                        best = seed
                if n + 1 < len(temperatures):
                    excess = (energies - energies.min()) / max(abs(float(energies.min())), 1.0)
                    weights = np.exp(-(1.0 / temperatures[n + 1] - 1.0 / temperature) * excess)
                    states = [states[k].copy() for k in systematic_resample(weights, float(rng.random()))]
        return best

    def _anneal(
        self,
        chain: Chain,
        part: range,
        states: list[NDArray[np.int64]],
        energies: NDArray[np.float64],
        temperature: float,
        until: float,
    ) -> tuple[Seed | None, int]:
        """Give each member of ``part`` an equal share of the time; states and energies are replaced in place."""
        found: Seed | None = None
        steps = 0
        for done, k in enumerate(part):
            now = time.perf_counter()
            own = now + (until - now) / (len(part) - done)
            chain.copy_from(states[k], self.rank_of)
            best, best_cell_of = empty_best(states[k].size)
            while True:
                paper_steps(
                    chain.atoms,
                    chain.grid,
                    chain.costs,
                    chain.loads,
                    chain.state,
                    chain._scratch,
                    self.rates,
                    temperature,
                    _BLOCK,
                    chain.rng,
                    best,
                    best_cell_of,
                )
                steps += _BLOCK
                if time.perf_counter() >= own:
                    break
            chain.recompute()
            states[k] = chain.state.cell_of.copy()
            energies[k] = chain.energy
            if np.isfinite(best[0]):
                chain.copy_from(best_cell_of, self.rank_of)
                if found is None or chain.score() < found.score:
                    found = Seed(best_cell_of, chain.score())
        return found, steps


def warmup() -> None:
    """Compile the proposals."""
    from routepack_opt.solvers.annealing.chain import ChainProblem

    ones = np.ones(4, dtype=np.int64)
    problem = ChainProblem(
        padded=ones, tokens=ones, squares=ones, samples=ones, pinned=np.zeros(4, dtype=np.bool_),
        demand=np.ones((4, 1, 2), dtype=np.int32), shards=((0,), (1,)), num_rows=1, num_ranks=2, cap=4, max_samples=0,
        equal_samples=False, alpha=np.ones(1), beta=np.ones(1), gamma=np.ones(1), sync="shard", num_expert_ranks=2,
        home=np.array([[0, 1]]), move_budget=np.array([-1]),
    )  # fmt: skip
    chain = Chain(problem, np.array([0, 0, 1, 1]), np.array([[0, 1]]), seed=0, stream=0)
    best, best_cell_of = empty_best(4)
    rates = np.array([0.5, 0.5])
    paper_steps(
        chain.atoms, chain.grid, chain.costs, chain.loads, chain.state, chain._scratch, rates, 1e-3, 4, chain.rng,
        best, best_cell_of,
    )  # fmt: skip
