"""With RoutePack planning every step and without it: the same training run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

pytestmark = pytest.mark.distributed
STEPS = 20
TOLERANCE = 1e-4
STATE = ("weight", "exp_avg", "exp_avg_sq")
WRONG = {"left behind": "exp_avg", "swapped": "exp_avg_sq"}  # the moment of which one expert's is not where it belongs


def run(ep: int, shards: Any, wrong: list[str], steps: int = STEPS, **options: Any) -> dict[str, Any]:
    kwargs = {"ep": ep, "shards": shards, "steps": steps, "wrong": wrong} | options
    results = run_ranks("same_training_workers:with_and_without", 4, kwargs, timeout_s=120)
    first: dict[str, Any] = results[0]
    assert len(first["moved"]) == steps and min(first["moved"]) > 0, first["moved"]
    assert min(first["sent_bytes"]) > 0
    assert first["packed_differently"] == steps
    return first


@pytest.mark.parametrize(("ep", "shards", "shard_expert_state"), [(2, 2, False), (4, 1, False), (2, 2, True)])
def test_twenty_steps_are_the_same_and_a_wrong_move_is_not(ep: int, shards: Any, shard_expert_state: bool) -> None:
    found = run(ep, shards, list(WRONG), shard_expert_state=shard_expert_state)
    for name in ("loss", *STATE):
        assert found["same"][name] <= TOLERANCE, f"{name}: {found['same']}"
        assert found["early"][name] <= TOLERANCE, f"{name}: {found['early']}"
    for wrong, moment in WRONG.items():
        assert found[wrong][moment] > 10 * TOLERANCE, f"{wrong}: {found[wrong]}"
        assert found[wrong]["weight"] > 10 * TOLERANCE, f"{wrong}: {found[wrong]}"


def test_shards_of_ranks_in_any_order() -> None:
    found = run(2, [[3, 0], [1, 2]], [], steps=6, shard_expert_state=True)
    for name in ("loss", *STATE):
        assert found["same"][name] <= TOLERANCE, f"{name}: {found['same']}"


def test_bfloat16_with_masters() -> None:
    """8 bits of mantissa: the run is the same up to that, a wrong move stands out from it."""
    found = run(2, 2, list(WRONG), dtype="bfloat16", shard_expert_state=True)
    assert found["same"]["loss"] <= 1e-3, found["same"]
    assert found["same"]["master rms"] <= 1e-2, found["same"]
    for wrong in WRONG:
        assert found[wrong]["master rms"] > 3 * found["early"]["master rms"], f"{found[wrong]} {found['early']}"
