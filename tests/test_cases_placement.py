"""Placement cases from public bug reports that concern whole plans, each named after what went wrong there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import Constraints, Plan, Topology, Window, plan_window
from routepack_opt.cost import rank_loads
from routepack_opt.errors import FormatError, InvalidInput, TopologyError
from routepack_opt.models.finish import loads_by_rank
from routepack_opt.models.idle_ranks import fill_idle_ranks, idle_ranks_note


def window_of(demand: np.ndarray) -> Window:
    return Window(np.full(demand.shape[0], 10), demand)


def plan_of(window: Window, topology: Topology, steps: int = 2000, **options: object) -> Plan:
    plan = plan_window(window, topology, token_cap=40, budget_steps=steps, **options)  # type: ignore[arg-type]
    plan.verify(window)
    return plan


@pytest.mark.parametrize(("experts", "ranks", "valid"), [(256, 3, 4), (10, 4, 5), (8, 9, 8)])
def test_experts_that_do_not_divide_over_the_ranks_crashed_deep_inside(experts: int, ranks: int, valid: int) -> None:
    window = window_of(np.ones((12, 1, experts), dtype=int))
    with pytest.raises(TopologyError, match=rf"E = {experts} .* P = {ranks} .* valid P is {valid}") as caught:
        plan_window(window, Topology(dp=ranks, ep=ranks, shards=1), token_cap=100)
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"demand\[1,0,2\]: not a finite number"),
        (np.inf, r"demand\[1,0,2\]: not a finite number"),
        (-1.0, r"demand\[1,0,2\]: -1 is below 0"),
        (0.5, r"demand\[1,0,2\]: 0.5 is not an exact integer"),
        (2.0**40, r"demand\[1,0,2\]: 1099511627776 is above"),
    ],
)
def test_nan_and_negative_loads_were_accepted_silently(value: float, message: str) -> None:
    demand = np.ones((3, 1, 4))
    demand[1, 0, 2] = value
    with pytest.raises(InvalidInput, match=message):
        window_of(demand)


def test_layers_without_or_with_uniform_load_moved_experts_for_nothing() -> None:
    rng = np.random.default_rng(0)
    demand = rng.poisson(rng.dirichlet(np.full(8, 0.5), 4) * 40, (24, 4, 8))
    demand[:, 1] = 0
    demand[:, 2] = 5
    window = window_of(demand)
    previous = np.array([rng.permutation(8) for _ in range(4)])
    for standing in (None, previous):
        plan = plan_of(window, Topology(dp=4, ep=4, shards=2), previous=standing)
        assert plan.moved_experts[1] == 0
        assert plan.moved_experts[2] == 0
        assert plan.moved_experts[0] > 0
        expected = np.arange(8) if standing is None else standing[1]
        np.testing.assert_array_equal(plan.logical_to_slot[1], expected)


def test_a_window_without_any_demand_is_planned_by_tokens_alone() -> None:
    plan = plan_of(window_of(np.zeros((12, 2, 4), dtype=int)), Topology(dp=2, ep=2, shards=1))
    assert plan.moved_experts.sum() == 0
    assert not any("idle" in note for note in plan.notes)


def test_experts_that_stay_on_their_rank_changed_slots() -> None:
    rng = np.random.default_rng(1)
    window = window_of(rng.poisson(rng.dirichlet(np.full(8, 0.5), 2) * 40, (24, 2, 8)))
    previous = np.array([rng.permutation(8) for _ in range(2)])
    plan = plan_of(window, Topology(dp=2, ep=4, shards=1), previous=previous)
    stayed = plan.logical_to_slot // 2 == previous // 2
    assert (plan.logical_to_slot[stayed] == previous[stayed]).all()
    assert (~stayed).sum() == plan.moved_experts.sum()


def test_an_ep_rank_without_tokens_in_a_row_and_layer_hung_the_step() -> None:
    # experts 2 and 3 are never chosen: on one rank together they leave it idle, apart they cost the same
    demand = np.zeros((8, 1, 4), dtype=int)
    demand[:4, 0, 0] = 5
    demand[4:, 0, 0] = 5
    demand[:, 0, 1] = 5
    apart = plan_of(window_of(demand), Topology(dp=2, ep=2, shards=1))
    assert not any("idle" in note for note in apart.notes)
    # one expert takes everything: some rank must idle, and the plan says where
    demand[:, 0, 1] = 0
    alone = plan_of(window_of(demand), Topology(dp=2, ep=2, shards=1))
    (note,) = [note for note in alone.notes if "idle" in note]
    assert note.startswith("idle EP ranks: 1 of 2 ")
    assert note.endswith("first row 0, shard 0, layer 0, EP rank 1")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_filling_idle_ranks_costs_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, per_rank, num_layers = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    num_experts = num_ranks * per_rank
    rows = rng.integers(0, 4, (int(rng.integers(1, 4)), num_layers, num_experts)) * (rng.random(num_experts) < 0.5)
    deals = [rng.permutation(num_experts) // per_rank for _ in range(2 * num_layers)]
    rank_of, standing = np.array(deals[:num_layers]), np.array(deals[num_layers:])
    filled = fill_idle_ranks(rows, rank_of, standing, num_ranks)
    assert (filled != standing).sum() <= (rank_of != standing).sum()

    def idle(ranks: np.ndarray, layer: int) -> int:
        loads = loads_by_rank(rows[:, layer], ranks[layer], num_ranks)
        return int(((loads == 0) & (loads.sum(axis=1, keepdims=True) > 0)).sum())

    for layer in range(num_layers):
        assert (np.bincount(filled[layer], minlength=num_ranks) == per_rank).all()
        before, after = (loads_by_rank(rows[:, layer], r[layer], num_ranks).max(axis=1) for r in (rank_of, filled))
        np.testing.assert_array_equal(before, after)
        assert idle(filled, layer) <= idle(rank_of, layer)
        assert (filled[layer] == rank_of[layer]).all() or idle(filled, layer) < idle(rank_of, layer)


def test_the_note_counts_what_the_plan_leaves_idle() -> None:
    rng = np.random.default_rng(2)
    window = window_of(rng.integers(0, 4, (12, 2, 8)) * (np.arange(8) < 3))  # three busy experts on four ranks
    plan = plan_of(window, Topology(dp=4, ep=4, shards=2))
    loads = rank_loads(window, plan.cells, plan.logical_to_slot, plan.topology)
    note = idle_ranks_note(loads)
    assert note is not None
    assert note in plan.notes


def test_same_input_gave_different_plans_on_different_ranks() -> None:
    rng = np.random.default_rng(3)
    window = window_of(rng.poisson(3.0, (40, 3, 8)))
    topology = Topology(dp=4, ep=4, shards=2)
    plans = [plan_of(Window(window.lengths, window.demand), topology, steps=3000) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]
    stored = [plan.to_json() for plan in plans]
    for one in stored:
        one.pop("timings")
    assert stored[0] == stored[1] == stored[2]


def test_a_table_that_names_an_expert_twice_was_installed() -> None:
    rng = np.random.default_rng(4)
    window = window_of(rng.poisson(3.0, (12, 2, 4)))
    topology = Topology(dp=2, ep=2, shards=1)
    twice = np.array([[0, 1, 2, 3], [0, 1, 1, 3]])
    with pytest.raises(InvalidInput, match="previous: layer 1 is not a bijection"):
        plan_window(window, topology, token_cap=40, previous=twice)
    stored = plan_of(window, topology).to_json()
    stored["logical_to_slot"][0] = stored["logical_to_slot"][0][:3]
    with pytest.raises(FormatError, match=r"logical_to_slot\[0\]"):
        Plan.from_json(stored)


def test_a_share_of_moved_experts_was_exceeded_by_refinement() -> None:
    rng = np.random.default_rng(5)
    window = window_of(rng.poisson(rng.dirichlet(np.full(8, 0.5), 3) * 40, (24, 3, 8)))
    topology = Topology(dp=4, ep=4, shards=2)
    for share in (0.0, 0.25, 0.5, 1.0):
        plan = plan_of(window, topology, constraints=Constraints(max_moved=share))
        assert plan.moved_experts.max() <= share * 8
