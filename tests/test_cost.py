"""CostModel and the exact evaluator: against the definition in exact fractions, and by hand."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import random_case

from routepack_opt import CostModel, Score, Stage, Topology, Window, dense_block, score
from routepack_opt.cost import attention_costs, expert_costs, rank_loads, row_shard_costs, score_of
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.models.layout import averaging_bound, simple_averaging_bound

if TYPE_CHECKING:
    from pathlib import Path

    from random_windows import Case

SEEDS = st.integers(0, 2**32 - 1)


def random_layout(case: Case, rng: np.random.Generator) -> tuple[list[list[list[int]]], np.ndarray]:
    """Any cells, some of them empty, and any placement."""
    window, dp = case.window, case.topology.dp
    num_rows = int(rng.integers(1, 4))
    cells: list[list[list[int]]] = [[[] for _ in range(dp)] for _ in range(num_rows)]
    for sample in range(window.num_samples):
        cells[int(rng.integers(num_rows))][int(rng.integers(dp))].append(sample)
    return cells, np.array([rng.permutation(window.num_experts) for _ in range(window.num_layers)])


def by_definition(case: Case, cells: list[list[list[int]]], slots: np.ndarray) -> tuple[Fraction, Fraction, Fraction]:
    """routepack.md section 5, sum by sum."""
    window, topology, cap, cost = case.window, case.topology, case.token_cap, case.cost
    per_rank = window.num_experts // topology.ep
    gammas = [Fraction(g) for g in cost.expert_weights(window.num_layers)]
    costs: dict[tuple[int, int], Fraction] = {}
    for r, row in enumerate(cells):
        for g, ranks in enumerate(topology.shards):
            attention = Fraction()
            for stage in cost.stages:
                attention += max(
                    sum(
                        (Fraction(stage.alpha) * int(window.lengths[i]) / cap
                         + Fraction(stage.beta) * int(window.lengths[i]) ** 2 / cap**2 for i in row[d]),
                        Fraction(),
                    )
                    for d in ranks
                )  # fmt: skip
            experts = Fraction()
            for layer in range(window.num_layers):
                loads = [0] * topology.ep
                for d in ranks:
                    for i in row[d]:
                        for e in range(window.num_experts):
                            loads[slots[layer, e] // per_rank] += int(window.demand[i, layer, e])
                experts += gammas[layer] * max(loads)
            costs[r, g] = attention + experts / cap
    num_rows, num_shards = len(cells), topology.num_shards
    if cost.sync == "row":
        first = sum((max(costs[r, g] for g in range(num_shards)) for r in range(num_rows)), Fraction())
    else:
        first = max(sum((costs[r, g] for r in range(num_rows)), Fraction()) for g in range(num_shards))
    return first, sum(costs.values(), Fraction()), max(costs.values())


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_the_evaluator_equals_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, constrained=False)
    cells, slots = random_layout(case, rng)
    found = score(case.window, cells, slots, case.topology, case.token_cap, case.cost)
    for value, exact in zip(found, by_definition(case, cells, slots), strict=True):
        assert value == pytest.approx(float(exact), rel=1e-12, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_symmetries_leave_the_score_to_the_last_bit(seed: int) -> None:
    """Order inside a cell, cells inside a shard, rows, slots inside an EP rank, names of EP ranks."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, constrained=False)
    cells, slots = random_layout(case, rng)
    before = score(case.window, cells, slots, case.topology, case.token_cap, case.cost)
    shuffled = []
    for r in rng.permutation(len(cells)).tolist():
        row: list[list[int]] = [[] for _ in range(case.topology.dp)]
        for ranks in case.topology.shards:
            for d, other in zip(ranks, rng.permutation(ranks).tolist(), strict=True):
                row[d] = rng.permutation(cells[r][other]).tolist()
        shuffled.append(row)
    per_rank = case.window.num_experts // case.topology.ep
    renamed = np.empty_like(slots)
    for layer in range(slots.shape[0]):
        names = rng.permutation(case.topology.ep)
        inside = np.array([rng.permutation(per_rank) for _ in range(case.topology.ep)])
        rank, place = np.divmod(slots[layer], per_rank)
        renamed[layer] = names[rank] * per_rank + inside[rank, place]
    assert score(case.window, shuffled, renamed, case.topology, case.token_cap, case.cost) == before


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_the_averaging_bound_holds_for_any_layout_and_placement(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, constrained=False)
    cells, slots = random_layout(case, rng)
    window = case.window
    slowest = score(window, cells, slots, case.topology, case.token_cap, case.cost).slowest_shard
    per_rank = window.num_experts // case.topology.ep
    ascending = np.sort(window.total_load, axis=1)
    mean = -(-window.total_load.sum(axis=1) // case.topology.ep)
    largest = ascending[:, -1] + ascending[:, : per_rank - 1].sum(axis=1)
    bound = averaging_bound(window.lengths, np.maximum(mean, largest), case.topology, case.token_cap, case.cost)
    assert bound.value <= slowest * (1 + 1e-12)
    if len({len(ranks) for ranks in case.topology.shards}) == 1:
        simple = simple_averaging_bound(window.lengths, window.total_load, case.topology, case.token_cap, case.cost)
        assert simple <= slowest * (1 + 1e-12)


def test_a_score_worked_out_by_hand() -> None:
    # two rows, one shard of two ranks, cap 10; loads: row 0 rank A 4+0, rank B 0+2; row 1 A 1, B 3
    window = Window([5, 10, 2, 4], [[[4, 0]], [[0, 2]], [[1, 0]], [[0, 3]]])
    topology = Topology(dp=2, ep=2, shards=1)
    cost = CostModel((Stage("linear", 2.0, 0.0), Stage("square", 0.0, 4.0)), expert_weight=0.5)
    found = score(window, [[[0], [1]], [[2], [3]]], np.array([[0, 1]]), topology, 10, cost)
    # row 0: 2 * 1 + 4 * 1 + 0.5 * 4 / 10; row 1: 2 * 0.4 + 4 * 0.16 + 0.5 * 3 / 10
    assert found == pytest.approx((6.2 + 1.59, 6.2 + 1.59, 6.2), rel=1e-15)


def test_linear_and_quadratic_parts_are_added_before_the_straggler_is_taken() -> None:
    topology = Topology(dp=2, ep=1, shards=1)
    tokens, squares = np.array([[10, 8]]), np.array([[20, 64]])
    together = attention_costs((Stage("a", 1.0, 1.0),), tokens, squares, topology, 1)
    apart = attention_costs((Stage("a", 1.0, 0.0), Stage("b", 0.0, 1.0)), tokens, squares, topology, 1)
    assert together.tolist() == [[72.0]]
    assert apart.tolist() == [[74.0]]


def test_shards_have_their_own_straggler_and_rows_add_up_by_sync() -> None:
    costs = np.array([[3.0, 1.0], [1.0, 4.0]])
    assert score_of(costs, "shard") == Score(5.0, 9.0, 4.0)
    assert score_of(costs, "row") == Score(7.0, 9.0, 4.0)


def test_sums_do_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(0)
    costs = rng.uniform(0, 1, (50, 3)) * 10.0 ** rng.integers(-8, 8, (50, 3))
    for _ in range(5):
        assert score_of(costs[rng.permutation(50)], "shard") == score_of(costs, "shard")


def test_integer_loads_beyond_float_precision_are_summed_first() -> None:
    loads = np.array([[[[2**53], [1]]]])
    assert expert_costs(loads, np.ones(2), 1)[0, 0] == float(2**53 + 1)
    window = Window([1, 1], np.full((2, 1, 2), 2**31 - 1))
    assert rank_loads(window, [[[0, 1]]], np.array([[0, 1]]), Topology(dp=1, ep=1)).tolist() == [[[[4 * (2**31 - 1)]]]]


def test_a_weight_for_each_layer_that_is_the_same_equals_one_number() -> None:
    case = random_case(np.random.default_rng(3), constrained=False)
    cells, slots = random_layout(case, np.random.default_rng(4))
    arguments = (case.window, cells, slots, case.topology, case.token_cap)
    one = row_shard_costs(*arguments, CostModel((), 0.3))
    many = row_shard_costs(*arguments, CostModel((), (0.3,) * case.window.num_layers))
    np.testing.assert_array_equal(one, many)


def test_the_default_and_the_dense_block() -> None:
    cost = CostModel.default(num_layers=5, token_cap=1000)
    assert cost == CostModel((Stage("full", 20.0, 7e-4 * 1000 * 5),), 1.0, "shard")
    dense = dense_block(4096)
    assert dense.alpha / dense.beta == 24576


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage("a", -1.0, 0.0), r"stage 'a'\.alpha: -1.0 is not a finite number >= 0"),
        (lambda: Stage("a", 0.0, math.nan), r"stage 'a'\.beta"),
        (lambda: Stage("a", "1", 0.0), r"stage 'a'\.alpha: '1' is not a number"),  # type: ignore[arg-type]
        (lambda: Stage("a", 10**400, 0.0), r"stage 'a'\.alpha"),
        (lambda: Stage("a", True, 0.0), r"stage 'a'\.alpha"),
        (lambda: CostModel(("full",)), r"cost\.stages\[0\]: expected a Stage"),  # type: ignore[arg-type]
        (lambda: CostModel((), math.inf), r"cost\.expert_weight"),
        (lambda: CostModel((), (1.0, -2.0)), r"cost\.expert_weight\[1\]"),
        (lambda: CostModel((), "12"), r"cost\.expert_weight"),  # type: ignore[arg-type]
        (lambda: CostModel((), 1.0, "step"), r"cost\.sync: 'step' is unknown"),  # type: ignore[arg-type]
        (lambda: CostModel((), (1.0, 2.0)).expert_weights(3), "2 weights for 3 MoE layers"),
    ],
)
def test_wrong_weights_are_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@given(SEEDS)
def test_json_round_trip(seed: int) -> None:
    case = random_case(np.random.default_rng(seed), constrained=False)
    assert CostModel.from_json(json.loads(json.dumps(case.cost.to_json()))) == case.cost


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected an object with a list 'stages'"),
        ({}, "expected an object with a list 'stages'"),
        ({"stages": [], "gamma": 1}, "unknown key 'gamma'"),
        ({"stages": [{"name": "a", "alpha": 1}]}, r"stages\[0\]: expected name, alpha and beta"),
        ({"stages": [{"name": "a", "alpha": None, "beta": 1}]}, "alpha"),
        ({"stages": [], "expert_weight": "1"}, "expert_weight"),
        ({"stages": [], "expert_weight": [None]}, r"expert_weight\[0\]"),
        ({"stages": [], "sync": "often"}, "sync"),
    ],
)
def test_wrong_files_name_file_and_field(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(value))
    with pytest.raises(FormatError, match=message) as caught:
        CostModel.load(path)
    assert str(path) in str(caught.value)


def test_a_cost_file_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"stages":[{"name":"full","alpha":104.0,"beta":37.2}],"expert_weight":1.0,"sync":"shard"}')
    assert CostModel.load(path) == CostModel((Stage("full", 104.0, 37.2),), 1.0, "shard")
