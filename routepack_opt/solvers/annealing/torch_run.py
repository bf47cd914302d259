"""Run the torch population inside a budget: the same schedule as the CPU chains, all members at one temperature."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers.annealing.population import (
    Incumbent,
    LevelStatistics,
    PopulationResult,
    resampling_weights,
    systematic_resample,
)
from routepack_opt.solvers.annealing.torch_population import TorchPopulation

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.solvers.annealing.chain import ChainProblem
    from routepack_opt.solvers.annealing.schedule import Schedule

_ROUNDS = 8  # rounds of moves between two looks at the clock
_STEP_REFINEMENTS = 16  # of a run with a fixed number of proposals
_FIRST_DEPTH = 32  # swap proposals a layer of the first refinement, until its speed is known
_REFINE_S = 0.1  # seconds a refinement may take


class _Run:
    """A population with the counters of its current level."""

    def __init__(self, population: TorchPopulation, schedule: Schedule, num_experts: int) -> None:
        self.population, self.schedule = population, schedule
        self.most_depth = schedule.refine_depth * num_experts
        self.depth = min(_FIRST_DEPTH, self.most_depth)
        self.anneal_s = self.refine_s = self.longest_refine_s = 0.0
        self.num_refinements = 0

    def anneal(self, temperature: float) -> int:
        """One piece of sample moves; returns the candidates drawn per member."""
        start = time.perf_counter()
        drawn = self.population.anneal(temperature, _ROUNDS, self.schedule.moves.relocate)
        self.population.synchronize()
        self.anneal_s += time.perf_counter() - start
        return drawn // self.population.num_members

    def refine(self, temperature: float, smooth: bool) -> float:
        start = time.perf_counter()
        self.population.refine(
            temperature * (self.schedule.smooth_temperature if smooth else 1.0), self.depth, smooth=smooth
        )
        self.population.synchronize()
        spent = time.perf_counter() - start
        self.refine_s += spent
        self.longest_refine_s = max(spent, 0.5 * self.longest_refine_s)
        self.num_refinements += 1
        return spent

    def fit_depth(self, spent: float) -> None:
        """A refinement as deep as its time allows: a device may be a hundred times slower or faster than another."""
        factor = min(2.0, max(0.5, _REFINE_S / max(spent, 1e-6)))
        self.depth = max(1, min(self.most_depth, int(self.depth * factor)))

    @property
    def refine_due(self) -> bool:
        share = self.schedule.refine_share
        return share > 0.0 and self.refine_s < share * (self.anneal_s + self.refine_s)


def run_torch_population(
    problem: ChainProblem,
    starts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    *,
    num_members: int,
    device: str,
    deadline: float | None,
    steps: int | None,
    unit: float,
    schedule: Schedule,
    seed: int,
    stop: threading.Event | None = None,
) -> PopulationResult:
    """Anneal ``num_members`` copies of the starts ``(cell_of [n], rank_of [L, E])`` on a torch device.

    Parameters
    ----------
    device
        A torch device: "cpu", "cuda", "cuda:1".
    deadline, steps
        As in :func:`.population.run_population`; with ``steps`` (candidates per member) expert swaps follow a fixed
        pattern instead of the clock.
    """
    if (deadline is None) == (steps is None):
        raise ValueError("give exactly one of deadline and steps")
    cell_of = np.stack([starts[m % len(starts)][0] for m in range(num_members)])
    rank_of = np.stack([starts[m % len(starts)][1] for m in range(num_members)])
    population = TorchPopulation(problem, cell_of, rank_of, device=device, seed=seed)
    run = _Run(population, schedule, problem.demand.shape[2])
    levels: list[LevelStatistics] = []
    if steps is not None:
        _by_steps(run, steps, unit, stop)
        levels.append(_statistics(run, 0, 0.0, unit * schedule.cold, float(num_members), num_members))
    else:
        assert deadline is not None
        _by_clock(run, deadline, unit, seed, stop, levels)
    best_cells, best_ranks, score = population.best()
    return PopulationResult([Incumbent(score, best_cells, best_ranks)], levels)


def _by_clock(
    run: _Run,
    deadline: float,
    unit: float,
    seed: int,
    stop: threading.Event | None,
    levels: list[LevelStatistics],
) -> None:
    schedule, population = run.schedule, run.population
    start = time.perf_counter()
    duration = deadline - start
    rng = np.random.default_rng([seed % 2**63, 1])
    families = np.arange(population.num_members)
    for level in range(schedule.num_levels):
        until = start + duration * (level + 1) / schedule.num_levels
        while (now := time.perf_counter()) < until:
            if stop is not None and stop.is_set():
                return
            fraction = (now - start) / duration
            temperature = schedule.temperature(fraction, 1, unit)
            if run.refine_due and deadline - now > 2.0 * run.longest_refine_s:
                run.fit_depth(run.refine(temperature, schedule.smooth(fraction, 1)))
            else:
                run.anneal(temperature)
        temperature = schedule.temperature((level + 0.5) / schedule.num_levels, 1, unit)
        effective = float(population.num_members)
        if schedule.resample and population.num_members > 1 and level + 1 < schedule.num_levels:
            following = schedule.temperature((level + 1.5) / schedule.num_levels, 1, unit)
            weights = resampling_weights(population.energies().cpu().numpy(), temperature, following)
            effective = float(1.0 / (weights**2).sum())
            parents = systematic_resample(weights, rng.random())
            population.resample(parents)
            families = families[parents]
        seconds = time.perf_counter() - start
        levels.append(_statistics(run, level, seconds, temperature, effective, int(np.unique(families).size)))


def _by_steps(run: _Run, steps: int, unit: float, stop: threading.Event | None) -> None:
    done = 0
    while done < steps and not (stop is not None and stop.is_set()):
        fraction = done / steps
        temperature = run.schedule.temperature(fraction, 1, unit)
        done += run.anneal(temperature)
        if run.schedule.refine_share and int(_STEP_REFINEMENTS * done / steps) > int(_STEP_REFINEMENTS * fraction):
            run.refine(temperature, run.schedule.smooth(fraction, 1))


def _statistics(
    run: _Run, level: int, seconds: float, temperature: float, effective: float, num_families: int
) -> LevelStatistics:
    counts = run.population.statistics()
    energies = run.population.energies().cpu().numpy()
    num_refinements, run.num_refinements = run.num_refinements, 0
    return LevelStatistics(
        level=level,
        seconds=seconds,
        temperature=temperature,
        num_proposals=counts.num_proposed * run.population.num_members,
        num_scored=int(counts.num_scored.sum()),
        num_accepted=int(counts.num_accepted.sum()),
        num_refinements=num_refinements,
        lowest_energy=float(energies.min()),
        mean_energy=float(energies.mean()),
        best_slowest_shard=float(run.population.scores()[:, 0].min()),
        effective_members=effective,
        num_families=num_families,
    )
