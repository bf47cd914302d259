"""Late moves: the chosen layers against every subset of layers, scored by the exact evaluator."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import random_cost, random_demand

from routepack_opt import CostModel, Stage, Topology, Window
from routepack_opt.cost import score
from routepack_opt.errors import InvalidInput
from routepack_opt.models import late_moves as module
from routepack_opt.models.late_moves import choose_late_moves, late_move_count


def instance(seed: int, num_layers: int) -> dict[str, object]:
    """A window, a layout of it, two placements, and prices."""
    rng = np.random.default_rng(seed)
    num_experts, ep, shards, rows = 8, int(rng.choice([2, 4])), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    topology = Topology(ep=ep, shards=shards)
    lengths = rng.integers(1, 50, 3 * rows * topology.dp)
    order = rng.permutation(len(lengths)).reshape(rows, topology.dp, 3)
    return {
        "window": Window(lengths, random_demand(rng, lengths, num_layers, num_experts)),
        "cells": order.tolist(),
        "topology": topology,
        "token_cap": 200,
        "cost": random_cost(rng, num_layers),
        "placement_a": np.stack([rng.permutation(num_experts) for _ in range(num_layers)]),
        "placement_b": np.stack([rng.permutation(num_experts) for _ in range(num_layers)]),
        "seconds_per_cost_unit": float(rng.choice([0.0, 1.0, 3.0])),
        "seconds_per_expert": float(rng.choice([0.0, 0.005, 0.02, 0.1])),
        "late_moves": [None, 0.3, int(rng.integers(0, 12))][int(rng.integers(3))],
    }


def brute_force(case: dict[str, object]) -> float:
    """The most (gain - exposed time) over all subsets of layers."""
    window, topology = case["window"], case["topology"]
    a, b = case["placement_a"], case["placement_b"]
    per_rank = window.num_experts // topology.ep
    moved = (a // per_rank != b // per_rank).sum(axis=1)
    most = late_move_count(case["late_moves"], a.size)

    def first(slots: np.ndarray) -> float:
        return score(window, case["cells"], slots, topology, case["token_cap"], case["cost"]).slowest_shard

    best, base = 0.0, first(a)
    for subset in product([False, True], repeat=len(a)):
        take = np.array(subset)
        if moved[take].sum() <= most:
            gain = base - first(np.where(take[:, None], b, a))
            best = max(best, gain * case["seconds_per_cost_unit"] - moved[take].sum() * case["seconds_per_expert"])
    return best


def check(case: dict[str, object]) -> float:
    result = choose_late_moves(**case)
    window, topology = case["window"], case["topology"]
    a, b = case["placement_a"], case["placement_b"]
    assert (result.logical_to_slot == np.where(result.keeps_change[:, None], b, a)).all()
    before, after = (
        score(window, case["cells"], slots, topology, case["token_cap"], case["cost"])
        for slots in (a, result.logical_to_slot)
    )
    assert result.score == after and result.gain == before.slowest_shard - after.slowest_shard
    per_rank = window.num_experts // topology.ep
    moved = (a // per_rank != result.logical_to_slot // per_rank).sum(axis=1)
    assert (moved == result.moved_experts).all()
    assert moved.sum() <= late_move_count(case["late_moves"], a.size)
    assert result.exposed_s == pytest.approx(moved.sum() * case["seconds_per_expert"])
    assert result.gain_s > result.exposed_s or not (moved.any() or result.gain or result.exposed_s)
    return result.gain_s - result.exposed_s


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_no_subset_of_layers_does_better(seed: int, num_layers: int) -> None:
    case = instance(seed, num_layers)
    assert check(case) == pytest.approx(brute_force(case), abs=1e-9)


def test_local_search_is_near_the_best_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wanted = 0.0
    exact = 0
    for seed in range(60):
        case = instance(seed, 6) | {"seconds_per_cost_unit": 1.0}
        best = brute_force(case)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_ENUMERATE", 0)
            value = check(case)
        assert 0 <= value <= best + 1e-9
        exact += value >= best - 1e-9
        found, wanted = found + value, wanted + best
    assert exact >= 57 and found >= 0.99 * wanted


def test_two_layers_that_pay_only_together() -> None:
    # layer 0 helps shard 0, layer 1 helps shard 1: with both shards equally slow, one alone gains nothing
    demand = np.zeros((4, 2, 4), dtype=int)
    demand[:2, 0, :2] = 10
    demand[2:, 1, :2] = 10
    window = Window([10] * 4, demand)
    cells, topology = [[[0], [1], [2], [3]]], Topology(ep=2, shards=2)
    identity, spread = np.tile(np.arange(4), (2, 1)), np.tile([0, 2, 1, 3], (2, 1))
    cost = CostModel((Stage("full", 1.0, 0.0),))
    arguments = {"placement_a": identity, "placement_b": spread, "seconds_per_cost_unit": 1.0}
    both = choose_late_moves(window, cells, topology, 10, cost, **arguments, seconds_per_expert=0.1)
    assert both.keeps_change.all() and both.gain == pytest.approx(2.0) and both.exposed_s == pytest.approx(0.4)
    capped = choose_late_moves(window, cells, topology, 10, cost, **arguments, seconds_per_expert=0.1, late_moves=2)
    assert not capped.keeps_change.any() and capped.gain == 0
    dear = choose_late_moves(window, cells, topology, 10, cost, **arguments, seconds_per_expert=0.6)
    assert not dear.keeps_change.any()


@pytest.mark.parametrize("value", [-1, 1.5, True, "all", float("nan")])
def test_caps_are_shares_or_counts(value: object) -> None:
    with pytest.raises(InvalidInput, match="late_moves"):
        late_move_count(value, 10)  # type: ignore[arg-type]
    assert [late_move_count(v, 10) for v in (None, 0, 7, 70, 0.0, 0.3, 1.0)] == [10, 0, 7, 10, 0, 3, 10]
