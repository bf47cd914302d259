"""One question, answered as hard as time allows: do ``goal`` bins suffice?

The answer is a packing, a certificate that more are needed, a solver's word that more are needed, or nothing. Bins that
some optimal packing has are fixed first; column generation bounds the rest; then dives, the exact program over all
patterns that can still matter, and exchanges look for a packing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers import bin_exchange, bin_packing
from routepack_opt.solvers.bin_reduction import fix_bins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.solvers.bounds import Certificate
    from routepack_opt.solvers.column_generation import ColumnGeneration

BOUND_MARGIN = 1e-7  # a floating-point bound this close above the goal is not worth an integer check
DIVE_NOISE = 0.1  # spread of the perturbation of master values in restarted dives
FILL_SKIP = 0.1  # chance that a randomised subset filling passes over an item
FIRST_STARTS = 6  # exchange searches before column generation
WORK = 200_000  # items x tabu steps of one exchange search, about 10 ms
MAX_EXACT_ITEMS = 600  # items up to which all patterns are enumerated
MIN_EXACT_S = 2.0  # enumerating patterns alone may take one
EXACT_SHARE = 0.8  # share of the time left that the exact program may take


@dataclass(frozen=True)
class Decision:
    """The answer: a packing, a refutation, or neither.

    Attributes
    ----------
    bin_of
        int64 [n] when ``goal`` bins suffice.
    refutation
        Integer certificate that they do not.
    solver
        (name, version) of a solver that says they do not, where no certificate could be found.
    """

    bin_of: NDArray[np.int64] | None = None
    refutation: Certificate | None = None
    solver: tuple[str, str] | None = None


def quick_pack(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    goal: int,
    *,
    max_count: int,
    rng: np.random.Generator,
    steps: int,
    starts: int,
    randomised: bool = False,
    deadline_s: float = float("inf"),
) -> NDArray[np.int64] | None:
    """Subset filling towards ``goal`` bins, repaired by exchanges: ``starts`` times a fixed number of steps.

    Restarts beat longer searches: the filling decides the large items. All fillings but the first are ``randomised``.
    """
    for start in range(starts):
        if start and time.perf_counter() > deadline_s:
            return None
        skip = FILL_SKIP if randomised or start else 0.0
        found = bin_exchange.fill_and_exchange(
            lengths, counts, cap, goal, max_count=max_count, rng=rng, steps=steps, skip=skip
        )
        if found is not None:
            return found
    return None


def decide(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    goal: int,
    *,
    max_count: int,
    deadline_s: float,
    rng: np.random.Generator,
) -> Decision:
    """Pack the items into ``goal`` bins or prove that it cannot be done.

    Parameters
    ----------
    lengths, counts
        int64 [n] in decreasing length, each <= cap, and the samples of each.
    max_count
        Most samples a bin.
    deadline_s
        On the clock of ``time.perf_counter``.
    """
    unit = int(np.gcd.reduce(lengths))
    if unit > 1:  # padded lengths share a factor: the smaller problem is the same one
        small = decide(lengths // unit, counts, cap // unit, goal, max_count=max_count, deadline_s=deadline_s, rng=rng)
        if small.refutation is None:
            return small
        grown = replace(small.refutation, cap=cap, lengths=small.refutation.lengths * unit)
        return replace(small, refutation=grown)
    # A limit that no bin within the capacity can reach is none, and bins may be fixed by length alone.
    limited = max_count < int(cap // lengths[-1]) * int(counts.max())
    max_count = max_count if limited else bin_packing.NO_LIMIT
    fixed, left = ([], np.arange(lengths.size)) if limited else fix_bins(lengths, cap)
    rest_goal = goal - len(fixed)
    if not left.size and rest_goal >= 0:
        return Decision(_join(fixed, left, None, lengths.size))
    whole = _Rest(lengths, counts, cap, goal, max_count, deadline_s, rng)
    if rest_goal < 1:
        return Decision(refutation=whole.refute(None))
    rest = _Rest(lengths[left], counts[left], cap, rest_goal, max_count, deadline_s, rng) if fixed else whole
    found = rest.exchanges()
    if found is not None:
        return Decision(_join(fixed, left, found, lengths.size))
    root = rest.new_root()
    if root is not None:
        outcome = root.generate(goal=rest_goal, deadline_s=deadline_s, max_rounds=2**31)
        if root.best_bound > rest_goal + BOUND_MARGIN:
            refutation = whole.refute(root)
            if refutation is not None:
                return Decision(refutation=refutation)
        if not np.isfinite(outcome.value):
            return Decision()
    found, solver = rest.search(root)
    return Decision(None if found is None else _join(fixed, left, found, lengths.size), None, solver)


@dataclass(frozen=True)
class _Rest:
    """The items that are not fixed yet and the bins left for them."""

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    cap: int
    goal: int
    max_count: int
    deadline_s: float
    rng: np.random.Generator

    def new_root(self) -> ColumnGeneration | None:
        """Column generation from the patterns of two subset fillings; None when its table would not fit."""
        from routepack_opt.solvers.column_generation import ColumnGeneration, patterns_of

        distinct, number = distinct_lengths(self.lengths)
        types = np.searchsorted(-distinct, -self.lengths)
        sizes, max_size = self._sizes(types, distinct.size), self.max_count
        left_s = self.deadline_s - time.perf_counter()
        if sizes is None or not ColumnGeneration.is_affordable(distinct, number, self.cap, left_s, max_size):
            sizes, max_size = None, 0  # without the limit the bound is weaker, not wrong
        if not ColumnGeneration.is_affordable(distinct, number, self.cap, left_s):
            return None
        starts = []
        for goal, skip in ((self.goal, 0.0), (0, FILL_SKIP)):
            bin_of = bin_packing.fill(
                self.lengths,
                self.counts,
                self.cap,
                max_bins=self.lengths.size,
                goal=goal,
                max_count=self.max_count,
                skip=skip,
                rng=self.rng,
            )
            assert bin_of is not None, "every item fits a bin of its own"
            starts.append(patterns_of(bin_of, types, distinct.size))
        root = ColumnGeneration(distinct, number, self.cap, starts[0], sizes=sizes, max_size=max_size)
        root.add(starts[1])
        return root

    def _sizes(self, types: NDArray[np.int64], num_types: int) -> NDArray[np.int64] | None:
        """Fewest samples of an item of each length (what a bound may count on), None without a limit."""
        if self.max_count >= bin_packing.NO_LIMIT:
            return None
        sizes = np.full(num_types, self.max_count, dtype=np.int64)
        np.minimum.at(sizes, types, self.counts)
        return sizes

    def refute(self, root: ColumnGeneration | None) -> Certificate | None:
        """Integer certificate that these items need more bins; ``root`` may know a part of them."""
        if root is None or root.demand.sum() != self.lengths.size:
            # The patterns of the reduced problem make the whole one converge in a few rounds.
            whole = self.new_root()
            if whole is None:
                return None
            if root is not None:
                whole.add(root.pool_for(whole.lengths))
            whole.generate(goal=self.goal, deadline_s=self.deadline_s, max_rounds=2**31)
            root = whole
        certificate = root.certificate()
        return certificate if certificate.bins > self.goal else None

    def search(self, root: ColumnGeneration | None) -> tuple[NDArray[np.int64] | None, tuple[str, str] | None]:
        """A packing, or the solver that says there is none; dives and exchanges by turns until the deadline."""
        attempt = 0
        while time.perf_counter() < self.deadline_s:
            if root is not None:
                found = self._dive(root, DIVE_NOISE * min(attempt, 1))
                if found is None and attempt == 0 and self._has_time_for_exact():
                    found, solver = self._exact(root)
                    if solver is not None:
                        return None, solver
                if found is not None:
                    return found, None
            exchanged = self.exchanges()
            if exchanged is not None:
                return exchanged, None
            attempt += 1
        return None, None

    def exchanges(self) -> NDArray[np.int64] | None:
        """A packing by randomised fillings and exchanges, a fixed amount of work."""
        return quick_pack(
            self.lengths,
            self.counts,
            self.cap,
            self.goal,
            max_count=self.max_count,
            rng=self.rng,
            steps=int(np.clip(WORK // self.lengths.size, 30, 200)),
            starts=FIRST_STARTS,
            randomised=True,
            deadline_s=self.deadline_s,
        )

    def _dive(self, root: ColumnGeneration, noise: float) -> NDArray[np.int64] | None:
        from routepack_opt.solvers.diving import Dive

        return self._to_items(Dive(root, self.goal, self.rng, self.deadline_s, noise=noise).run())

    def _has_time_for_exact(self) -> bool:
        left_s = self.deadline_s - time.perf_counter()
        return self.lengths.size <= MAX_EXACT_ITEMS and left_s > MIN_EXACT_S

    def _exact(self, root: ColumnGeneration) -> tuple[NDArray[np.int64] | None, tuple[str, str] | None]:
        """Branch and cut over every pattern that a packing into ``goal`` bins can use, where they are few."""
        from routepack_opt.solvers import highs
        from routepack_opt.solvers.diving import take_pattern
        from routepack_opt.solvers.pattern_enumeration import enumerate_patterns

        root.generate(goal=self.goal, deadline_s=self.deadline_s, max_rounds=2**31, settle=False)
        weights, heaviest = root.integer_prices()
        columns = enumerate_patterns(root.lengths, root.counts, weights, self.cap, max_cell=heaviest, goal=self.goal)
        if columns is None:
            return None, None
        limit_s = EXACT_SHARE * (self.deadline_s - time.perf_counter())
        answer, used = highs.cover_with_patterns(columns, root.counts, self.goal, limit_s)
        if answer == "impossible":
            return None, ("HiGHS", highs.version())
        if answer == "open":
            return None, None
        demand, bins = root.counts.copy(), []
        for j in np.repeat(np.arange(columns.num), used).tolist():
            span = slice(int(columns.starts[j]), int(columns.starts[j + 1]))
            copies = columns.value[span].astype(np.int64)
            bins.append(take_pattern(columns.index[span], copies, demand, root))
        return self._to_items([b for b in bins if b.size]), None

    def _to_items(self, bins: list[NDArray[np.int64]] | None) -> NDArray[np.int64] | None:
        """Bins of types -> bin of each item; None when a bin holds too many samples."""
        if bins is None:
            return None
        types = np.concatenate(bins)
        bin_of = np.repeat(np.arange(len(bins)), [b.size for b in bins])
        # Items and types both come in decreasing length: the k-th slot in type order takes the k-th item.
        found = bin_of[np.argsort(types, kind="stable")].astype(np.int64)
        return found if np.bincount(found, self.counts).max() <= self.max_count else None


def distinct_lengths(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct lengths, decreasing, and how often each occurs."""
    distinct, number = np.unique(lengths, return_counts=True)
    return distinct[::-1].astype(np.int64), number[::-1].astype(np.int64)


def _join(
    fixed: list[list[int]], left: NDArray[np.int64], found: NDArray[np.int64] | None, num_items: int
) -> NDArray[np.int64]:
    """Put fixed bins behind the bins of the rest."""
    bin_of = np.empty(num_items, dtype=np.int64)
    used = 0
    if found is not None and found.size:
        bin_of[left] = found
        used = int(found.max()) + 1
    for k, items in enumerate(fixed):
        bin_of[items] = used + k
    return bin_of
