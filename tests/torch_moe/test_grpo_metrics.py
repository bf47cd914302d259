"""Metrics lines survive restarts and crashes; the trace is one that viewers read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from typing import TYPE_CHECKING

from routepack_opt.errors import FormatError
from routepack_opt.integrations.torch_moe.grpo.metrics import MetricsWriter, read_metrics
from routepack_opt.integrations.torch_moe.grpo.run_folder import free_folder
from routepack_opt.integrations.torch_moe.grpo.summary import summarise
from routepack_opt.integrations.torch_moe.grpo.timeline import Timeline
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, first_step: int, steps: range, value: float) -> None:
    writer = MetricsWriter(folder, first_step=first_step)
    for step in steps:
        writer.write(step, {"reward": value, "part": {"a": float("nan")}})
    writer.close()


def test_a_restart_replaces_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 0, range(5), 1.0)
    write(tmp_path, 3, range(3, 6), 2.0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["reward"] for line in lines] == [1.0] * 3 + [2.0] * 3
    assert lines[0]["part"] == {"a": None}


def test_a_line_cut_short_is_left_out_and_a_damaged_one_named(tmp_path: Path) -> None:
    write(tmp_path, 0, range(2), 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert len(read_metrics(path)) == 2
    path.write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(FormatError, match=r"metrics\.jsonl: line 2"):
        read_metrics(path)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(0, {"reward": 0.5, "seconds_by_part": {"sample": 0.1}, "skipped": False})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_summary_averages_both_ends() -> None:
    lines = [
        {"step": k, "reward": k / 100, "moved_experts": k % 2, "moved_bytes": 8 * (k % 2), "exposed_s": 0.5,
         "predicted_gain": 0.1, "seconds": 1.0}
        for k in range(40)
    ]  # fmt: skip
    summary = summarise(lines, "run")
    assert summary.first_reward == pytest.approx(0.045) and summary.last_reward == pytest.approx(0.345)
    assert summary.moved_experts == summary.placements_changed == 20 and summary.moved_bytes == 160
    assert summary.exposed_s == 20.0 and summary.seconds == 40.0 and summary.steps == 40


def test_runs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert free_folder(str(out)) == 1
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    assert free_folder(str(out)) == 3


def test_the_trace_holds_the_last_steps(tmp_path: Path) -> None:
    timeline = Timeline(keep_steps=2)
    for step in range(3):
        timeline.begin_step(step)
        with timeline.span("sample"), timeline.span("inner"):
            pass
        timeline.add("pack", 1.0, 0.5, lane=1)
    assert timeline.seconds["pack"] == 0.5 and timeline.seconds["sample"] >= timeline.seconds["inner"]
    timeline.write(tmp_path / "t.json", ParallelMesh.single())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {1, 2} and len(spans) == 6
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == 0 for event in spans)
