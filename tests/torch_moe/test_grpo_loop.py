"""The whole loop on four gloo ranks: metrics, placements that change, a restart that repeats the run bit for bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

from routepack_opt.integrations.torch_moe.grpo.metrics import read_metrics

pytestmark = pytest.mark.distributed

TIMES = ("seconds", "seconds_by_part", "exposed_s", "overlapped_s", "place_s", "pack_s")
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "expert_size": 16},
    "parallel": {"ep": 2, "shards": 2, "backend": "gloo", "timeout_s": 30},
    "task": {"warm_start_steps": 8, "warm_start_batch": 32, "warm_start_lr": 0.02, "partial_credit": 0.5},
    "sampling": {"prompts": 6, "group_size": 4},
    "plan": {"token_cap": 40, "budget_steps": 200, "seconds_per_unit": 0.01, "seconds_per_expert": 0.005},
    "run": {"steps": 4, "checkpoint_every": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"run__steps": 2},
    "every-rank": {"run__steps": 2, "plan__planner": "every-rank"},
    "plain": {"plan__routepack": False},
    "one shard": {"run__steps": 2, "parallel__ep": 4, "parallel__shards": 1, "plan__overlap": False},
    "bf16": {"run__steps": 2, "run__dtype": "bfloat16", "optim__shard_expert_state": True},
    "kl": {"run__steps": 2, "optim__kl_weight": 0.1},
}


def settings(folder: Path, name: str, **changes: Any) -> dict[str, dict[str, Any]]:
    table = copy.deepcopy(SETTINGS)
    table["run"]["out"] = str(folder / name)
    for key, value in changes.items():
        section, _, entry = key.partition("__")
        table.setdefault(section, {})[entry] = value
    return table


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return without_times(read_metrics(folder / name / "metrics.jsonl"))


Runs = tuple[Path, dict[str, list[dict[str, Any]]]]  # their folder; summary and state of each variant, by rank


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All variants in one start of four ranks: starting costs more than training."""
    folder = tmp_path_factory.mktemp("grpo")
    tables = [settings(folder, name, **changes) for name, changes in VARIANTS.items()]
    by_rank = run_ranks("grpo_workers:train", 4, {"tables": tables}, 120)
    return folder, dict(zip(VARIANTS, map(list, zip(*by_rank, strict=True)), strict=True))


def test_metrics_and_timeline(runs: Runs) -> None:
    folder, results = runs
    lines = read_metrics(folder / "whole" / "metrics.jsonl")
    summary = results["whole"][0]["summary"]
    assert summary["steps"] == len(lines) == 4 and summary["placements_changed"] > 0
    assert any(line["grad_norm"] > 0 for line in lines) and any(line["reward"] > 0 for line in lines)
    for line in lines:
        assert line["moved_bytes"] == line["planned_bytes"]
        assert (line["moved_experts"] > 0) == (line["moved_bytes"] > 0)
        assert 0 <= line["reward"] <= 1 and line["rows"] >= 1 and line["tokens"] > line["answer_tokens"] > 0
        assert line["predicted_gain"] > -1e-9 and line["load_after"] >= 1
        assert {"sample", "seal", "plan and move", "exchange", "train"} <= set(line["seconds_by_part"])
    events = json.loads((folder / "whole" / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert {"sample", "train", "pack"} <= {event["name"] for event in events}


def test_a_resumed_run_equals_an_undisturbed_one(runs: Runs) -> None:
    folder, results = runs
    assert results["parts"][0]["state"]["step"] == 2
    tables = [settings(folder, "parts")]
    resumed = run_ranks("grpo_workers:train", 4, {"tables": tables, "resume": True}, 60)
    assert metrics(folder, "parts") == metrics(folder, "whole")
    for rank, undisturbed in enumerate(results["whole"]):
        assert resumed[rank][0]["state"] == undisturbed["state"]
    assert results["whole"][0]["state"]["step"] == 4 and results["whole"][0]["state"]["moved"] > 0


def test_every_rank_may_plan_the_same(runs: Runs) -> None:
    assert metrics(runs[0], "every-rank") == metrics(runs[0], "whole")[:2]


def test_without_routepack_nothing_moves_and_training_is_the_same(runs: Runs) -> None:
    folder, results = runs
    summary = results["plain"][0]["summary"]
    assert summary["moved_experts"] == summary["moved_bytes"] == summary["placements_changed"] == 0
    assert results["plain"][0]["state"]["moved"] == 0
    for mine, theirs in zip(metrics(folder, "whole")[:2], metrics(folder, "plain"), strict=False):
        assert mine["reward"] == theirs["reward"] and mine["tokens"] == theirs["tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert theirs["predicted_gain"] == 0 and theirs["load_before"] == theirs["load_after"]


def test_another_topology_trains_the_same(runs: Runs) -> None:
    for mine, theirs in zip(metrics(runs[0], "one shard"), metrics(runs[0], "whole"), strict=False):
        assert mine["reward"] == theirs["reward"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_bfloat16_moves_masters_too(runs: Runs) -> None:
    parameters, num_bytes = 3 * 16 * 16, 2 + 4 / 2 + 8 / 2  # weight; master and two moments, halved over two shards
    for line in read_metrics(runs[0] / "bf16" / "metrics.jsonl"):
        assert line["moved_bytes"] == line["planned_bytes"] == line["moved_experts"] * parameters * num_bytes


def test_the_reference_is_the_policy_after_the_warm_start(runs: Runs) -> None:
    first, second = metrics(runs[0], "kl")
    assert 0 <= first["kl"] < 1e-6 < second["kl"]
    assert first["reward"] == metrics(runs[0], "whole")[0]["reward"]
