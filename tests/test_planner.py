"""plan_window: promises that hold for every window, checked on many small ones."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from brute_force import least_slowest_shard, legal_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import Case, random_case, random_cost, random_demand

from routepack_opt import Constraints, CostModel, Plan, Stage, Topology, Window, plan_window, score
from routepack_opt.errors import Infeasible, InvalidInput, RoutePackError

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = st.integers(0, 2**32 - 1)


def make_plan(case: Case, *, steps: int | None = 300, **options: object) -> Plan:
    return plan_window(
        case.window,
        case.topology,
        token_cap=case.token_cap,
        cost=case.cost,
        previous=case.previous,
        constraints=case.constraints,
        budget_steps=steps,
        **options,  # type: ignore[arg-type]
    )


def feasible_case(rng: np.random.Generator, **options: bool) -> tuple[Case, Plan]:
    while True:
        case = random_case(rng, **options)
        try:
            return case, make_plan(case, steps=0)
        except Infeasible:
            continue


def check_plan(case: Case, plan: Plan) -> None:
    """Promises by hand, then all claims by the independent checker."""
    window, topology, rules = case.window, case.topology, case.constraints
    assert sorted(i for row in plan.cells for cell in row for i in cell) == list(range(window.num_samples))
    assert len(plan.cells) == plan.rows
    assert all(len(row) == topology.dp and all(row) for row in plan.cells)
    padded = -(-window.lengths // rules.pad_multiple) * rules.pad_multiple
    if rules.oversize == "error":
        assert all(padded[list(cell)].sum() <= case.token_cap for row in plan.cells for cell in row)
    experts = np.arange(window.num_experts)
    for layer in range(window.num_layers):
        assert (np.sort(plan.logical_to_slot[layer]) == experts).all()
        assert (plan.slot_to_logical[layer][plan.logical_to_slot[layer]] == experts).all()
    assert plan.score == score(window, plan.cells, plan.logical_to_slot, topology, case.token_cap, case.cost)
    assert plan.bound <= plan.score.slowest_shard
    assert plan.rows_lower_bound <= plan.rows
    if plan.seed_score is not None and rules.max_moved is None:
        assert (plan.rows, plan.score) <= (plan.seed_rows, plan.seed_score)
    plan.verify(window)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_plans_verify_under_every_combination_of_constraints(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    try:
        plan = make_plan(case)
    except Infeasible as error:
        assert "\n" not in str(error)
        return
    check_plan(case, plan)


def test_a_thousand_random_windows_verify() -> None:
    num_plans = 0
    for seed in range(1000):
        case = random_case(np.random.default_rng(10_000 + seed))
        try:
            plan = make_plan(case, steps=120, seed=seed)
        except Infeasible:
            continue
        check_plan(case, plan)
        num_plans += 1
    assert num_plans > 500


@pytest.mark.slow
def test_ten_thousand_random_windows_verify() -> None:
    for seed in range(10_000):
        case = random_case(np.random.default_rng(50_000 + seed))
        try:
            plan = make_plan(case, steps=400, seed=seed)
        except Infeasible:
            continue
        check_plan(case, plan)


def tiny_case(rng: np.random.Generator, *, constrained: bool = False) -> Case:
    """N <= 7, E = 4, P = 2, one or two layers, at most four cells a row."""
    dp = int(rng.integers(1, 5))
    num_shards = int(rng.choice([g for g in (1, 2, 4) if dp % g == 0]))
    num_layers = int(rng.integers(1, 3))
    lengths = rng.integers(1, 31, int(rng.integers(max(2, dp), 8)))
    window = Window(
        lengths, random_demand(rng, lengths, num_layers, 4), group_ids=np.sort(rng.integers(0, 4, lengths.size))
    )
    rules, previous = Constraints(), None
    if constrained:
        rules = Constraints(
            pad_multiple=int(rng.choice([1, 4])),
            max_samples_per_cell=int(rng.integers(2, 5)) if rng.random() < 0.3 else None,
            equal_samples_per_rank=bool(rng.random() < 0.3),
            groups=("cell" if rng.random() < 0.5 else "rank") if rng.random() < 0.4 else None,
            oversize="alone",
            max_moved=float(rng.choice([0.0, 0.5, 1.0])) if rng.random() < 0.4 else None,
        )
        previous = np.array([rng.permutation(4) for _ in range(num_layers)])
    return Case(window, Topology(dp=dp, ep=2, shards=num_shards), 40, random_cost(rng, num_layers), rules, previous)


def check_optimal(case: Case, seed: int, *, steps: int | None = None) -> bool:
    """Whether the case was feasible and small enough to compare."""
    try:
        plan = make_plan(case, steps=steps, budget_s=2.0, seed=seed)
    except Infeasible:
        return False
    plan.verify(case.window)
    if plan.rows * case.topology.dp > 4:
        return False
    assert plan.score.slowest_shard == pytest.approx(least_slowest_shard(case, plan.rows), rel=1e-9)
    return True


def test_tiny_windows_reach_the_optimum_of_all_layouts_and_placements() -> None:
    num_compared = 0
    for seed in range(150):
        case = tiny_case(np.random.default_rng(seed))
        num_compared += check_optimal(case, seed)
    assert num_compared > 100


def test_tiny_windows_reach_the_optimum_under_constraints() -> None:
    num_compared = 0
    for seed in range(150):
        case = tiny_case(np.random.default_rng(seed), constrained=True)
        num_compared += check_optimal(case, seed, steps=100)
    assert num_compared > 60


@pytest.mark.slow
def test_a_thousand_tiny_windows_reach_the_optimum() -> None:
    for seed in range(1000):
        case = tiny_case(np.random.default_rng(1000 + seed))
        check_optimal(case, seed)


def test_tiny_windows_use_the_least_rows_and_refuse_only_what_has_no_layout() -> None:
    for seed in range(150):
        case = tiny_case(np.random.default_rng(seed), constrained=True)
        least = next(
            (rows for rows in range(1, 4) if rows * case.topology.dp <= 4 and len(legal_layouts(case, rows))), None
        )
        try:
            plan = make_plan(case, steps=0)
        except Infeasible:
            assert least is None, (seed, case.constraints)
            continue
        if least is not None:
            assert plan.rows == least


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_more_steps_are_never_worse(seed: int) -> None:
    case, plan = feasible_case(np.random.default_rng(seed))
    plans = [plan, *(make_plan(case, steps=steps) for steps in (1, 300, 1500, 6000))]
    for shorter, longer in itertools.pairwise(plans):
        assert (longer.rows, longer.score) <= (shorter.rows, shorter.score)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_same_input_same_plan(seed: int) -> None:
    case, _ = feasible_case(np.random.default_rng(seed))
    first, second = make_plan(case, steps=2000, seed=3), make_plan(case, steps=2000, seed=3)
    assert first == second
    assert first.timings != {}


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_the_order_of_samples_does_not_change_the_score(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case, _ = feasible_case(rng)
    order = rng.permutation(case.window.num_samples)
    window = case.window
    shuffled = Window(window.lengths[order], window.demand[order], group_ids=window.group_ids[order])
    plans = [make_plan(dataclasses.replace(case, window=w), steps=1000) for w in (window, shuffled)]
    assert plans[0].score == plans[1].score
    assert plans[0].rows == plans[1].rows
    np.testing.assert_array_equal(plans[0].logical_to_slot, plans[1].logical_to_slot)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_plans_survive_a_round_trip_through_a_file(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    case, plan = feasible_case(np.random.default_rng(seed))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.timings == plan.timings
    again.verify(case.window)


def window_of(num_samples: int = 60, seed: int = 0, *, num_layers: int = 3, num_experts: int = 8) -> Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, num_samples)
    return Window(lengths, random_demand(rng, lengths, num_layers, num_experts))


TOPOLOGY = Topology(dp=4, ep=4, shards=2)


def test_a_stop_event_returns_the_incumbent() -> None:
    stop = threading.Event()
    stop.set()
    window = window_of()
    stopped = plan_window(window, TOPOLOGY, token_cap=100, budget_s=1e6, stop=stop)
    stopped.verify(window)
    timer = threading.Timer(0.2, stop.set)
    stop.clear()
    timer.start()
    later = plan_window(window, TOPOLOGY, token_cap=100, budget_s=1e6, stop=stop)
    later.verify(window)
    assert (later.rows, later.score) <= (stopped.rows, stopped.score)


def test_no_budget_at_all_still_gives_a_feasible_plan() -> None:
    window = window_of()
    for options in ({"budget_s": 0.0}, {"budget_steps": 0}, {"budget_s": 1e-9}):
        plan_window(window, TOPOLOGY, token_cap=100, **options).verify(window)  # type: ignore[arg-type]


def test_the_search_improves_on_the_seed() -> None:
    window = window_of(120)
    plan = plan_window(window, TOPOLOGY, token_cap=200, budget_steps=4000)
    assert plan.seed_score is not None
    assert plan.score.slowest_shard < plan.seed_score.slowest_shard


def test_unit_counts_beyond_32_bits_are_scored_exactly() -> None:
    rng = np.random.default_rng(0)
    window = Window(rng.integers(1, 30, 12), rng.integers(0, 2**31 - 1, (12, 2, 4)))
    plan = plan_window(window, Topology(dp=2, ep=2, shards=1), token_cap=60, budget_steps=2000)
    plan.verify(window)
    assert plan.seed_score is not None
    assert (plan.rows, plan.score) <= (plan.seed_rows, plan.seed_score)


def test_huge_caps_and_numbers_need_no_huge_tables() -> None:
    rng = np.random.default_rng(0)
    for cap in (2**31, 2**40, 2**62):
        for longest in (2, min(cap, 2**30)):
            window = Window(rng.integers(1, longest, 5), rng.integers(0, 3, (5, 2, 4)))
            for rules in (Constraints(), Constraints(max_samples_per_cell=2), Constraints(min_rows=2)):
                plan = plan_window(
                    window, Topology(dp=2, ep=2, shards=1), token_cap=cap, budget_steps=50, constraints=rules
                )
                plan.verify(window)


def test_without_a_cost_the_default_is_used_and_said() -> None:
    window = window_of()
    plan = plan_window(window, TOPOLOGY, token_cap=100, budget_steps=0)
    assert plan.cost == CostModel.default(3, 100)
    assert any("default" in note for note in plan.notes)


def test_predicted_counts_are_said() -> None:
    window = window_of()
    predicted = Window(window.lengths, window.demand, counts="predicted")
    plan = plan_window(predicted, TOPOLOGY, token_cap=100, budget_steps=0)
    assert any("predicted" in note for note in plan.notes)


def test_the_previous_placement_counts_moved_experts(tmp_path: Path) -> None:
    window = window_of()
    first = plan_window(window, TOPOLOGY, token_cap=100, budget_steps=500)
    path = tmp_path / "plan.json"
    first.save(path)
    again = plan_window(window, TOPOLOGY, token_cap=100, budget_steps=0, previous=Plan.load(path))
    moved = (again.logical_to_slot // 2 != first.logical_to_slot // 2).sum(axis=1)
    np.testing.assert_array_equal(again.moved_experts, moved)
    same = plan_window(
        window, TOPOLOGY, token_cap=100, budget_steps=500, previous=first, constraints=Constraints(max_moved=0.0)
    )
    np.testing.assert_array_equal(same.logical_to_slot, first.logical_to_slot)
    assert same.moved_experts.sum() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_cap": 0}, "token_cap"),
        ({"token_cap": 2.5}, "token_cap"),
        ({"token_cap": True}, "token_cap"),
        ({"budget_s": -1.0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"budget_s": "1"}, "budget_s"),
        ({"budget_steps": -1}, "budget_steps"),
        ({"budget_steps": 1.5}, "budget_steps"),
        ({"device": "abacus"}, "device"),
        ({"seed": 1.5}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"previous": np.zeros((3, 8), dtype=int)}, "previous"),
        ({"previous": np.zeros((2, 8), dtype=int)}, "previous"),
        ({"previous": np.zeros((3, 8))}, "previous"),
        ({"cost": CostModel((Stage("a", 1, 1),), expert_weight=(1.0,))}, "expert_weight"),
        ({"constraints": Constraints(groups="cell")}, "groups"),
        ({"constraints": Constraints(groups=[1, 2])}, "groups"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"token_cap": 100, "budget_steps": 0, **change}
    if "budget_s" in change:
        del arguments["budget_steps"]
    with pytest.raises(InvalidInput, match=message) as caught:
        plan_window(window_of(), TOPOLOGY, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_infeasible_windows_say_what_would_do() -> None:
    with pytest.raises(Infeasible, match=r"needs 1 dummy sample\b") as caught:
        plan_window(window_of(3), TOPOLOGY, token_cap=100)
    assert caught.value.dummy_samples == 1
    assert isinstance(caught.value, RoutePackError)
