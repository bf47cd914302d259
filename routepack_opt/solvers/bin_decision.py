"""One question, answered as hard as time allows: do ``goal`` bins suffice?

The answer is a packing, a certificate that more are needed, or nothing. Exchanges are tried first, then column
generation bounds the problem and dives alternate with longer exchanges.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers import bin_exchange, bin_packing
from routepack_opt.solvers.bin_reduction import fix_bins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.solvers.bounds import Certificate
    from routepack_opt.solvers.column_generation import ColumnGeneration

DIVE_NOISE = 0.1  # spread of the perturbation of master values in restarted dives
ROUND_STEPS = 400  # tabu steps of one exchange round


@dataclass(frozen=True)
class Decision:
    """``bin_of`` int64 [n] when the goal was reached, ``refutation`` when it is impossible, both None when open."""

    bin_of: NDArray[np.int64] | None = None
    refutation: Certificate | None = None


def quick_pack(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    cap: int,
    goal: int,
    *,
    max_count: int,
    rng: np.random.Generator,
    steps: int,
    rounds: int = 1,
) -> NDArray[np.int64] | None:
    """Subset filling towards ``goal`` bins, repaired by a fixed number of exchange steps."""
    bin_of = bin_packing.fill(lengths, counts, cap, max_bins=lengths.size, goal=goal, max_count=max_count, rng=rng)
    if bin_of is None or int(bin_of.max()) < goal:
        return bin_of
    return bin_exchange.exchange(
        lengths,
        counts,
        bin_of,
        cap,
        num_bins=goal,
        max_count=max_count,
        rng=rng,
        max_rounds=rounds,
        steps_per_round=steps,
    )


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
        Most samples a bin; the proof does not use it, dives whose bins exceed it are dropped.
    deadline_s
        On the clock of ``time.perf_counter``.
    """
    fixed, left = ([], np.arange(lengths.size)) if max_count < bin_packing.NO_LIMIT else fix_bins(lengths, cap)
    rest, rest_goal = lengths[left], goal - len(fixed)
    if not left.size:
        return Decision(_join(fixed, left, None, lengths.size)) if rest_goal >= 0 else Decision()
    root = _root(rest, cap, rest_goal, rng)
    if root is None:
        return Decision()
    outcome = root.generate(goal=rest_goal, deadline_s=deadline_s, max_rounds=2**31)
    if root.best_bound > rest_goal:
        return Decision(refutation=_refute(root, lengths, cap, goal, deadline_s, rng))
    if not np.isfinite(outcome.value):
        return Decision()
    found = _search(root, rest, counts[left], rest_goal, max_count, deadline_s, rng)
    return Decision(None if found is None else _join(fixed, left, found, lengths.size))


def _root(lengths: NDArray[np.int64], cap: int, goal: int, rng: np.random.Generator) -> ColumnGeneration | None:
    """Column generation started from the patterns of two subset fillings; None when its table would not fit."""
    from routepack_opt.solvers.column_generation import ColumnGeneration, patterns_of

    distinct, number = distinct_lengths(lengths)
    if not ColumnGeneration.is_affordable(distinct, number, cap):
        return None
    types = np.searchsorted(-distinct, -lengths)
    ones = np.ones(lengths.size, dtype=np.int64)
    first = bin_packing.fill(lengths, ones, cap, max_bins=lengths.size, goal=goal, rng=rng)
    second = bin_packing.fill(lengths, ones, cap, max_bins=lengths.size, goal=0, skip=0.1, rng=rng)
    assert first is not None and second is not None, "every length fits a bin of its own"
    root = ColumnGeneration(distinct, number, cap, patterns_of(first, types, distinct.size))
    root.add(patterns_of(second, types, distinct.size))
    return root


def _refute(
    root: ColumnGeneration, lengths: NDArray[np.int64], cap: int, goal: int, deadline_s: float, rng: np.random.Generator
) -> Certificate | None:
    """Integer certificate over all lengths that more than ``goal`` bins are needed, given a root that says so."""
    if root.demand.sum() == lengths.size:
        certificate = root.certificate()
        return certificate if certificate.bins > goal else None
    # The root saw the reduced problem; its patterns make the full one converge in a few rounds.
    full = _root(lengths, cap, goal, rng)
    if full is None:
        return None
    full.add(root.pool_for(full.lengths))
    full.generate(goal=goal, deadline_s=deadline_s, max_rounds=2**31)
    certificate = full.certificate()
    return certificate if certificate.bins > goal else None


def _search(
    root: ColumnGeneration,
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    goal: int,
    max_count: int,
    deadline_s: float,
    rng: np.random.Generator,
) -> NDArray[np.int64] | None:
    """Dives and exchange rounds by turns until the deadline."""
    from routepack_opt.solvers.diving import Dive

    attempt = 0
    while time.perf_counter() < deadline_s:
        bins = Dive(root, goal, rng, deadline_s, noise=DIVE_NOISE * min(attempt, 1)).run()
        if bins is not None:
            found = _to_items(bins, lengths, root.lengths)
            if np.bincount(found, counts).max() <= max_count:
                return found
        attempt += 1
        start = bin_packing.fill(
            lengths, counts, root.cap, max_bins=lengths.size, goal=goal, max_count=max_count, skip=0.1, rng=rng
        )
        if start is None or int(start.max()) < goal:
            return start
        exchanged = bin_exchange.exchange(
            lengths,
            counts,
            start,
            root.cap,
            num_bins=goal,
            max_count=max_count,
            rng=rng,
            max_rounds=2,
            steps_per_round=ROUND_STEPS,
        )
        if exchanged is not None:
            return exchanged
    return None


def _to_items(
    bins: list[NDArray[np.int64]], lengths: NDArray[np.int64], distinct: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bins of types -> bin of each item (equal lengths are interchangeable)."""
    types = np.concatenate(bins)
    bin_of = np.repeat(np.arange(len(bins)), [b.size for b in bins])
    # Items come in decreasing length, as do the types: the k-th slot in type order takes the k-th item.
    order = np.argsort(types, kind="stable")
    found = np.empty(lengths.size, dtype=np.int64)
    found[:] = bin_of[order]
    return found


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


def distinct_lengths(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct lengths, decreasing, and how often each occurs."""
    distinct, number = np.unique(lengths, return_counts=True)
    return distinct[::-1].astype(np.int64), number[::-1].astype(np.int64)
