"""What an annealing run does with its budget: temperatures by meaning, cycles, shares of the kinds of work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routepack_opt.solvers.annealing.chain import DEFAULT_MOVES, SMALL_MOVES

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.chain import Chain
    from routepack_opt.solvers.annealing.sample_moves import Moves

_MAX_CYCLES = 1000
_FEW_ATOMS = 64


@dataclass(frozen=True)
class Schedule:
    """Temperatures are shares of the mean cost of one atom (total J / n): what a move is worth at most.

    Parameters
    ----------
    hot, cold
        First and last temperature of a cycle.
    cycle_proposals
        Proposals after which a cycle may start anew; a run has as many whole cycles as its budget holds, at least one.
    refine_share
        Share of the time given to expert swaps (co-refinement).
    refine_depth
        Swap proposals per expert and layer in one refinement.
    smooth_until
        Part of a cycle whose refinements anneal on a smooth stand-in for the maximum; the rest see the maximum.
    smooth_temperature
        Temperature of those, as a share of the cycle's.
    moves
        Shares of the kinds of sample moves.
    spreads
        Share of the energy that is the mean over shards (see :mod:`.energy`), cycle by cycle in turn: a large one
        finds good layouts fast, a small one the last of the slowest shard where there are cycles to spare.
    num_levels
        Most temperatures between which the population meets: statistics, and resampling where it is on.
    resample
        Systematic resampling of the members between levels (routepack.md section 6). Off by default: with the few
        members a step budget allows, independent members end lower (docs/annealing.md).
    """

    hot: float = 1e-2
    cold: float = 1.5e-4
    cycle_proposals: int = 2**62
    refine_share: float = 0.35
    refine_depth: int = 64
    smooth_until: float = 0.9
    smooth_temperature: float = 0.3
    moves: Moves = DEFAULT_MOVES
    spreads: tuple[float, ...] = (0.5, 0.1)
    num_levels: int = 32
    resample: bool = False

    @classmethod
    def for_size(cls, num_atoms: int, num_cells: int) -> Schedule:
        """Few atoms mean a rugged landscape and budget to spare: hotter, shorter, repeated cycles.

        Measured on proved optima of 16 atoms and on windows of 173 to 512 atoms; between them powers of n.
        """
        base = cls()
        n = float(max(1, num_atoms))
        return replace(
            base,
            hot=min(0.3, max(base.hot, 1.6 / n)),
            cold=max(base.cold, 0.5 / n**2),
            cycle_proposals=max(500, int(0.25 * n**3 * num_cells)),
            # with few atoms in a cell a cap blocks most swaps: relocations connect the layouts. Swaps of whole cells
            # help as much, but their kernel would add a quarter to the compile time of every user
            moves=SMALL_MOVES if num_atoms <= _FEW_ATOMS else base.moves,
        )

    def without_refinement(self) -> Schedule:
        """The same with the placement fixed."""
        return replace(self, refine_share=0.0)

    def num_cycles(self, num_proposals: float) -> int:
        """Whole cycles of a run of so many proposals."""
        return int(max(1, min(_MAX_CYCLES, num_proposals // self.cycle_proposals)))

    def spread(self, cycle: int) -> float:
        """Of the given cycle."""
        return self.spreads[cycle % len(self.spreads)]

    @staticmethod
    def within_cycle(fraction: float, num_cycles: int) -> float:
        """Part of the current cycle that is over, in [0, 1)."""
        position = fraction * num_cycles
        return position - int(position)

    def smooth(self, fraction: float, num_cycles: int) -> bool:
        """Whether a refinement at this point of the run uses the smooth stand-in."""
        return self.within_cycle(fraction, num_cycles) < self.smooth_until

    def temperature(self, fraction: float, num_cycles: int, unit: float) -> float:
        """Temperature in energy units when ``fraction`` of the run is over; ``unit`` is the mean cost of an atom."""
        return float(unit * self.hot * (self.cold / self.hot) ** self.within_cycle(fraction, num_cycles))


def work_estimates_ns(chain: Chain, schedule: Schedule) -> tuple[float, float]:
    """Rough cost of one proposal and of one refinement: sets chunk sizes and, in step mode, their ratio."""
    n, num_layers, num_experts = chain.problem.demand.shape
    num_ranks, lanes = chain.loads.shape[1], chain.loads.shape[2]
    num_x = chain.state.costs.shape[0]
    proposal = 60.0 + 0.12 * num_ranks * lanes
    rebuild = 1.4 * n * num_layers * num_experts
    swaps = num_layers * num_experts * schedule.refine_depth * (30.0 + 0.25 * num_ranks * num_x)
    return proposal, rebuild + swaps
