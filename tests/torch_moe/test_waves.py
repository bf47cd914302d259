"""Two waves: the first moves while packing runs, the second only what pays; the plan in force is one that verifies."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.wave_settings import WaveSettings

WORKERS = "wave_workers"


def run_steps(ep: int, shards: int, settings: dict[str, Any], **kwargs: Any) -> list[list[dict[str, Any]]]:
    """The facts of every step [step][rank], with what must always hold checked."""
    results = run_ranks(
        f"{WORKERS}:steps", 4, {"ep": ep, "shards": shards, "settings": settings, "num_steps": 3, **kwargs}, 90
    )
    by_step = [list(facts) for facts in zip(*(rank["steps"] for rank in results), strict=True)]
    for facts in by_step:
        assert len({fact["digest"] for fact in facts}) == 1
        for fact in facts:
            movement = fact["movement"]
            assert fact["right"] and fact["in_force"] and fact["counted"]
            assert movement["moved_bytes"] == movement["planned_bytes"]
            assert movement["num_moved"] >= fact["num_moved"]
            for wave in movement["waves"]:
                assert wave["moved_bytes"] == wave["planned_bytes"] and wave["peak_extra_bytes"] <= 300
                assert wave["exposed_s"] >= 0 and wave["overlapped_s"] >= 0
                assert wave["exposed_s"] + wave["overlapped_s"] == pytest.approx(wave["seconds"])
    assert len({rank["version"] for rank in results}) == 1
    assert sum(fact[0]["num_moved"] for fact in by_step) > 0
    return by_step


@pytest.mark.distributed
@pytest.mark.parametrize("planner", ["first", "every"])
@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_two_waves_run_the_plan_that_verifies(ep: int, shards: int, planner: str) -> None:
    steps = run_steps(ep, shards, {"budget_steps": 20000, "planner": planner})
    assert all(fact["movement"]["waves"][0]["name"] == "first" for facts in steps for fact in facts)
    assert any(len(facts[0]["movement"]["waves"]) == 2 for facts in steps), "co-refinement never moved an expert"
    for facts in steps:
        for wave in facts[0]["movement"]["waves"][1:]:
            assert wave["name"] == "late" and wave["predicted_gain"] > 0 and wave["overlapped_s"] == 0


@pytest.mark.distributed
def test_without_overlap_everything_moves_after_the_plan() -> None:
    for facts in run_steps(4, 1, {"budget_steps": 20000, "overlap": False}):
        (wave,) = facts[0]["movement"]["waves"]
        assert wave["name"] == "all" and wave["overlapped_s"] == 0
        assert facts[0]["movement"]["num_moved"] == facts[0]["num_moved"]  # no expert travels twice


@pytest.mark.distributed
def test_a_time_budget_and_measured_prices() -> None:
    steps = run_steps(2, 2, {"budget_s": 0.3}, measured=True)
    late = [wave for facts in steps[1:] for wave in facts[0]["movement"]["waves"][1:]]
    assert all(wave["predicted_gain_s"] > 0 for wave in late)


@pytest.mark.distributed
def test_late_moves_that_do_not_pay_stay() -> None:
    prices = {"seconds_per_cost_unit": 1e-9, "seconds_per_expert": 1.0}
    steps = run_steps(4, 1, {"budget_steps": 20000, **prices})
    assert all(len(facts[0]["movement"]["waves"]) == 1 for facts in steps)
    dropped = [facts[0]["movement"]["dropped_moves"] for facts in steps]
    assert any(dropped)
    for facts, count in zip(steps, dropped, strict=True):
        assert any("not worth the wait" in note for note in facts[0]["notes"]) == (count > 0)
        assert facts[0]["max_moved"] is not None or not facts[0]["worse_than_seed"]


@pytest.mark.distributed
@pytest.mark.parametrize("cap", [0, 2, 0.0, 0.25])
def test_caps_of_late_moves(cap: float) -> None:
    most = cap if isinstance(cap, int) else int(cap * 24)
    for facts in run_steps(2, 2, {"budget_steps": 20000, "late_moves": cap}):
        late = facts[0]["movement"]["waves"][1:]
        assert sum(sum(wave["moved_experts"]) for wave in late) <= most


@pytest.mark.distributed
def test_both_waves_together_respect_max_moved() -> None:
    for facts in run_steps(4, 1, {"budget_steps": 20000, "constraints": {"max_moved": 0.25}}):
        assert facts[0]["num_moved"] <= 6 and facts[0]["max_moved"] == 0.25


@pytest.mark.distributed
@pytest.mark.parametrize(
    "settings", [{"budget_steps": 10}, {"budget_steps": 10, "overlap": False}, {"budget_steps": 10, "planner": "every"}]
)
def test_a_window_that_cannot_be_planned_leaves_the_placement_whole(settings: dict[str, Any]) -> None:
    results = run_ranks(f"{WORKERS}:impossible", 4, {"ep": 2, "shards": 2, "settings": settings})
    for rank, result in enumerate(results):
        own = rank == 0 or "planner" in settings
        assert result["error"] == ("Infeasible" if own else "PlanningFailed"), result
        assert "dummy sample" in result["message"] and result["whole"] and result["afterwards"]


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
