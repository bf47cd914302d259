"""Integer programs, stated once and solved by CP-SAT or by HiGHS."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Engine = Literal["cp-sat", "highs"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

LARGEST = 2**60  # of any sum an engine may form
HIGHS_MARGIN = 2e-6  # relative; HiGHS works in floating point with a feasibility tolerance of 1e-6


@dataclass
class IntegerProgram:
    """Minimise cost x, rows lower <= A x <= upper, integers only.

    ``continuous`` marks variables that are integers in every optimum anyway (maxima of integers): the MIP engine
    leaves them continuous.
    """

    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    continuous: list[bool] = field(default_factory=list)
    rows: list[tuple[list[int], list[int], int, int]] = field(default_factory=list)
    cost: dict[int, int] = field(default_factory=dict)

    def add_variable(self, lower: int, upper: int, *, continuous: bool = False) -> int:
        """Index of a new variable."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.continuous.append(continuous)
        return len(self.lower) - 1

    def add_row(
        self,
        variables: Iterable[int],
        weights: Iterable[int] | None = None,
        *,
        low: int = -LARGEST,
        high: int = LARGEST,
    ) -> None:
        """low <= sum weights x <= high; weights default to 1, and those that are 0 are left out."""
        index = [int(v) for v in variables]
        factors = [1] * len(index) if weights is None else [int(w) for w in weights]
        kept = [(v, w) for v, w in zip(index, factors, strict=True) if w]
        self.rows.append(([v for v, _ in kept], [w for _, w in kept], int(low), int(high)))

    def objective(self, values: NDArray[np.int64]) -> int:
        """Cost of an assignment."""
        return sum(weight * int(values[v]) for v, weight in self.cost.items())

    def broken_row(self, values: NDArray[np.int64]) -> int | None:
        """Index of the first row that ``values`` breaks, in exact arithmetic."""
        for k, (index, weights, low, high) in enumerate(self.rows):
            if not low <= sum(w * int(values[v]) for v, w in zip(index, weights, strict=True)) <= high:
                return k
        return None


@dataclass(frozen=True)
class ProgramResult:
    """What an engine found and what it proved.

    Attributes
    ----------
    status
        "optimal" and "infeasible" are the engine's proofs; "feasible" is a solution without one, "unknown" neither.
    values
        int64 [variables], or None without a solution.
    bound
        No solution costs less; -inf when nothing was proved. From HiGHS it already carries a safety margin.
    note
        Why the engine stopped early, in words, or "".
    settings
        What the run has to be repeated with.
    """

    status: Status
    values: NDArray[np.int64] | None
    bound: float
    solver: str
    version: str
    runtime_s: float
    settings: dict[str, Any]
    note: str = ""


def solve_program(
    program: IntegerProgram,
    *,
    engine: Engine,
    time_limit_s: float,
    seed: int = 0,
    num_workers: int = 1,
    hint: NDArray[np.int64] | None = None,
) -> ProgramResult:
    """Minimise by "cp-sat" or "highs"; ``hint`` is int64 [variables], a complete solution to start from.

    CP-SAT repeats itself with equal seed and one worker, as long as the time limit does not cut it short. HiGHS runs
    on one thread whatever ``num_workers`` says.
    """
    if engine not in ("cp-sat", "highs"):
        raise ValueError(f"engine: {engine!r} is unknown; expected 'cp-sat' or 'highs'")
    solve = _solve_cpsat if engine == "cp-sat" else _solve_highs
    return solve(program, max(0.0, float(time_limit_s)), int(seed) % 2**31, max(1, int(num_workers)), hint)


def _solve_cpsat(
    program: IntegerProgram, time_limit_s: float, seed: int, num_workers: int, hint: NDArray[np.int64] | None
) -> ProgramResult:
    import ortools
    from ortools.sat.python import cp_model

    start = time.perf_counter()
    model = cp_model.CpModel()
    variables = [
        model.new_int_var(low, high, f"v{k}")
        for k, (low, high) in enumerate(zip(program.lower, program.upper, strict=True))
    ]
    binary = [low >= 0 and high <= 1 for low, high in zip(program.lower, program.upper, strict=True)]
    for index, weights, low, high in program.rows:
        terms = [variables[v] for v in index]
        if low == high == 1 and all(w == 1 and binary[v] for v, w in zip(index, weights, strict=True)):
            model.add_exactly_one(terms)
        else:
            model.add_linear_constraint(cp_model.LinearExpr.weighted_sum(terms, weights), low, high)
    costly = list(program.cost)
    model.minimize(cp_model.LinearExpr.weighted_sum([variables[v] for v in costly], [program.cost[v] for v in costly]))
    if hint is not None:
        for variable, value in zip(variables, hint.tolist(), strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    code = solver.solve(model)
    names: dict[Any, Status] = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "feasible",
        cp_model.INFEASIBLE: "infeasible",
    }
    status = names.get(code, "unknown")
    values = None
    bound = -math.inf
    if status in ("optimal", "feasible"):
        values = np.array([solver.value(variable) for variable in variables], dtype=np.int64)
    if status != "infeasible" and code != cp_model.MODEL_INVALID:
        bound = float(math.floor(solver.best_objective_bound))
    note = {"feasible": "time limit reached", "unknown": f"CP-SAT stopped with {solver.status_name(code)}"}
    return ProgramResult(
        status,
        values,
        bound,
        "CP-SAT",
        str(ortools.__version__),
        time.perf_counter() - start,
        {"seed": seed, "num_workers": num_workers, "time_limit_s": time_limit_s},
        note.get(status, ""),
    )


def _solve_highs(
    program: IntegerProgram, time_limit_s: float, seed: int, num_workers: int, hint: NDArray[np.int64] | None
) -> ProgramResult:
    import highspy

    from routepack_opt.solvers.highs import new_highs

    del num_workers  # a second thread count in one process makes HiGHS fail
    start = time.perf_counter()
    highs = new_highs()
    options = {"time_limit": time_limit_s, "random_seed": seed, "mip_rel_gap": 1e-9, "mip_abs_gap": 0.0}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    passed = highs.passModel(_highs_model(program))
    if hint is not None:
        solution = highspy.HighsSolution()
        solution.col_value = hint.astype(np.float64).tolist()
        highs.setSolution(solution)
    ran = highs.run() if passed != highspy.HighsStatus.kError else passed
    code = highs.getModelStatus()
    info = highs.getInfo()
    status: Status = "unknown"
    values, bound, note = None, -math.inf, ""
    if ran == highspy.HighsStatus.kError:
        note = "HiGHS returned an error"
    elif code == highspy.HighsModelStatus.kInfeasible:
        status = "infeasible"
    else:
        if info.primal_solution_status == 2:  # a feasible point
            values = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
            status = "optimal" if code == highspy.HighsModelStatus.kOptimal else "feasible"
        if math.isfinite(info.mip_dual_bound):
            bound = info.mip_dual_bound - HIGHS_MARGIN * max(1.0, abs(info.mip_dual_bound))
        if status != "optimal":
            note = f"HiGHS stopped with {highs.modelStatusToString(code)}"
    settings = {"seed": seed, "num_workers": 1, "time_limit_s": time_limit_s}
    elapsed = time.perf_counter() - start
    return ProgramResult(status, values, bound, "HiGHS", str(highs.version()), elapsed, settings, note)


def _highs_model(program: IntegerProgram) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.lower), len(program.rows)
    cost = np.zeros(lp.num_col_)
    cost[list(program.cost)] = list(program.cost.values())
    lp.col_cost_ = cost
    lp.col_lower_ = np.array(program.lower, dtype=np.float64)
    lp.col_upper_ = np.array(program.upper, dtype=np.float64)
    kinds = (highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous)
    lp.integrality_ = [kinds[free] for free in program.continuous]
    infinity = highspy.kHighsInf
    lp.row_lower_ = np.array([low if low > -LARGEST else -infinity for _, _, low, _ in program.rows], dtype=np.float64)
    lp.row_upper_ = np.array([high if high < LARGEST else infinity for *_, high in program.rows], dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(index) for index, *_ in program.rows)]).astype(np.int32)
    lp.a_matrix_.index_ = np.array([v for index, *_ in program.rows for v in index], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([w for _, weights, *_ in program.rows for w in weights], dtype=np.float64)
    return lp
