"""HiGHS, wrapped: silent, single-threaded, every status checked. Imported only when a solver rung is reached."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routepack_opt.solvers.pricing import Columns

_SILENCE = threading.Lock()
_banner_shown = False


@contextlib.contextmanager
def _stdout_to_null() -> Iterator[None]:
    """HiGHS prints a banner to file descriptor 1 on its first run, whatever ``output_flag`` says."""
    sys.stdout.flush()
    with _SILENCE:
        saved = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 1)
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(null)


def new_highs() -> Any:
    """A silent single-threaded ``highspy.Highs``; the process's banner is swallowed once, here."""
    global _banner_shown
    import highspy

    if not _banner_shown:
        with _stdout_to_null():
            probe = highspy.Highs()
            probe.setOptionValue("output_flag", False)
            probe.setOptionValue("threads", 1)
            probe.addCol(1.0, 0.0, 1.0, 0, np.array([], dtype=np.int32), np.array([]))
            probe.run()
        _banner_shown = True
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1)):
        highs.setOptionValue(name, value)
    return highs


def version() -> str:
    """Version of the installed HiGHS."""
    return str(new_highs().version())


class CoveringMaster:
    """The restricted master of column generation: min cost x, sum of columns >= demand, x >= 0.

    Solved by simplex, warm-started from the previous basis: primal after new columns, dual after a change of demand.
    """

    def __init__(self, demand: NDArray[np.int64]) -> None:
        """Rows only; every row must be covered by columns added before the first solve."""
        import highspy

        self._inf = highspy.kHighsInf
        self._error = highspy.HighsStatus.kError
        self._optimal = highspy.HighsModelStatus.kOptimal
        self.highs = new_highs()
        self.highs.setOptionValue("solver", "simplex")
        self._num_rows = demand.size
        self._rows = np.arange(demand.size, dtype=np.int32)
        lower = demand.astype(np.float64)
        upper = np.full(demand.size, self._inf)
        none = np.zeros(0, dtype=np.int32)
        self.highs.addRows(demand.size, lower, upper, 0, np.zeros(demand.size, dtype=np.int32), none, np.zeros(0))
        self.num_columns = 0
        self._strategy(primal=True)

    def _strategy(self, *, primal: bool) -> None:
        self.highs.setOptionValue("simplex_strategy", 4 if primal else 1)

    def add(self, columns: Columns, cost: float = 1.0) -> None:
        """Append columns; they enter at value 0."""
        num = columns.num
        if not num:
            return
        starts = columns.starts[:-1].astype(np.int32)
        index = columns.index.astype(np.int32)
        self.highs.addCols(
            num, np.full(num, cost), np.zeros(num), np.full(num, self._inf), index.size, starts, index, columns.value
        )
        self.num_columns += num
        self._strategy(primal=True)

    def set_demand(self, demand: NDArray[np.int64]) -> None:
        """Change the right-hand sides."""
        lower, upper = demand.astype(np.float64), np.full(demand.size, self._inf)
        self.highs.changeRowsBounds(self._num_rows, self._rows, lower, upper)
        self._strategy(primal=False)

    def set_upper(self, column: int, upper: float) -> None:
        """Limit one column (``upper`` may be infinite)."""
        self.highs.changeColBounds(column, 0.0, upper)
        self._strategy(primal=False)

    def solve(self, time_limit_s: float) -> tuple[float, NDArray[np.float64], NDArray[np.float64]] | None:
        """(objective, duals [m], values [columns]), or None when HiGHS did not reach the optimum in time."""
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + max(time_limit_s, 0.0))
        if self.highs.run() == self._error or self.highs.getModelStatus() != self._optimal:
            return None
        solution = self.highs.getSolution()
        objective = float(self.highs.getInfo().objective_function_value)
        return objective, np.array(solution.row_dual), np.array(solution.col_value)


def cover_with_patterns(
    columns: Columns, demand: NDArray[np.int64], goal: int, time_limit_s: float
) -> tuple[str, NDArray[np.int64]]:
    """Cover ``demand`` with at most ``goal`` whole columns, by branch and cut.

    Returns
    -------
    "found", "impossible" (HiGHS's word, in floating point) or "open", and the number of times each column is used.
    """
    import highspy

    highs = new_highs()
    num, inf = columns.num, highspy.kHighsInf
    lower, none = demand.astype(np.float64), np.zeros(0, dtype=np.int32)
    starts = np.zeros(demand.size, dtype=np.int32)
    highs.addRows(demand.size, lower, np.full(demand.size, inf), 0, starts, none, np.zeros(0))
    index = columns.index.astype(np.int32)
    begin = columns.starts[:-1].astype(np.int32)
    ones, zeros, upper = np.ones(num), np.zeros(num), np.full(num, float(goal))
    highs.addCols(num, ones, zeros, upper, index.size, begin, index, columns.value)
    kinds = np.full(num, highspy.HighsVarType.kInteger)
    highs.changeColsIntegrality(num, np.arange(num, dtype=np.int32), kinds)
    highs.setOptionValue("time_limit", max(time_limit_s, 0.0))
    highs.setOptionValue("objective_target", goal + 0.5)
    if highs.run() == highspy.HighsStatus.kError:
        return "open", np.zeros(0, dtype=np.int64)
    info, status = highs.getInfo(), highs.getModelStatus()
    used = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
    if used.size == num and int(used.sum()) <= goal:
        covered = np.zeros(demand.size, dtype=np.int64)
        owner = np.repeat(np.arange(num), np.diff(columns.starts))
        np.add.at(covered, columns.index, columns.value.astype(np.int64) * used[owner])
        if bool((covered >= demand).all()):
            return "found", used
    finished = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    if (finished and info.objective_function_value > goal + 0.5) or info.mip_dual_bound > goal + 0.5:
        return "impossible", np.zeros(0, dtype=np.int64)
    return ("impossible" if status == highspy.HighsModelStatus.kInfeasible else "open"), np.zeros(0, dtype=np.int64)
