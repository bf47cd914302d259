"""The rows problem: the least number of rows a window needs, with a proof.

A row is one cell for every DP rank; a cell holds at most ``cap`` tokens and is never empty. With ``bins`` the least
number of cells, ``ceil(bins / D)`` rows are needed, rounded up to the pipeline's demands, and so many are enough when
there are as many atoms as cells. The ladder climbs from cheap bounds and heuristics to column generation and stops as
soon as both meet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import Infeasible, dummy_samples_needed
from routepack_opt.models.rows_layout import Sorted, arrange, group_layout, packings, to_cells
from routepack_opt.solvers import bin_exchange, bin_packing, bounds, pattern_enumeration, pricing
from routepack_opt.solvers.bin_decision import decide, quick_pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_EQUAL_FILLS = 3  # randomised subset fillings tried when every rank needs equally many samples
EXCHANGE_WORK = 100_000  # atoms x tabu steps of one exchange search, a few milliseconds
EXCHANGE_STARTS = 3  # exchange searches, each from another filling, before column generation


@dataclass(frozen=True)
class RowsProblem:
    """How many rows does a window need?

    Parameters
    ----------
    tokens
        int64 [n], padded tokens of each atom (a sample, or an atomic group of samples); one over the cap fills a cell
        alone.
    samples
        int64 [n], samples in each atom (all 1 without groups).
    num_ranks
        DP ranks D.
    cap
        Most tokens in a cell.
    min_rows, row_multiple
        Least row count, and what the row count must be a multiple of.
    max_samples_per_cell
        Most samples in a cell.
    equal_samples_per_rank
        Every DP rank holds the same number of samples.
    rank_groups
        int64 [n]; atoms with equal value share a DP rank.
    """

    tokens: NDArray[np.int64]
    samples: NDArray[np.int64]
    num_ranks: int
    cap: int
    min_rows: int = 1
    row_multiple: int = 1
    max_samples_per_cell: int | None = None
    equal_samples_per_rank: bool = False
    rank_groups: NDArray[np.int64] | None = None

    def rows_for(self, num_bins: int) -> int:
        """Least allowed row count with at least ``num_bins`` cells."""
        rows = max(-(-num_bins // self.num_ranks), self.min_rows)
        return -(-rows // self.row_multiple) * self.row_multiple


@dataclass(frozen=True)
class RowsResult:
    """A layout and what is proved of its row count.

    Attributes
    ----------
    rows, lower_bound
        Rows used, and the proved least number.
    status
        "certified" (the certificate meets ``rows``), "solver-proved" or "best-known".
    rung
        What closed it: "volume", "count", "l2", "dff", "column-generation", "mip", or "" when open.
    certificate
        ``certificates.rows`` of plan.json.
    cells
        R * D cells, index r * D + d, sorted atom indices.
    """

    rows: int
    lower_bound: int
    status: str
    rung: str
    certificate: dict[str, Any]
    cells: list[list[int]]


def solve_rows(problem: RowsProblem, *, time_limit_s: float = 0.05, seed: int = 0) -> RowsResult:
    """Find the least number of rows, a layout with so many, and a proof.

    The rungs up to randomised subset filling do a fixed amount of work whatever the time limit, so with
    ``time_limit_s=0`` the answer depends on the problem and the seed alone.

    Raises
    ------
    Infeasible
        When the window has too few samples for the rows it needs; says how many dummy samples would do.
    """
    return _Ladder(problem, time_limit_s, seed).climb()


@dataclass
class _Ladder:
    problem: RowsProblem
    time_limit_s: float
    seed: int
    start_s: float = field(default_factory=time.perf_counter)
    solver: tuple[str, str] | None = None
    solver_bins: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.atoms = Sorted.of(self.problem)
        limit = self.problem.max_samples_per_cell
        if limit is not None and int(self.problem.samples.max()) > limit:
            worst = int(np.argmax(self.problem.samples))
            held = int(self.problem.samples[worst])
            raise Infeasible(f"atomic group {worst} holds {held} samples, max_samples_per_cell is {limit}")
        regular = self.atoms.tokens[self.atoms.num_alone :]
        self.lengths, self.counts = (x.astype(np.int64) for x in np.unique(regular, return_counts=True))
        self.best = bounds.volume_bound(self.lengths, self.counts, self.problem.cap)
        self.group_rows = _rows_of_rank_groups(self.problem)
        if limit is not None:
            self._raise_bound(self._count_bound(limit))

    @property
    def lower_bound(self) -> int:
        """Proved least number of rows."""
        return self._rows_for(max(self.best.bins, self.solver_bins))

    def _rows_for(self, num_bins: int) -> int:
        """Rows that so many bins of atoms within the cap need, with everything else that is known."""
        num_bins = max(num_bins + self.atoms.num_alone, self.group_rows * self.problem.num_ranks)
        return self.problem.rows_for(num_bins)

    def time_left_s(self) -> float:
        return self.time_limit_s - (time.perf_counter() - self.start_s)

    def _count_bound(self, limit: int) -> bounds.Certificate:
        # A weight belongs to a length: of atoms of one length, the one with fewest samples speaks for all.
        regular = slice(self.atoms.num_alone, None)
        weights = np.full(self.lengths.size, limit, dtype=np.int64)
        np.minimum.at(weights, np.searchsorted(self.lengths, self.atoms.tokens[regular]), self.atoms.samples[regular])
        kind = "count" if bool((weights == 1).all()) else "dual"
        total = int((weights * self.counts).sum())
        return bounds.Certificate(kind, self.problem.cap, self.lengths, weights, limit, -(-total // limit))

    def _raise_bound(self, certificate: bounds.Certificate | None) -> None:
        if certificate is not None and certificate.bins > self.best.bins:
            self.best = certificate

    def climb(self) -> RowsResult:
        """Climb until the layout meets the bound or time is up."""
        problem = self.problem
        check_enough_samples(problem, self.lower_bound)
        rows = self.lower_bound
        cells = self._cheap(rows)
        if cells is None:
            self._raise_bound(bounds.function_bound(self.lengths, self.counts, problem.cap, above=self.best.bins))
            check_enough_samples(problem, self.lower_bound)
            if self.lower_bound > rows:
                rows = self.lower_bound
                cells = self._cheap(rows)
        while cells is None:
            cells = self._hard(rows)
            if cells is not None:
                break
            rows = max(rows + problem.row_multiple, self.lower_bound)
            check_enough_samples(problem, self.lower_bound)
            if rows * problem.num_ranks > problem.tokens.size:
                break
            cells = self._cheap(rows)
        if cells is None or rows > self.lower_bound:
            ffd = ffd_rows(problem)  # now and then plain FFD has the luck that cleverer packings lack
            if ffd is not None and (cells is None or len(ffd) < rows * problem.num_ranks):
                return self._result(len(ffd) // problem.num_ranks, ffd)
        if cells is None:
            raise self._no_layout(rows)
        return self._result(rows, to_cells(self.atoms, cells, rows * problem.num_ranks))

    def _cheap(self, rows: int) -> NDArray[np.int64] | None:
        """Cells for ``rows`` rows by heuristics with a fixed amount of work."""
        problem, num_cells = self.problem, rows * self.problem.num_ranks
        if problem.rank_groups is not None:
            groups = problem.rank_groups[self.atoms.order]
            even = problem.equal_samples_per_rank
            return group_layout(self.atoms, groups, rows, problem.num_ranks, even=even, rng=self.rng)
        if num_cells == problem.tokens.size:
            return self._deal(rows, np.arange(num_cells, dtype=np.int64))
        # Equal counts are sometimes within reach of one packing and not of another: try several.
        num_random = NUM_EQUAL_FILLS if problem.equal_samples_per_rank else 0
        for bin_of in packings(self.atoms, num_cells, self.rng, num_random=num_random):
            cells = self._deal(rows, bin_of)
            if cells is not None:
                return cells
        return None

    def _hard(self, rows: int) -> NDArray[np.int64] | None:
        """Cells by the rungs that ask whether ``rows`` rows are possible at all; raises the bound when they are not."""
        atoms, regular = self.atoms, slice(self.atoms.num_alone, None)
        goal = rows * self.problem.num_ranks - atoms.num_alone
        if goal < 1 or self.problem.tokens.size == atoms.num_alone:
            return None
        items = (atoms.tokens[regular], atoms.samples[regular], atoms.cap, goal)
        if self.problem.rank_groups is None:
            steps = int(np.clip(EXCHANGE_WORK // self.problem.tokens.size, 30, 150))
            # Past the least row count only a good layout is at stake: one start.
            starts = EXCHANGE_STARTS if rows == self.lower_bound else 1
            found = quick_pack(*items, max_count=atoms.max_samples, rng=self.rng, steps=steps, starts=starts)
            cells = self._deal(rows, found)
            if cells is not None:
                return cells
        if self.time_left_s() <= 0:
            return None
        deadline_s = self.start_s + self.time_limit_s
        decision = decide(*items, max_count=atoms.max_samples, deadline_s=deadline_s, rng=self.rng)
        if decision.refutation is not None:
            self._raise_bound(decision.refutation)
        if decision.solver is not None:
            self.solver, self.solver_bins = decision.solver, goal + 1
        return None if self.problem.rank_groups is not None else self._deal(rows, decision.bin_of)

    def _deal(self, rows: int, regular: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Cells that meet every constraint from bins of all atoms or of those within the cap; None when it fails."""
        problem = self.problem
        if regular is None:
            return None
        bin_of = regular if regular.size == problem.tokens.size else self.atoms.with_alone(regular)
        equal = problem.equal_samples_per_rank
        cells, spread = arrange(self.atoms, bin_of, rows, problem.num_ranks, equal_samples=equal)
        return None if equal and spread > 0 else cells

    def _no_layout(self, rows: int) -> Infeasible:
        problem = self.problem
        if problem.rank_groups is not None:
            missing = problem.num_ranks - np.unique(problem.rank_groups).size
            if missing > 0:
                return dummy_samples_needed(
                    missing * self.lower_bound,
                    f"{problem.num_ranks - missing} rank groups for {problem.num_ranks} DP ranks",
                )
        count = rows * problem.num_ranks - problem.tokens.size
        return dummy_samples_needed(
            count, f"no layout of fewer than {rows} rows was found for {problem.tokens.size} samples"
        )

    def _result(self, rows: int, cells: list[list[int]]) -> RowsResult:
        certificate = self.best.to_json(self.atoms.num_alone)
        rung = {"dual": "column-generation"}.get(self.best.kind, self.best.kind)
        if rows == self._rows_for(self.best.bins):
            return RowsResult(rows, rows, "certified", rung, certificate, cells)
        if self.solver is None:
            return RowsResult(rows, self.lower_bound, "best-known", "", certificate, cells)
        name, version = self.solver
        certificate |= {"kind": "solver", "cells": self.solver_bins + self.atoms.num_alone}
        certificate |= {"solver": name, "version": version}
        closed = rows == self.lower_bound
        status, rung = ("solver-proved", "mip") if closed else ("best-known", "")
        return RowsResult(rows, self.lower_bound, status, rung, certificate, cells)


def _rows_of_rank_groups(problem: RowsProblem) -> int:
    """Rows at least because a rank group has one cell a row: its volume in cells, plus its atoms over the cap."""
    if problem.rank_groups is None:
        return 0
    _, group_of = np.unique(problem.rank_groups, return_inverse=True)
    alone = problem.tokens > problem.cap
    volume = np.zeros(int(group_of.max()) + 1, dtype=np.int64)
    np.add.at(volume, group_of, np.where(alone, 0, problem.tokens))
    return int((-(-volume // problem.cap) + np.bincount(group_of, alone).astype(np.int64)).max())


def check_enough_samples(problem: RowsProblem, rows: int) -> None:
    """Raise Infeasible when R * D cells cannot all be filled, or samples cannot be dealt equally."""
    num_atoms, num_samples, ranks = problem.tokens.size, int(problem.samples.sum()), problem.num_ranks
    missing = max(rows * ranks - num_atoms, 0)
    uneven = problem.equal_samples_per_rank and (num_samples + missing) % ranks
    if not missing and not uneven:
        return
    if uneven:
        missing += ranks - (num_samples + missing) % ranks
        raise dummy_samples_needed(
            missing, f"{num_samples} samples cannot be shared equally by {ranks} DP ranks in {rows} rows"
        )
    raise dummy_samples_needed(missing, f"{num_atoms} samples cannot fill {rows} rows x {ranks} DP ranks")


def ffd_rows(problem: RowsProblem) -> list[list[int]] | None:
    """Plain first-fit decreasing into R * D cells, at the least R where it works: what other packers do.

    Empty cells are filled by splitting. None where no row count works or plain FFD does not meet the constraints.
    """
    atoms = Sorted.of(problem)
    tokens, samples = atoms.tokens[atoms.num_alone :], atoms.samples[atoms.num_alone :]
    regular = bin_packing.fit(tokens, samples, problem.cap, max_bins=max(tokens.size, 1), max_count=atoms.max_samples)
    if regular is None:
        return None
    bin_of = atoms.with_alone(regular)
    rows = problem.rows_for(int(bin_of.max()) + 1)
    while rows * problem.num_ranks <= problem.tokens.size:
        if problem.rank_groups is not None:
            groups = problem.rank_groups[atoms.order]
            even = problem.equal_samples_per_rank
            cells = group_layout(atoms, groups, rows, problem.num_ranks, even=even, rng=np.random.default_rng(0))
            if cells is not None:
                return to_cells(atoms, cells, rows * problem.num_ranks)
        else:
            cells, spread = arrange(
                atoms, bin_of, rows, problem.num_ranks, equal_samples=problem.equal_samples_per_rank
            )
            if not problem.equal_samples_per_rank or spread == 0:
                return to_cells(atoms, cells, rows * problem.num_ranks)
        rows += problem.row_multiple
    return None


def pack_into(problem: RowsProblem, rows: int, *, seed: int) -> list[list[int]] | None:
    """Another layout with ``rows`` rows, drawn at random; None when the draws fail.

    Alternates randomised best fit over a shuffled order (varied, needs slack) and randomised subset filling (tight).
    """
    rng = np.random.default_rng(seed)
    atoms = Sorted.of(problem)
    num_cells = rows * problem.num_ranks
    if num_cells > problem.tokens.size:
        return None
    if problem.rank_groups is not None:
        groups = problem.rank_groups[atoms.order]
        found = group_layout(atoms, groups, rows, problem.num_ranks, even=problem.equal_samples_per_rank, rng=rng)
        return None if found is None else to_cells(atoms, found, num_cells)
    tokens, samples = atoms.tokens[atoms.num_alone :], atoms.samples[atoms.num_alone :]
    room = num_cells - atoms.num_alone
    for attempt in range(4):
        if attempt == 0:
            noise = np.exp(rng.normal(0.0, 0.15, tokens.size))
            order = np.argsort(-tokens * noise, kind="stable")
            rule = bin_packing.BEST_FIT if seed % 2 else bin_packing.LEAST_LOADED
            shuffled = bin_packing.fit(
                tokens[order],
                samples[order],
                problem.cap,
                max_bins=max(room, 1),
                max_count=atoms.max_samples,
                rule=rule,
            )
            bins = None
            if shuffled is not None:
                bins = np.empty_like(shuffled)
                bins[order] = shuffled
        else:
            bins = bin_packing.fill(
                tokens,
                samples,
                problem.cap,
                max_bins=max(room, 1),
                max_count=atoms.max_samples,
                skip=0.1 * attempt,
                rng=rng,
            )
        if bins is None:
            continue
        bin_of = atoms.with_alone(bins)
        cells, spread = arrange(atoms, bin_of, rows, problem.num_ranks, equal_samples=problem.equal_samples_per_rank)
        if not problem.equal_samples_per_rank or spread == 0:
            return to_cells(atoms, cells, num_cells)
    return None


def warmup() -> None:
    """Compile every kernel the ladder uses."""
    bounds.warmup()
    bin_packing.warmup()
    bin_exchange.warmup()
    pricing.warmup()
    pattern_enumeration.warmup()
