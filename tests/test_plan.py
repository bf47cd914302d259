"""Plan: equality, JSON of the contract, files, refusals that name the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from naive_plan import naive_plan, small_window

from routepack_opt import Constraints, CostModel, Plan, Stage, Topology, plan_window
from routepack_opt.errors import FormatError, VerificationError

if TYPE_CHECKING:
    from pathlib import Path

TOPOLOGY = Topology(dp=4, ep=2, shards=2)
KEYS = {  # architecture.md section 4
    "format", "window", "constraints", "cell_tokens", "total_tokens", "topology", "token_cap", "cost", "rows",
    "rows_lower_bound", "rows_status", "cells", "logical_to_slot", "score", "seed_score", "bound", "gap",
    "certificates", "timings", "seed", "version",
}  # fmt: skip


def good() -> dict[str, Any]:
    return naive_plan(small_window(), TOPOLOGY, 120, num_rows=2)


def test_plan_json_has_the_keys_of_the_contract() -> None:
    plan = plan_window(small_window(), TOPOLOGY, token_cap=120, budget_steps=10, seed=4)
    stored = plan.to_json()
    assert set(stored) >= KEYS
    assert stored["format"] == "routepack.plan/1"
    assert stored["seed"] == 4
    assert set(stored["window"]) >= {"samples", "layers", "experts", "sha256"}
    assert set(stored["topology"]) == {"dp", "ep", "shards"}
    assert set(stored["certificates"]) >= {"rows", "placement", "layout"}
    assert len(stored["score"]) == 3
    json.dumps(stored, allow_nan=False)


def test_json_and_file_round_trips(tmp_path: Path) -> None:
    window = small_window()
    cost = CostModel((Stage("a", 1.0, 2.0), Stage("b", 0.1, 0.0)), expert_weight=(0.5, 1.5), sync="row")
    rules = Constraints(row_multiple=2, pad_multiple=2, max_samples_per_cell=6, max_moved=0.5)
    topology = Topology(dp=4, ep=2, shards=[[0, 3], [1, 2]])
    plan = plan_window(window, topology, token_cap=120, cost=cost, constraints=rules, budget_steps=50)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.timings == plan.timings
    assert (again.cost, again.constraints, again.topology) == (cost, rules, topology)
    assert again.score == plan.score
    assert again.logical_to_slot.dtype == np.int64
    assert list(tmp_path.iterdir()) == [path]  # no temporary file stays


def test_plans_are_equal_apart_from_timings() -> None:
    plan = Plan.from_json(good())
    assert plan == dataclasses.replace(plan, timings={"total_s": 9.0})
    assert plan != dataclasses.replace(plan, seed=1)
    assert plan != dataclasses.replace(plan, logical_to_slot=plan.logical_to_slot[:, ::-1])
    assert plan != "plan"
    with pytest.raises(TypeError):
        hash(plan)


def test_slot_to_logical_is_the_inverse() -> None:
    plan = Plan.from_json(good())
    rng = np.random.default_rng(0)
    plan = dataclasses.replace(plan, logical_to_slot=np.array([rng.permutation(8) for _ in range(2)]))
    for slots, experts in zip(plan.logical_to_slot, plan.slot_to_logical, strict=True):
        assert (experts[slots] == np.arange(8)).all()
    assert plan.slot_to_logical.dtype == np.int64


def test_verify_compares_with_the_window_it_was_made_for() -> None:
    plan = Plan.from_json(good())
    plan.verify(small_window())
    with pytest.raises(VerificationError, match="sha256"):
        plan.verify(small_window(seed=1))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("format", "routepack.plan/2", "'format'"),
        ("rows", 1.5, "'rows'"),
        ("rows", 0, "'rows'"),
        ("rows", True, "'rows'"),
        ("token_cap", 2**70, "'token_cap'"),
        ("seed", "0", "'seed'"),
        ("score", [1.0, 2.0], "'score'"),
        ("score", [1.0, 2.0, "3"], "'score'"),
        ("seed_score", 3, "'seed_score'"),
        ("seed_rows", 0, "'seed_rows'"),
        ("bound", None, "'bound'"),
        ("gap", "0", "'gap'"),
        ("rows_status", "optimal", "'rows_status'"),
        ("cells", [[1]], r"'cells\[0\]\[0\]'"),
        ("cells", 3, "'cells'"),
        ("cell_tokens", [[1.5]], "'cell_tokens'"),
        ("logical_to_slot", [[0]], "'logical_to_slot"),
        ("moved_experts", [-1, 0], "'moved_experts'"),
        ("window", [], "'window'"),
        ("window/sha256", 3, "'window.sha256'"),
        ("topology/shards", 2, "'topology.shards'"),
        ("topology/shards", [[0, 1], [1, 2]], "shards"),
        ("cost/stages", 1, "stages"),
        ("constraints/min_rows", 0, "min_rows"),
        ("constraints/unknown", 0, "unknown"),
        ("timings", {"a": "b"}, "'timings'"),
        ("notes", [1], "'notes'"),
        ("version", 1, "'version'"),
    ],
)
def test_wrong_fields_are_named(path: str, value: Any, field: str) -> None:
    stored = good()
    *parents, last = path.split("/")
    target = stored
    for key in parents:
        target = target[key]
    target[last] = value
    with pytest.raises(FormatError, match=field) as caught:
        Plan.from_json(stored, "old.json")
    assert str(caught.value).startswith("old.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_missing_fields_are_named(key: str) -> None:
    stored = copy.deepcopy(good())
    del stored[key]
    with pytest.raises(FormatError, match=f"'{key}'"):
        Plan.from_json(stored)


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("", "[]", "{", '{"format": NaN}', "nul"):
        path.write_text(text)
        with pytest.raises(FormatError) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)
