"""Gilmore-Gomory column generation for bin packing: the strongest practical lower bound, and the patterns to dive on.

The master covers the demand of every distinct length with patterns; the pricer proposes patterns under its dual
prices. Prices smoothed towards the best known ones (Pessoa, Sadykov, Uchoa and Vanderbeck 2018) and free swap columns
that let a slot of one length serve the next shorter length (Valerio de Carvalho 2005) keep the prices from swinging.
After every pricing round, prices divided by the value of the best pattern are feasible (Farley 1990), which gives a
bound long before the master converges. A bound in floating point proves nothing: :meth:`ColumnGeneration.certificate`
rounds the prices to integers and checks them with an exact knapsack.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers import bounds
from routepack_opt.solvers.highs import CoveringMaster
from routepack_opt.solvers.pricing import MAX_TABLE, Columns, Pricer

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMOOTHING = 0.5  # weight of the best known prices in the separation point
MAX_COLUMNS = 250  # patterns added a round
MAX_USE = 4  # patterns a round that share one length
PRICE_SCALE = 10**9  # prices are cut to multiples of 1 / PRICE_SCALE for the certificate
TOLERANCE = 1e-6
MIN_ROUNDS = 10  # with less there is no point in starting
SECONDS_PER_ENTRY = 1.5e-9  # of the pricing table, for the estimate only


@dataclass(frozen=True)
class Round:
    """State after :meth:`ColumnGeneration.generate`.

    Attributes
    ----------
    value
        Objective of the restricted master; infinite when it could not be solved.
    bound
        Best Farley bound for the present demand (floating point).
    values
        float64 [columns], the primal solution.
    converged
        No pattern improves any more: ``value`` is the value of the full master.
    """

    value: float
    bound: float
    values: NDArray[np.float64]
    converged: bool


class ColumnGeneration:
    """Restricted master, pricer and column pool of one bin-packing problem.

    Parameters
    ----------
    lengths, counts
        int64 [m]: distinct lengths, decreasing, and how many of each.
    start
        Patterns to start from; together they must cover every length.
    sizes, max_size
        int64 [m] samples of an item of each length and the most of a bin; None: no limit.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
        cap: int,
        start: Columns,
        *,
        sizes: NDArray[np.int64] | None = None,
        max_size: int = 0,
    ) -> None:
        """Build the master; nothing is solved yet."""
        self.lengths, self.counts, self.cap = lengths, counts, cap
        self.demand = counts.copy()
        self.sizes, self.max_size = sizes, max_size
        self.pricer = Pricer(lengths, counts, cap, sizes=sizes, max_size=max_size)
        self.master = CoveringMaster(counts)
        self.patterns: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.best_prices: NDArray[np.float64] | None = None
        self.best_bound = 0.0
        self.num_swaps = lengths.size - 1
        if self.num_swaps:
            # Column t: one slot less of length t, one more of the next shorter length t + 1.
            pairs = np.stack((np.arange(self.num_swaps), np.arange(1, lengths.size)), axis=1).reshape(-1)
            signs = np.tile(np.array([-1.0, 1.0]), self.num_swaps)
            self.master.add(Columns(np.arange(self.num_swaps + 1) * 2, pairs, signs), cost=0.0)
        self.add(start)

    @staticmethod
    def is_affordable(
        lengths: NDArray[np.int64], counts: NDArray[np.int64], cap: int, time_s: float, max_size: int = 0
    ) -> bool:
        """Does the pricing table fit into memory, and are a few pricing rounds possible in the time?"""
        size = Pricer.table_size(lengths, counts, cap, max_size) if lengths.size else MAX_TABLE + 1
        return size <= MAX_TABLE and MIN_ROUNDS * size * SECONDS_PER_ENTRY <= time_s

    def add(self, columns: Columns) -> None:
        """Append patterns to master and pool."""
        self.master.add(columns)
        for j in range(columns.num):
            span = slice(columns.starts[j], columns.starts[j + 1])
            self.patterns.append((columns.index[span].copy(), columns.value[span].astype(np.int64)))

    def set_demand(self, demand: NDArray[np.int64]) -> None:
        """Change what must be covered (a part of the original demand); the pool stays."""
        self.demand = demand.copy()
        self.master.set_demand(demand)
        self.pricer.set_counts(demand)
        self.best_prices, self.best_bound = None, 0.0

    def generate(
        self, *, goal: int, deadline_s: float, max_rounds: int, enough: float = -1.0, settle: bool = True
    ) -> Round:
        """Price until more than ``goal`` bins are proved necessary, or the master cannot prove more, or work runs out.

        Parameters
        ----------
        goal
            The number of bins in question.
        deadline_s
            On the clock of ``time.perf_counter``.
        enough
            Stop as soon as the master's value is at most this.
        settle
            Stop as soon as no integer lies between bound and value; else only when no pattern improves.
        """
        result = Round(float("inf"), self.best_bound, np.zeros(0), False)
        for _ in range(max_rounds):
            solved = self.master.solve(deadline_s - time.perf_counter())
            if solved is None:
                return result
            value, prices, values = solved
            new = self._price(np.maximum(prices, 0.0))
            converged = new.num == 0
            # The full master lies between bound and value: once no integer separates them, more rounds decide nothing.
            settled = np.ceil(self.best_bound - TOLERANCE) >= np.ceil(value - TOLERANCE)
            result = Round(value, self.best_bound, values[self.num_swaps :], converged)
            if converged or (settle and settled) or self.best_bound > goal + TOLERANCE or value <= enough:
                return result
            self.add(new)
            if time.perf_counter() > deadline_s:
                return result
        return result

    def _price(self, prices: NDArray[np.float64]) -> Columns:
        """Improving patterns at a point between the best known prices and ``prices``, else at ``prices``."""
        if self.best_prices is not None:
            smoothed = SMOOTHING * self.best_prices + (1.0 - SMOOTHING) * prices
            self._improve_bound(smoothed)
            columns = self.pricer.columns(prices, max_columns=MAX_COLUMNS, max_use=MAX_USE)
            if columns.num:
                return columns
        self._improve_bound(prices)
        return self.pricer.columns(prices, max_columns=MAX_COLUMNS, max_use=MAX_USE)

    def _improve_bound(self, prices: NDArray[np.float64]) -> None:
        heaviest = max(self.pricer.price(prices), 1e-12)
        bound = float((prices * self.demand).sum()) / heaviest
        if bound > self.best_bound:
            self.best_bound, self.best_prices = bound, prices / heaviest

    def pool_for(self, lengths: NDArray[np.int64]) -> Columns:
        """The pool as columns over another list of lengths (decreasing) that contains all of this one's."""
        place = np.searchsorted(-lengths, -self.lengths)
        sizes = [index.size for index, _ in self.patterns]
        index = place[np.concatenate([index for index, _ in self.patterns])]
        value = np.concatenate([value for _, value in self.patterns]).astype(np.float64)
        return Columns(np.cumsum([0, *sizes]).astype(np.int64), index.astype(np.int64), value)

    def _cut_prices(self) -> NDArray[np.int64]:
        prices = np.zeros(self.lengths.size) if self.best_prices is None else self.best_prices
        return np.floor(prices * PRICE_SCALE).astype(np.int64)

    def integer_prices(self) -> tuple[NDArray[np.int64], int]:
        """The best prices in integers, and the most a bin can be worth under them (exact)."""
        weights = self._cut_prices()
        return weights, bounds.knapsack_max(
            self.lengths, self.demand, weights, self.cap, sizes=self.sizes, max_size=self.max_size
        )

    def certificate(self) -> bounds.Certificate:
        """The best bound found for the present demand, re-derived in integers."""
        weights = self._cut_prices()
        shorter_first = slice(None, None, -1)
        return bounds.certify(
            "dual",
            self.lengths[shorter_first].copy(),
            self.demand[shorter_first].copy(),
            weights[shorter_first].copy(),
            self.cap,
            sizes=None if self.sizes is None else self.sizes[shorter_first].copy(),
            max_size=self.max_size,
        )


def patterns_of(bin_of: NDArray[np.int64], types: NDArray[np.int64], num_types: int) -> Columns:
    """The distinct patterns of a packing: ``types`` [n] is the type of each item."""
    num_bins = int(bin_of.max()) + 1 if bin_of.size else 0
    keys, copies = np.unique(bin_of * num_types + types, return_counts=True)
    bins, index = np.divmod(keys, num_types)
    starts = np.searchsorted(bins, np.arange(num_bins + 1))
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    kept: list[slice] = []
    for b in range(num_bins):
        span = slice(int(starts[b]), int(starts[b + 1]))
        key = (tuple(index[span].tolist()), tuple(copies[span].tolist()))
        if key[0] and key not in seen:
            seen.add(key)
            kept.append(span)
    sizes = [s.stop - s.start for s in kept]
    at = np.concatenate([np.arange(s.start, s.stop) for s in kept]) if kept else np.zeros(0, dtype=np.int64)
    return Columns(np.cumsum([0, *sizes]).astype(np.int64), index[at].astype(np.int64), copies[at].astype(np.float64))
