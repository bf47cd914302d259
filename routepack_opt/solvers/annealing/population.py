"""Population control: members anneal on their own, meet between temperatures, and hand in their best by exact score."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers.annealing.schedule import Schedule, work_estimates_ns

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.cost import Score
    from routepack_opt.solvers.annealing.chain import Chain

_CHUNK_S = 2e-3  # seconds between two looks at the clock
_REFINEMENTS_PER_LEVEL = 4
_TEMPERATURES = 12  # at least, in a short cycle
_FIRST_SEGMENT = 4_000  # proposals of the first cycle in step mode; each later one is twice as long


@dataclass
class Incumbent:
    """Best state of one member by exact score (never by energy: the score is what is promised)."""

    score: Score
    cell_of: NDArray[np.int64]
    rank_of: NDArray[np.int64]

    @classmethod
    def of(cls, chain: Chain) -> Incumbent:
        """The chain's current state."""
        return cls(chain.score(), chain.state.cell_of.copy(), chain.rank_of.copy())

    def offer(self, chain: Chain) -> None:
        """Keep the chain's state when its score is better."""
        score = chain.score()
        if score < self.score:
            self.score = score
            self.cell_of[:] = chain.state.cell_of
            self.rank_of[:] = chain.rank_of


@dataclass(frozen=True)
class LevelStatistics:
    """What happened at one temperature (energy units), summed over members."""

    level: int
    seconds: float
    temperature: float
    num_proposals: int
    num_scored: int
    num_accepted: int
    num_refinements: int
    lowest_energy: float
    mean_energy: float
    best_slowest_shard: float
    effective_members: float
    num_families: int


@dataclass
class PopulationResult:
    """Incumbents of all members and the statistics of every level."""

    incumbents: list[Incumbent]
    levels: list[LevelStatistics] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """Proposals that passed the cap check and were scored."""
        return sum(level.num_scored for level in self.levels)


class _Member:
    """A chain with its counters and incumbent."""

    def __init__(self, chain: Chain, schedule: Schedule) -> None:
        self.chain = chain
        self.best = Incumbent.of(chain)
        self.depth = schedule.refine_depth * chain.problem.demand.shape[2]
        self.proposal_ns, self.refine_ns = work_estimates_ns(chain, schedule)
        self.anneal_s = self.refine_s = 0.0
        self.longest_refine_s = self.refine_ns * 1e-9
        self.num_proposals = self.num_scored = self.num_refinements = 0

    def anneal(self, temperature: float, num_steps: int, schedule: Schedule) -> None:
        self.num_scored += self.chain.anneal(temperature, num_steps, schedule.moves)
        self.num_proposals += num_steps

    def use_spread(self, spread: float) -> None:
        if self.chain.grid.spread != spread:
            self.chain.set_spread(spread)

    def refine(self, temperature: float, smooth: bool, schedule: Schedule) -> None:
        if smooth:
            temperature *= schedule.smooth_temperature
        self.chain.refine(temperature, self.depth, smooth=smooth)
        self.num_refinements += 1

    def take_counts(self) -> tuple[int, int, int, int]:
        """Counters since the last call: proposals, scored, accepted, refinements."""
        accepted = int(self.chain.state.summary[1])
        counts = (self.num_proposals, self.num_scored, accepted, self.num_refinements)
        self.num_proposals = self.num_scored = self.num_refinements = 0
        self.chain.state.summary[1] = 0.0
        return counts


def run_population(
    chains: Sequence[Chain],
    *,
    deadline: float | None,
    steps: int | None,
    unit: float,
    schedule: Schedule,
    seed: int = 0,
    stop: threading.Event | None = None,
    max_threads: int | None = None,
) -> PopulationResult:
    """Anneal every member, each in a thread of its own as far as there are threads.

    Parameters
    ----------
    deadline
        ``time.perf_counter()`` value to return by; the temperature follows the clock.
    steps
        Proposals per member instead of a deadline: whole pieces of cycles of fixed lengths, so that the work of a
        smaller budget is a prefix of that of a larger one (more steps are never worse).
    unit
        Mean cost of an atom, the unit of temperature.
    seed
        Of the resampling.
    """
    if (deadline is None) == (steps is None):
        raise ValueError("give exactly one of deadline and steps")
    members = [_Member(chain, schedule) for chain in chains]
    result = PopulationResult([member.best for member in members])
    with ThreadPoolExecutor(max_threads or len(members)) as pool:
        if steps is not None:
            list(pool.map(lambda member: _run_steps(member, steps, unit, schedule, stop), members))
            result.levels.append(_level_statistics(members, 0, 0.0, unit * schedule.cold, 1.0, len(members)))
        else:
            assert deadline is not None
            _run_levels(members, pool.map, deadline, unit, schedule, seed, stop, result)
    return result


def _run_levels(
    members: list[_Member],
    parallel_map: Callable[..., object],
    deadline: float,
    unit: float,
    schedule: Schedule,
    seed: int,
    stop: threading.Event | None,
    result: PopulationResult,
) -> None:
    """Clock mode: level after level; members run freely inside one and meet at its end."""
    start = time.perf_counter()
    duration = deadline - start
    rng = np.random.default_rng([seed % 2**63, 1])
    families = np.arange(len(members))
    per_thread = duration * 1e9 / members[0].proposal_ns
    num_cycles = schedule.num_cycles(per_thread)
    # a member that refines past the end of a level keeps the others waiting: levels hold several refinements
    fitting = int(duration * 1e9 / (_REFINEMENTS_PER_LEVEL * members[0].refine_ns))
    num_levels = max(2, min(schedule.num_levels, fitting))
    for level in range(num_levels):
        until = start + duration * (level + 1) / num_levels

        def work(member: _Member, until: float = until) -> None:
            _run_clock(member, start, deadline, until, num_cycles, unit, schedule, stop)

        list(parallel_map(work, members))  # type: ignore[call-overload]
        for member in members:
            member.best.offer(member.chain)
        now = schedule.temperature((level + 0.5) / num_levels, num_cycles, unit)
        effective = float(len(members))
        if schedule.resample and num_cycles == 1 and len(members) > 1 and level + 1 < num_levels:
            following = schedule.temperature((level + 1.5) / num_levels, num_cycles, unit)
            weights = resampling_weights(np.array([m.chain.energy for m in members]), now, following)
            effective = float(1.0 / (weights**2).sum())
            parents = systematic_resample(weights, rng.random())
            _replace_members(members, parents)
            families = families[parents]
        seconds = time.perf_counter() - start
        result.levels.append(_level_statistics(members, level, seconds, now, effective, np.unique(families).size))
        if (stop is not None and stop.is_set()) or time.perf_counter() >= deadline:
            return


def _run_clock(
    member: _Member,
    start: float,
    deadline: float,
    until: float,
    num_cycles: int,
    unit: float,
    schedule: Schedule,
    stop: threading.Event | None,
) -> None:
    duration = deadline - start
    cycle_ns = duration * 1e9 / num_cycles
    chunk = max(50, int(min(_CHUNK_S * 1e9, cycle_ns / _TEMPERATURES) / member.proposal_ns))
    while stop is None or not stop.is_set():
        now = time.perf_counter()
        if now >= until:
            return
        fraction = (now - start) / duration
        member.use_spread(schedule.spread(int(fraction * num_cycles)))
        temperature = schedule.temperature(fraction, num_cycles, unit)
        due = member.refine_s < schedule.refine_share * (member.anneal_s + member.refine_s)
        if schedule.refine_share and due and deadline - now > 2.0 * member.longest_refine_s:
            member.refine(temperature, schedule.smooth(fraction, num_cycles), schedule)
            spent = time.perf_counter() - now
            member.refine_s += spent
            member.longest_refine_s = max(spent, 0.5 * member.longest_refine_s)
        else:
            member.anneal(temperature, chunk, schedule)
            spent = time.perf_counter() - now
            member.anneal_s += spent
            if spent > 2 * _CHUNK_S and chunk > 50:
                chunk //= 2
        if schedule.within_cycle(fraction, num_cycles) > 0.5:
            member.best.offer(member.chain)


def _run_steps(member: _Member, steps: int, unit: float, schedule: Schedule, stop: threading.Event | None) -> None:
    """Whole pieces only, and offers only between pieces: a smaller budget is a prefix of a larger one."""
    chain, best = member.chain, member.best
    share = schedule.refine_share
    ratio = member.refine_ns / member.proposal_ns
    period = max(200, int(ratio * (1.0 - share) / share)) if share else _FIRST_SEGMENT
    longest = max(_FIRST_SEGMENT, schedule.cycle_proposals)
    length = _FIRST_SEGMENT
    done = since_refine = cycle = 0
    while True:
        member.use_spread(schedule.spread(cycle))
        piece = min(period, length // 16)
        for position in range(0, length, piece):
            if done + piece > steps or (stop is not None and stop.is_set()):
                return
            temperature = schedule.temperature(position / length, 1, unit)
            member.anneal(temperature, piece, schedule)
            done += piece
            since_refine += piece
            if share and since_refine >= period:
                member.refine(temperature, schedule.smooth(position / length, 1), schedule)
                since_refine = 0
            best.offer(chain)
        chain.copy_from(best.cell_of, best.rank_of)
        if length == longest:
            cycle += 1
        length = min(2 * length, longest)


def resampling_weights(energies: NDArray[np.float64], temperature: float, following: float) -> NDArray[np.float64]:
    """Normalised weights exp(-(1/T' - 1/T) (E - E_min)) of members going from temperature T to T'."""
    exponents = -(1.0 / following - 1.0 / temperature) * (energies - energies.min())
    weights = np.exp(exponents - exponents.max())
    return np.asarray(weights / weights.sum())


def systematic_resample(weights: NDArray[np.float64], draw: float) -> NDArray[np.int64]:
    """int64 [M] parents by systematic resampling with one uniform ``draw`` in [0, 1)."""
    positions = (np.arange(weights.size) + draw) / weights.size
    edges = np.cumsum(weights) / weights.sum()
    # rounding may leave the last pointer on or above the last edge
    return np.minimum(np.searchsorted(edges, positions, side="right"), weights.size - 1).astype(np.int64)


def _replace_members(members: list[_Member], parents: NDArray[np.int64]) -> None:
    """Members without offspring take the state of one that has several; survivors stay where they are."""
    counts = np.bincount(parents, minlength=len(members))
    surplus = [k for k, count in enumerate(counts.tolist()) for _ in range(count - 1)]
    for dead, parent in zip(np.flatnonzero(counts == 0).tolist(), surplus, strict=True):
        source = members[parent].chain
        members[dead].chain.copy_from(source.state.cell_of, source.rank_of)
    for k in range(len(members)):
        parents[k] = k
    for dead, parent in zip(np.flatnonzero(counts == 0).tolist(), surplus, strict=True):
        parents[dead] = parent


def _level_statistics(
    members: list[_Member], level: int, seconds: float, temperature: float, effective: float, num_families: int
) -> LevelStatistics:
    counts = np.array([member.take_counts() for member in members]).sum(axis=0)
    energies = [member.chain.energy for member in members]
    return LevelStatistics(
        level=level,
        seconds=seconds,
        temperature=temperature,
        num_proposals=int(counts[0]),
        num_scored=int(counts[1]),
        num_accepted=int(counts[2]),
        num_refinements=int(counts[3]),
        lowest_energy=min(energies),
        mean_energy=float(np.mean(energies)),
        best_slowest_shard=min(member.best.score.slowest_shard for member in members),
        effective_members=effective,
        num_families=num_families,
    )
