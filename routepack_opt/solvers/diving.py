"""Diving on column-generation patterns: fix what the master likes, price again for the rest, repeat.

Every dive asks one question: do ``goal`` bins suffice? A node fails when the bound of the rest exceeds the bins left;
then the last decision is taken back, and a pattern that failed alone is forbidden for the rest of the dive. At every
node a short exchange search tries to finish the rest at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers import bin_exchange, bin_packing
from routepack_opt.solvers.column_generation import TOLERANCE, ColumnGeneration

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH_SHARE = 0.08  # share of the remaining bins fixed at once while the bound allows it
SURE = 0.6  # master values above this may be fixed in a batch
MAX_FAILURES = 8  # forbidden patterns before a dive is given up
NODE_ROUNDS = 30  # pricing rounds a node
EXCHANGE_STEPS = 250  # tabu steps of the finishing search at a node


@dataclass
class Dive:
    """One dive from the root; ``noise`` > 0 perturbs the choice of patterns so that restarts differ."""

    problem: ColumnGeneration
    goal: int
    rng: np.random.Generator
    deadline_s: float
    noise: float = 0.0
    fixed: list[NDArray[np.int64]] = field(default_factory=list)
    forbidden: set[int] = field(default_factory=set)

    def run(self) -> list[NDArray[np.int64]] | None:
        """Bins as lists of types (positions in ``problem.lengths``, repeated), or None."""
        problem = self.problem
        demand = problem.counts.copy()
        try:
            return self._descend(demand)
        finally:
            for column in self.forbidden:
                problem.master.set_upper(problem.num_swaps + column, float("inf"))
            problem.set_demand(problem.counts)

    def _descend(self, demand: NDArray[np.int64]) -> list[NDArray[np.int64]] | None:
        problem = self.problem
        undo: tuple[NDArray[np.int64], int, list[int]] | None = None
        single = False
        while time.perf_counter() < self.deadline_s:
            left = self.goal - len(self.fixed)
            if not demand.any():
                return self.fixed
            problem.set_demand(demand)
            node = problem.generate(goal=left, deadline_s=self.deadline_s, max_rounds=NODE_ROUNDS, enough=left - 0.5)
            if not node.values.size:
                return None  # out of time
            if node.value > left + TOLERANCE:
                if undo is None or len(self.forbidden) >= MAX_FAILURES:
                    return None
                demand, num_fixed, batch = undo
                del self.fixed[num_fixed:]
                if len(batch) == 1:
                    problem.master.set_upper(problem.num_swaps + batch[0], 0.0)
                    self.forbidden.add(batch[0])
                single = True
                undo = None if len(batch) == 1 else (demand, num_fixed, batch)
                if len(batch) == 1:
                    continue
                problem.set_demand(demand)
                node = problem.generate(goal=left, deadline_s=self.deadline_s, max_rounds=NODE_ROUNDS)
                if not node.values.size:
                    return None
            finished = self._finish(demand, left)
            if finished is not None:
                return self.fixed + finished
            batch = self._choose(node.values, left, single=single)
            if not batch:
                return None
            single = False
            undo = (demand.copy(), len(self.fixed), batch)
            for column in batch:
                for _ in range(max(1, int(node.values[column] + TOLERANCE))):
                    bin_ = take_pattern(*problem.patterns[column], demand, problem)
                    if bin_.size:
                        self.fixed.append(bin_)
        return None

    def _choose(self, values: NDArray[np.float64], left: int, *, single: bool) -> list[int]:
        """Columns to fix: those at 1 or more, then the largest values."""
        score = values + (self.rng.normal(0.0, self.noise, values.size) if self.noise else 0.0)
        score[values < TOLERANCE] = -1.0
        if self.forbidden:
            score[list(self.forbidden)] = -1.0
        order = np.argsort(-score, kind="stable")[: max(1, int(BATCH_SHARE * left))]
        if score[order[0]] < 0:
            return []
        if single:
            return [int(order[0])]
        return [int(j) for at, j in enumerate(order) if at == 0 or (values[j] >= SURE and score[j] > 0)]

    def _finish(self, demand: NDArray[np.int64], left: int) -> list[NDArray[np.int64]] | None:
        """Pack the rest into ``left`` bins by heuristics alone."""
        types = np.repeat(np.arange(demand.size), demand)
        lengths = self.problem.lengths[types]
        if int(lengths.sum()) > left * self.problem.cap:
            return None
        sizes = np.ones_like(lengths) if self.problem.sizes is None else self.problem.sizes[types]
        limit = self.problem.max_size if self.problem.sizes is not None else bin_packing.NO_LIMIT
        found = bin_exchange.fill_and_exchange(
            lengths, sizes, self.problem.cap, left, max_count=limit, rng=self.rng, steps=EXCHANGE_STEPS, skip=0.0
        )
        if found is None:
            return None
        return [types[found == b] for b in range(left) if (found == b).any()]


def take_pattern(
    index: NDArray[np.int64], copies: NDArray[np.int64], demand: NDArray[np.int64], problem: ColumnGeneration
) -> NDArray[np.int64]:
    """One bin after a pattern, taken off ``demand``: a slot whose type is used up takes the next shorter length left.

    Room that this leaves is filled with the longest lengths that fit.
    """
    lengths = problem.lengths
    sizes = np.zeros_like(lengths) if problem.sizes is None else problem.sizes
    taken: list[int] = []
    room, level = problem.cap, problem.max_size

    def take(candidates: NDArray[np.int64]) -> bool:
        nonlocal room, level
        legal = candidates[(demand[candidates] > 0) & (lengths[candidates] <= room) & (sizes[candidates] <= level)]
        if not legal.size:
            return False
        chosen = int(legal[0])
        taken.append(chosen)
        demand[chosen] -= 1
        room -= int(lengths[chosen])
        level -= int(sizes[chosen])
        return True

    for slot in np.sort(np.repeat(index, copies)).tolist():
        take(np.arange(slot, lengths.size))
    while take(np.arange(lengths.size)):
        pass
    return np.array(taken, dtype=np.int64)
