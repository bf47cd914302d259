"""The examples run and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plan_in_loop(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("plan_in_loop")
    plans = example.main(num_steps=2)
    assert len(capsys.readouterr().out.splitlines()) == 2
    first, second = plans
    assert first.topology.num_shards == 2
    ranks = [plan.logical_to_slot // (example.NUM_EXPERTS // plan.topology.ep) for plan in plans]
    moved = (ranks[0] != ranks[1]).sum(axis=1)
    assert moved.tolist() == second.moved_experts.tolist()  # against the plan in force, not against identity
    assert (moved <= 0.5 * example.NUM_EXPERTS).all()
