"""Exact layouts: every engine against trying all assignments, bounds against rounding, honest failures."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routepack_opt import Constraints, CostModel, Stage, Topology, Window
from routepack_opt.cost import score
from routepack_opt.errors import InvalidInput
from routepack_opt.models.atoms import build_atoms
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.layout_exact import ExactLayoutProblem, solve_layout_exact
from routepack_opt.models.layout_program import LayoutProgram, canonical
from routepack_opt.models.layout_search import LayoutTask
from routepack_opt.models.layout_subsets import refusal
from routepack_opt.models.placement import slots_from_ranks
from routepack_opt.models.rows import solve_rows
from routepack_opt.planner import rows_problem
from routepack_opt.solvers import integer_program
from routepack_opt.solvers.integer_program import IntegerProgram, solve_program

ENGINES = ("cp-sat", "highs", "subsets")
SOLVERS = ("cp-sat", "highs")


def random_problem(rng: np.random.Generator, num_atoms: int, *, rules: bool = True) -> ExactLayoutProblem:
    shards = [((0,),), ((0, 1),), ((0,), (1,)), ((1,), (0, 2)), ((0, 2), (3, 1))][int(rng.integers(5))]
    num_rows = int(rng.integers(1, 3 if sum(map(len, shards)) > 2 else 4))
    num_layers, cap = int(rng.integers(1, 4)), 100
    tokens = rng.integers(1, 60, num_atoms)
    if rules and rng.random() < 0.2:
        tokens[0] = 130
    if not rules:  # always feasible
        cap = 64 + 2 * int(tokens.sum()) // (num_rows * sum(map(len, shards)))
    num_stages = int(rng.integers(0, 3))
    cost = CostModel(
        tuple(
            Stage(f"s{k}", float(rng.choice([0.0, 1.7])), float(rng.choice([0.0, 0.3, 8.0]))) for k in range(num_stages)
        ),
        expert_weight=float(rng.choice([0.0, 1.0, 0.3]))
        if rng.random() < 0.5
        else tuple(rng.uniform(0.0, 2.0, num_layers).tolist()),
        sync="row" if rng.random() < 0.4 else "shard",
    )
    return ExactLayoutProblem(
        padded=-(-tokens // 4) * 4,
        tokens=tokens,
        squares=tokens**2,
        samples=rng.integers(1, 3, num_atoms) if rng.random() < 0.3 else np.ones(num_atoms, dtype=np.int64),
        loads=rng.integers(0, 2 * tokens[:, None, None] + 1, (num_atoms, num_layers, int(rng.integers(1, 4)))),
        shards=shards,
        num_rows=num_rows,
        cap=cap,
        cost=cost,
        max_samples=int(rng.integers(2, 6)) if rules and rng.random() < 0.3 else 0,
        equal_samples=bool(rules and rng.random() < 0.25),
        rank_groups=rng.integers(0, 4, num_atoms) if rules and rng.random() < 0.25 else None,
    )


def all_scores(problem: ExactLayoutProblem) -> list[tuple[float, np.ndarray]]:
    cells = range(problem.num_rows * problem.num_ranks)
    every = (np.array(choice) for choice in itertools.product(cells, repeat=problem.num_atoms))
    return [(problem.score(c).slowest_shard, c) for c in every if problem.is_feasible(c)]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_engines_find_the_optimum_of_all_assignments(engine: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 5 if rng.random() < 0.5 else 6)
    if problem.num_rows * problem.num_ranks > 4:
        problem = dataclasses.replace(
            problem, **{k: getattr(problem, k)[:5] for k in ("padded", "tokens", "squares", "samples", "loads")},
            rank_groups=None if problem.rank_groups is None else problem.rank_groups[:5],
        )  # fmt: skip
    if engine == "subsets" and refusal(problem):
        return
    found = all_scores(problem)
    exact = solve_layout_exact(problem, engine=engine, time_limit_s=20.0)
    if not found:
        assert exact.status == "infeasible" and exact.cell_of is None
        return
    best = min(value for value, _ in found)
    assert exact.status == "optimal" and problem.is_feasible(exact.cell_of)
    assert exact.objective == exact.score.slowest_shard == problem.score(exact.cell_of).slowest_shard
    assert exact.bound <= best <= exact.objective <= best * (1.0 + 1e-6) + 1e-12
    assert exact.rounding < 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_program_charges_every_layout_its_cost_rounded_down(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 8)
    num_cells = problem.num_rows * problem.num_ranks
    layouts = [c for c in rng.integers(0, num_cells, (300, 8)) if problem.is_feasible(c)][:5]
    program = LayoutProgram(problem)
    for cell_of in layouts:
        values = program.values_of(cell_of)
        assert program.program.broken_row(values) is None
        charged, true = program.program.objective(values), problem.score(cell_of).slowest_shard
        exact = true * float(program.costs.scale)
        assert charged <= exact * (1.0 + 1e-12) + 1e-6
        assert charged >= exact * (1.0 - 1e-12) - program.costs.loss - 1
        back = program.cell_of(values)
        assert problem.is_feasible(back)
        assert problem.score(back) == pytest.approx(problem.score(cell_of), rel=1e-12)
        again = canonical(problem, program.order, back)
        np.testing.assert_array_equal(again, back)


@pytest.mark.parametrize("seed", range(4))
def test_engines_agree_on_nine_atoms(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    problem = random_problem(rng, 9, rules=False)
    answers = [solve_layout_exact(problem, engine=e, time_limit_s=20.0) for e in ENGINES if e != "subsets"]
    if not refusal(problem):
        answers.append(solve_layout_exact(problem, engine="subsets"))
    for answer in answers:
        assert answer.status == "optimal"
        assert answer.objective == pytest.approx(answers[0].objective, rel=1e-6)
        assert answer.bound <= min(a.objective for a in answers)
        assert answer.solver and answer.version and answer.runtime_s > 0


@pytest.mark.parametrize("engine", SOLVERS)
@pytest.mark.parametrize("seed", range(3))
def test_lexicographic_phases_reach_the_best_score(engine: str, seed: int) -> None:
    problem = random_problem(np.random.default_rng([17, seed]), 6, rules=False)
    problem = dataclasses.replace(
        problem,
        shards=((0,), (1,)),
        num_rows=2,
        cap=256,  # a power of two: equal costs are equal to the last bit
        cost=CostModel((Stage("s", 1.0, 0.0),), sync=("shard", "row")[seed % 2]),
    )
    best = min(problem.score(c) for _, c in all_scores(problem))
    plain = solve_layout_exact(problem, engine=engine, time_limit_s=20.0)
    exact = solve_layout_exact(problem, engine=engine, time_limit_s=20.0, lexicographic=True)
    assert exact.score == best
    assert exact.score <= plain.score and exact.bound == plain.bound


@pytest.mark.parametrize("engine", ENGINES)
def test_a_window_without_cost_is_any_layout(engine: str) -> None:
    problem = random_problem(np.random.default_rng(4), 6, rules=False)
    problem = dataclasses.replace(problem, loads=problem.loads * 0, cost=CostModel(()), shards=((0,), (1,)), num_rows=2)
    exact = solve_layout_exact(problem, engine=engine, time_limit_s=20.0)
    assert exact.status == "optimal" and exact.objective == exact.bound == exact.gap == 0.0


@pytest.mark.parametrize("engine", SOLVERS)
def test_no_time_leaves_the_hint_and_claims_nothing(engine: str) -> None:
    problem = dataclasses.replace(
        random_problem(np.random.default_rng(3), 12, rules=False), shards=((0,), (1,)), num_rows=3
    )
    hint = np.arange(12) % 6
    assert problem.is_feasible(hint)
    without = solve_layout_exact(problem, engine=engine, time_limit_s=0.0)
    assert without.status in ("unknown", "feasible") and without.note
    assert without.bound <= without.objective
    with_hint = solve_layout_exact(problem, engine=engine, time_limit_s=0.0, hint=hint)
    assert with_hint.status == "feasible"
    assert with_hint.objective <= problem.score(hint).slowest_shard
    assert with_hint.bound <= with_hint.objective and with_hint.gap >= 0


@pytest.mark.parametrize("engine", SOLVERS)
def test_a_hint_that_breaks_a_rule_is_ignored(engine: str) -> None:
    problem = dataclasses.replace(
        random_problem(np.random.default_rng(3), 8, rules=False), shards=((0,), (1,)), num_rows=2
    )
    for hint in (np.zeros(8, dtype=np.int64), np.full(8, 9), np.zeros(3, dtype=np.int64)):
        exact = solve_layout_exact(problem, engine=engine, time_limit_s=20.0, hint=hint)
        assert exact.status == "optimal" and problem.is_feasible(exact.cell_of)


def test_same_seed_same_layout() -> None:
    problem = random_problem(np.random.default_rng(11), 9, rules=False)
    for engine in ENGINES[:2]:
        first, second = (solve_layout_exact(problem, engine=engine, time_limit_s=30.0, seed=5) for _ in range(2))
        np.testing.assert_array_equal(first.cell_of, second.cell_of)
        assert first.settings == second.settings and first.settings["seed"] == 5


@pytest.mark.parametrize("engine", SOLVERS)
def test_solvers_write_nothing_to_stdout(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    solve_layout_exact(random_problem(np.random.default_rng(1), 6, rules=False), engine=engine, time_limit_s=5.0)
    assert capfd.readouterr().out == ""


def test_highs_error_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    import highspy

    from routepack_opt.solvers import highs

    real = highs.new_highs

    def broken() -> object:
        inner = real()
        names = ("passModel", "setOptionValue", "setSolution", "getModelStatus", "getInfo", "version", "getSolution")
        return SimpleNamespace(run=lambda: highspy.HighsStatus.kError, **{name: getattr(inner, name) for name in names})

    monkeypatch.setattr(highs, "new_highs", broken)
    exact = solve_layout_exact(random_problem(np.random.default_rng(1), 6, rules=False), engine="highs")
    assert exact.status == "unknown" and exact.cell_of is None and exact.bound == 0.0
    assert "error" in exact.note


@pytest.mark.parametrize("engine", SOLVERS)
def test_a_layout_that_breaks_a_rule_counts_as_none(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(np.random.default_rng(1), 6, rules=False)
    monkeypatch.setattr(LayoutProgram, "cell_of", lambda self, values: np.full(6, -1))
    exact = solve_layout_exact(problem, engine=engine, time_limit_s=5.0)
    assert exact.status == "unknown" and exact.cell_of is None and "breaks a rule" in exact.note


def test_large_loads_keep_the_bound_below_the_optimum() -> None:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, 7, rules=False)
    cost = CostModel((Stage("full", 1e-9, 1e12),), expert_weight=tuple(rng.uniform(1e-8, 1e3, problem.loads.shape[1])))
    problem = dataclasses.replace(problem, loads=problem.loads * 10**9, cost=cost, shards=((0,), (1,)), num_rows=2)
    best = min(value for value, _ in all_scores(problem))
    exact = solve_layout_exact(problem, time_limit_s=20.0)
    assert exact.status == "optimal"
    assert exact.bound <= best <= exact.objective <= best * (1.0 + 1e-6)


def test_from_task_scores_like_the_evaluator() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 60, 12)
    window = Window(lengths, rng.integers(0, 50, (12, 2, 6)), group_ids=np.arange(12) // 2)
    topology = Topology(4, 3, 2)
    constraints = Constraints(groups="rank", min_rows=2)
    atoms = build_atoms(window, constraints, 100)
    rows = rows_problem(atoms, topology, 100, constraints)
    cost = CostModel.default(2, 100)
    ranks = np.array([rng.permutation(6) // 2 for _ in range(2)])
    task = LayoutTask(
        window, topology, 100, cost, constraints, atoms, rows, solve_rows(rows).cells, ranks, ranks, ranks, 0.0
    )
    exact = solve_layout_exact(task, time_limit_s=20.0)
    assert exact.status == "optimal"
    cells = cells_from_assignment(atoms, exact.cell_of, task.num_rows, 4)
    assert exact.score == score(window, cells, slots_from_ranks(ranks, 3), topology, 100, cost)
    for group in range(6):
        ranks_used = {r for r in range(4) for row in cells for i in row[r] if i // 2 == group}
        assert len(ranks_used) == 1


def test_refusals() -> None:
    problem = random_problem(np.random.default_rng(0), 6, rules=False)
    with pytest.raises(InvalidInput, match="'cp-sat', 'highs' or 'subsets'"):
        solve_layout_exact(problem, engine="gurobi")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="tie the rows together"):
        solve_layout_exact(dataclasses.replace(problem, equal_samples=True), engine="subsets")
    with pytest.raises(InvalidInput, match="at most"):
        solve_layout_exact(random_problem(np.random.default_rng(0), 30, rules=False), engine="subsets")
    with pytest.raises(ValueError, match="engine"):
        solve_program(IntegerProgram(), engine="cbc", time_limit_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", SOLVERS)
def test_programs_by_hand(engine: str) -> None:
    program = IntegerProgram()
    x, y = program.add_variable(0, 10), program.add_variable(0, 10)
    program.add_row([x, y], [2, 3], low=13)
    program.cost = {x: 3, y: 5}
    result = solve_program(program, engine=engine, time_limit_s=10.0)
    assert result.status == "optimal" and program.objective(result.values) == 20  # x = 5, y = 1
    assert 19.9 < result.bound <= 20
    program.add_row([x, y], high=3)
    infeasible = solve_program(program, engine=engine, time_limit_s=10.0)
    assert infeasible.status == "infeasible" and infeasible.values is None
    assert integer_program.LARGEST >= 2**60
