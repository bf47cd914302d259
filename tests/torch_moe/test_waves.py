"""Two waves: the first moves while packing runs, the second only what pays; the plan in force is one that verifies."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.wave_settings import WaveSettings

WORKERS = "wave_workers"


PRICES = {"seconds_per_cost_unit": 1e-9, "seconds_per_expert": 1.0}
Facts = list[list[dict[str, Any]]]  # [step][rank]


def run_steps(ep: int, shards: int, runs: list[dict[str, Any]]) -> list[Facts]:
    """The facts of every run, with what must always hold checked."""
    kwargs = {"ep": ep, "shards": shards, "runs": runs, "num_steps": 3}
    results = run_ranks(f"{WORKERS}:steps", 4, kwargs, 90)
    facts = []
    for number in range(len(runs)):
        assert len({rank[number]["version"] for rank in results}) == 1
        steps = [list(step) for step in zip(*(rank[number]["steps"] for rank in results), strict=True)]
        assert sum(step[0]["num_moved"] for step in steps) > 0
        for step in steps:
            check_step(step)
        facts.append(steps)
    return facts


def check_step(step: list[dict[str, Any]]) -> None:
    assert len({fact["digest"] for fact in step}) == 1
    for fact in step:
        movement = fact["movement"]
        assert fact["right"] and fact["in_force"] and fact["counted"]
        assert movement["moved_bytes"] == movement["planned_bytes"]
        assert movement["num_moved"] >= fact["num_moved"]
        assert fact["max_moved"] is not None or not fact["worse_than_seed"]
        for wave in movement["waves"]:
            assert wave["moved_bytes"] == wave["planned_bytes"] and wave["peak_extra_bytes"] <= 300
            assert wave["exposed_s"] >= 0 and wave["overlapped_s"] >= 0
            assert wave["exposed_s"] + wave["overlapped_s"] == pytest.approx(wave["seconds"])


def late_waves(steps: Facts) -> list[dict[str, Any]]:
    return [wave for step in steps for wave in step[0]["movement"]["waves"] if wave["name"] == "late"]


@pytest.mark.distributed
@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_two_waves_run_the_plan_that_verifies(ep: int, shards: int) -> None:
    first, every, timed = run_steps(
        ep,
        shards,
        [{"budget_steps": 20000}, {"budget_steps": 20000, "planner": "every"}, {"budget_s": 0.2, "measured": True}],
    )
    assert [step[0]["digest"] for step in first] == [step[0]["digest"] for step in every]
    assert late_waves(first), "co-refinement never moved an expert"
    for wave in late_waves(first) + late_waves(timed):
        assert wave["predicted_gain"] > 0 and wave["overlapped_s"] == 0
    assert all(wave["predicted_gain_s"] > 0 for wave in late_waves(timed[1:]))
    assert all(step[0]["movement"]["waves"][0]["name"] == "first" for step in first + every + timed)


@pytest.mark.distributed
def test_one_wave_dear_moves_and_max_moved() -> None:
    runs = [
        {"budget_steps": 20000, "overlap": False},
        {"budget_steps": 20000, **PRICES},
        {"budget_steps": 20000, "constraints": {"max_moved": 0.25}},
    ]
    after_the_plan, dear, limited = run_steps(4, 1, runs)
    for step in after_the_plan:
        (wave,) = step[0]["movement"]["waves"]
        assert wave["name"] == "all" and wave["overlapped_s"] == 0
        assert step[0]["movement"]["num_moved"] == step[0]["num_moved"]  # no expert travels twice
    assert not late_waves(dear)
    assert any(step[0]["movement"]["dropped_moves"] for step in dear)
    for step in dear:
        left_out = any("not worth the wait" in note for note in step[0]["notes"])
        assert left_out == (step[0]["movement"]["dropped_moves"] > 0)
    assert all(step[0]["num_moved"] <= 6 and step[0]["max_moved"] == 0.25 for step in limited)


@pytest.mark.distributed
def test_caps_of_late_moves() -> None:
    caps = [0, 2, 0.0, 0.25]
    runs = run_steps(2, 2, [{"budget_steps": 20000, "late_moves": cap} for cap in caps])
    for cap, steps in zip(caps, runs, strict=True):
        most = cap if isinstance(cap, int) else int(cap * 24)
        assert all(sum(wave["moved_experts"]) <= most for wave in late_waves(steps))


@pytest.mark.distributed
def test_a_window_that_cannot_be_planned_leaves_the_placement_whole() -> None:
    runs = [{"budget_steps": 10, "overlap": False}, {"budget_steps": 10}, {"budget_steps": 10, "planner": "every"}]
    for rank, results in enumerate(run_ranks(f"{WORKERS}:impossible", 4, {"ep": 2, "shards": 2, "runs": runs})):
        for settings, result in zip(runs, results, strict=True):
            own = rank == 0 or "planner" in settings
            assert result["error"] == ("Infeasible" if own else "PlanningFailed"), result
            assert "dummy sample" in result["message"] and result["whole"] and result["afterwards"]


@pytest.mark.distributed
def test_no_window_or_one_of_another_model_is_one_line_on_all() -> None:
    """The rank that plans ended in an AssertionError."""
    wanted = ["rank 0 plans and has none", "(2, 8) MoE layers and experts, the placement in force has (3, 8)"] * 2
    for rank, results in enumerate(run_ranks(f"{WORKERS}:wrong_windows", 4, {"ep": 2, "shards": 2})):
        for message, result in zip(wanted, results, strict=True):
            assert result["error"] == ("PlanningFailed" if rank else "InvalidInput"), result
            assert message in result["message"] and result["whole"]


@pytest.mark.distributed
def test_ranks_that_count_differently_do_not_move() -> None:
    for result in run_ranks(f"{WORKERS}:different_windows", 4, {"ep": 4, "shards": 1}):
        assert result["error"] == "PlacementDisagreement" and "ranks 0 and 3" in result["message"]
        assert result["untouched"] and result["version"] == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"planner": "all"}, "planner"),
        ({"planner": "every"}, "budget_steps"),
        ({"late_moves": 2.5}, "late_moves"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"seconds_per_expert": float("nan")}, "seconds_per_expert"),
    ],
)
def test_settings_are_checked_at_the_door(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        WaveSettings(token_cap=10, **settings)
