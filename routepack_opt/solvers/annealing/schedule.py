"""How an annealing run spends its budget: temperatures, the share given to expert swaps, segments, deadlines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routepack_opt.solvers.annealing.chain import DEFAULT_MOVES

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.cost import Score
    from routepack_opt.solvers.annealing.chain import Chain
    from routepack_opt.solvers.annealing.sample_moves import Moves

_FIRST_SEGMENT = 4_000  # proposals of the first segment in step mode; each later one is twice as long
_CHUNK_S = 2e-3  # seconds between two looks at the clock


@dataclass(frozen=True)
class Schedule:
    """Temperatures and shares, by meaning.

    Parameters
    ----------
    hot, cold
        First and last temperature as a share of the mean cost of one atom (total J / n).
    reheat
        First temperature of the later segments of step mode, which start from the incumbent.
    refine_share
        Share of the time given to expert swaps (co-refinement).
    refine_depth
        Swap proposals per expert and layer in one refinement.
    moves
        Shares of the kinds of proposals.
    """

    hot: float = 1e-2
    cold: float = 1.5e-4
    reheat: float = 3e-3
    refine_share: float = 0.35
    refine_depth: int = 32
    moves: Moves = DEFAULT_MOVES


@dataclass
class Incumbent:
    """Best state of one chain by exact score (never by energy: the score is what is promised)."""

    score: Score
    cell_of: NDArray[np.int64]
    rank_of: NDArray[np.int64]
    num_scored: int = 0

    def offer(self, chain: Chain) -> None:
        """Keep the chain's state when its score is better."""
        score = chain.score()
        if score < self.score:
            self.score = score
            self.cell_of[:] = chain.state.cell_of
            self.rank_of[:] = chain.rank_of


def _work_estimates_ns(chain: Chain, schedule: Schedule) -> tuple[float, float]:
    """Rough cost of one proposal and of one refinement; only their ratio matters."""
    n, num_layers, num_experts = chain.problem.demand.shape
    num_ranks, lanes = chain.loads.shape[1], chain.loads.shape[2]
    num_x = chain.state.costs.shape[0]
    proposal = 60.0 + 0.12 * num_ranks * lanes
    rebuild = 1.4 * n * num_layers * num_experts
    swaps = num_layers * num_experts * schedule.refine_depth * (30.0 + 0.25 * num_ranks * num_x)
    return proposal, rebuild + swaps


def run_chains(
    chains: Sequence[Chain],
    *,
    deadline: float | None,
    steps: int | None,
    mean_atom_cost: float,
    refine: bool = True,
    schedule: Schedule | None = None,
    stop: threading.Event | None = None,
) -> list[Incumbent]:
    """Anneal every chain in its own thread.

    Parameters
    ----------
    deadline
        ``time.perf_counter()`` value to return by; the temperature follows the clock.
    steps
        Proposals per chain instead of a deadline: segments of doubling length, each from the incumbent, so that the
        work of a smaller budget is a prefix of that of a larger one (more steps are never worse).
    mean_atom_cost
        Unit of temperature.
    refine
        Whether experts may be swapped too.
    """
    if (deadline is None) == (steps is None):
        raise ValueError("give exactly one of deadline and steps")
    schedule = schedule or Schedule()
    if not refine:
        schedule = replace(schedule, refine_share=0.0)

    def work(chain: Chain) -> Incumbent:
        if steps is not None:
            return _run_steps(chain, steps, mean_atom_cost, schedule, stop)
        assert deadline is not None
        return _run_clock(chain, deadline, mean_atom_cost, schedule, stop)

    if len(chains) == 1:
        return [work(chains[0])]
    with ThreadPoolExecutor(len(chains)) as pool:
        return list(pool.map(work, chains))


def _start(chain: Chain) -> Incumbent:
    return Incumbent(chain.score(), chain.state.cell_of.copy(), chain.rank_of.copy())


def _run_clock(
    chain: Chain, deadline: float, unit: float, schedule: Schedule, stop: threading.Event | None
) -> Incumbent:
    best = _start(chain)
    start = time.perf_counter()
    num_experts = chain.problem.demand.shape[2]
    proposal_ns, refine_ns = _work_estimates_ns(chain, schedule)
    anneal_s = refine_s = 0.0
    longest_refine_s = refine_ns * 1e-9
    chunk = max(50, int(_CHUNK_S / (proposal_ns * 1e-9)))
    ratio = schedule.cold / schedule.hot
    while stop is None or not stop.is_set():
        now = time.perf_counter()
        left = deadline - now
        if left <= 0:
            break
        fraction = (now - start) / (deadline - start)
        temperature = unit * schedule.hot * ratio**fraction
        # a last cold refinement closes the run, so it is due once more even when its share is used up
        due = refine_s < schedule.refine_share * (anneal_s + refine_s)
        if schedule.refine_share and due and left > 2.0 * longest_refine_s:
            chain.refine(temperature, schedule.refine_depth * num_experts)
            spent = time.perf_counter() - now
            refine_s += spent
            longest_refine_s = max(spent, 0.5 * longest_refine_s)
        else:
            best.num_scored += chain.anneal(temperature, chunk, schedule.moves)
            spent = time.perf_counter() - now
            anneal_s += spent
            if spent > 2 * _CHUNK_S and chunk > 50:
                chunk //= 2
        if fraction > 0.5:
            best.offer(chain)
    best.offer(chain)
    return best


def _run_steps(chain: Chain, steps: int, unit: float, schedule: Schedule, stop: threading.Event | None) -> Incumbent:
    """Whole pieces only, and offers only between pieces: a smaller budget is a prefix of a larger one."""
    best = _start(chain)
    num_experts = chain.problem.demand.shape[2]
    proposal_ns, refine_ns = _work_estimates_ns(chain, schedule)
    share = schedule.refine_share
    period = max(200, int(refine_ns / proposal_ns * (1.0 - share) / share)) if share else _FIRST_SEGMENT
    done = 0
    length = _FIRST_SEGMENT
    hot = schedule.hot
    since_refine = 0
    while True:
        piece = min(period, length // 16)
        for position in range(0, length, piece):
            if done + piece > steps or (stop is not None and stop.is_set()):
                return best
            temperature = unit * hot * (schedule.cold / hot) ** (position / length)
            best.num_scored += chain.anneal(temperature, piece, schedule.moves)
            done += piece
            since_refine += piece
            if share and since_refine >= period:
                chain.refine(temperature, schedule.refine_depth * num_experts)
                since_refine = 0
            best.offer(chain)
        chain.copy_from(best.cell_of, best.rank_of)
        length *= 2
        hot = schedule.reheat
