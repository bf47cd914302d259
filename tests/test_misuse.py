"""Wrong types and senseless values handed to the public API: each ends in one line of a RoutePackError."""

from __future__ import annotations

import pickle
import warnings
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import routepack_opt as rp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = np.arange(1, 13)
DEMAND = np.ones((12, 2, 4), np.int64)
WINDOW = rp.Window(LENGTHS, DEMAND, group_ids=np.arange(12) // 2)
TOPOLOGY = rp.Topology(ep=2)
COST = rp.CostModel((rp.Stage("full", 1.0, 1.0),))
SLOTS = np.tile(np.arange(4), (2, 1))
CELLS = [[list(range(6)), list(range(6, 12))]]
ROUTES = np.ones((3, 2, 1), np.int16)


class Anything:
    """An object no parameter expects."""


VALUES: list[Any] = [
    None, "", "x", "é😀\x00", b"x", [], [1, 2], (), {}, {"a": 1}, {1, 2}, [[1], [1, 2]], [None], ["a"], [1.5],
    1.5, -1, 0, 10**30, -(10**30), float("nan"), float("inf"), True, 1j, Fraction(1, 2), range(3),
    np.float32(1.5), np.array(3), np.array([1, 2]), np.array(["a"]), np.array([None]), np.array([1.5, np.nan]),
    np.ma.array([1, 2, 3], mask=[0, 1, 0]), np.array([2**63], dtype=np.uint64), np.zeros(0), np.array([True, False]),
    np.datetime64("2020"), Anything(), Anything, len,
]  # fmt: skip


def plan_with(**changed: Any) -> rp.Plan:
    arguments: dict[str, Any] = {"window": WINDOW, "topology": TOPOLOGY, "token_cap": 100, "budget_steps": 0}
    arguments |= changed
    return rp.plan_window(arguments.pop("window"), arguments.pop("topology"), **arguments)


def keyword(call: Callable[..., Any], name: str, fixed: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda value: call(**{**fixed, name: value})


def score_with(**changed: Any) -> rp.Score:
    fixed: dict[str, Any] = {"window": WINDOW, "cells": CELLS, "logical_to_slot": SLOTS, "topology": TOPOLOGY}
    return rp.score(**{**fixed, "token_cap": 100, "cost": COST, **changed})


def _entry_points() -> dict[str, Callable[[Any], Any]]:
    points: dict[str, Callable[[Any], Any]] = {
        "CostModel.load": rp.CostModel.load,
        "CostModel.from_json": rp.CostModel.from_json,
        "CostModel.for_model": lambda value: rp.CostModel.for_model(value, token_cap=100),
        "Constraints.from_json": rp.Constraints.from_json,
        "Window.load": rp.Window.load,
        "Plan.load": rp.Plan.load,
        "Plan.from_json": rp.Plan.from_json,
        "Plan.verify": lambda value: plan_with().verify(value),
        "verify_plan": lambda value: rp.verify_plan(value, WINDOW),
        "read_routes": lambda value: rp.read_routes(value, num_experts=4),
        "count_experts": lambda value: rp.count_experts(value, 4),
        "from_routes.routes": lambda value: rp.Window.from_routes(value, [3], 4),
        "from_routes.routes[0]": lambda value: rp.Window.from_routes([value], [3], 4),
        "from_routes.lengths": lambda value: rp.Window.from_routes([ROUTES], value, 4),
        "from_routes.num_experts": lambda value: rp.Window.from_routes([ROUTES], [3], value),
        "from_routes.moe_layers": lambda value: rp.Window.from_routes([ROUTES], [3], 4, value),
        "remap_routes": lambda value: rp.remap_routes(value, SLOTS),
        "remap_routes.slots": lambda value: rp.remap_routes(ROUTES, value),
    }
    window_fixed = {"lengths": LENGTHS, "demand": DEMAND}
    for call, names, fixed in (
        (rp.Window, ("lengths", "demand", "sample_ids", "group_ids", "moe_layers", "top_k", "counts", "meta"),
         window_fixed),
        (rp.Topology, ("dp", "ep", "shards"), {"ep": 2}),
        (rp.Topology.from_sizes, ("world", "tp", "cp", "pp", "ep", "etp"), {"world": 16, "ep": 8}),
        (rp.Stage, ("alpha", "beta"), {"name": "full", "alpha": 1.0, "beta": 1.0}),
        (rp.CostModel, ("stages", "expert_weight", "sync"), {"stages": COST.stages}),
        (rp.CostModel.default, ("num_layers", "token_cap"), {"num_layers": 2, "token_cap": 100}),
        (rp.CostModel.for_model, ("token_cap", "tp", "cp", "etp", "sync"), {"model": "mixtral-8x7b", "token_cap": 9}),
        (rp.dense_block, ("hidden", "token_cap"), {"hidden": 64}),
        (rp.Constraints, tuple(rp.Constraints.__dataclass_fields__), {}),
        (plan_with, ("window", "topology", "token_cap", "cost", "seed", "device", "previous", "constraints", "stop",
                     "co_refine"), {}),
        (score_with, ("window", "cells", "logical_to_slot", "topology", "token_cap", "cost"), {}),
        (rp.pad_routes, ("num_rows", "num_layers", "top_k", "num_experts", "num_ranks", "logical_to_slot"),
         {"num_rows": 2, "num_layers": 2, "top_k": 1, "num_experts": 4, "num_ranks": 2}),
    ):  # fmt: skip
        for name in names:
            points[f"{call.__qualname__}({name}=)"] = keyword(call, name, fixed)
    return points


ENTRY_POINTS = _entry_points()


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_any_value_is_taken_or_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for value in VALUES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                ENTRY_POINTS[name](value)
            except rp.RoutePackError as error:
                assert str(error) and "\n" not in str(error), value
            except Exception as error:
                pytest.fail(f"{name} given {value!r}: {type(error).__name__}: {error}")


def test_a_mistyped_rank_count_does_not_fill_the_memory() -> None:
    for sizes in ({"dp": 10**12}, {"ep": 10**12}, {"ep": 8, "shards": 10**12}, {"ep": 2**15, "shards": 2**15}):
        with pytest.raises(rp.errors.TopologyError, match="above 1048576"):
            rp.Topology(**sizes)


@pytest.mark.parametrize("budget", [-1, "1", None, float("nan"), float("inf"), True, [1.0], np.array([1.0, 2.0])])
def test_a_senseless_budget_is_refused(budget: Any) -> None:
    with pytest.raises(rp.RoutePackError, match="budget_s"):
        plan_with(budget_steps=None, budget_s=budget)


def test_numpy_scalars_are_numbers() -> None:
    constraints = rp.Constraints(max_moved=np.float32(0.5), min_rows=np.int8(1))
    plan = plan_with(token_cap=np.int32(100), seed=np.uint8(3), constraints=constraints)
    assert plan.to_json()["token_cap"] == 100
    plan_with(budget_steps=None, budget_s=np.float32(0.0))


def test_errors_survive_the_way_back_from_a_worker_process() -> None:
    for error in (
        rp.errors.VerificationError("score", "differs"),
        rp.errors.Infeasible("too few", dummy_samples=3),
        rp.errors.FormatError("w.npz: truncated"),
    ):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_sizes_and_weights_that_would_overflow_are_refused() -> None:
    for name in ("min_rows", "row_multiple", "pad_multiple", "max_samples_per_cell"):
        with pytest.raises(rp.RoutePackError, match=f"constraints.{name}: 9223372036854775808 is above 2147483647"):
            rp.Constraints(**{name: 2**63})
    with pytest.raises(rp.RoutePackError, match=r"alpha: 1e\+308 is above 1e\+100"):
        rp.Stage("full", 1e308, 0.0)
    huge = rp.CostModel((rp.Stage("full", 1e100, 1e100),), expert_weight=1e100)
    plan = plan_with(cost=huge, token_cap=12, constraints=rp.Constraints(pad_multiple=6))
    plan.verify(WINDOW)
