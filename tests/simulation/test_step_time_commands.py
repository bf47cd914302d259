"""The commands replay, calibrate and simulate: tables, JSON, and one line for each refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from step_time_cases import small_plan, small_window

from routepack_opt.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")
pytest.importorskip("yaml")
SIZES = ["--hidden", "16", "--expert-width", "16", "--heads", "2", "--head-dim", "8"]
SHEET = """
gpu: {mem_bw: 1.0e+12, bfloat16_tc_flops: 1.0e+14}
node: {num_gpus_per_node: 2, inter_node_bw: 1.0e+9, intra_node_bw: 1.0e+10, p2p_latency: 1.0e-6}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step_time")
    window = small_window(num_samples=24)
    window.save(path / "w.npz")
    small_plan(window).save(path / "p.json")
    small_window(7).save(path / "other.npz")
    (path / "sheet.yaml").write_text(SHEET)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of several test runs on few cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_planted_times(path: Path) -> None:
    value = json.loads(path.read_text())
    for entry in value["attention"]:
        entry["seconds"] = 1e-5 + 1e-6 * entry["tokens"] + 1e-9 * entry["squares"]
    for entry in value["experts"]:
        entry["seconds"] = 1e-5 + 2e-6 * entry["active"] + 1e-7 * entry["tokens"]
    path.write_text(json.dumps(value))


def call(folder: Path, *arguments: str) -> int:
    return main([a if a.startswith("-") or not (folder / a).exists() else str(folder / a) for a in arguments])


def test_replay_then_calibrate_then_simulate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(folder / "m.json")
    base = ["--baseline", "--budget", "0.05", "--repeats", "1", *SIZES]
    assert call(folder, "replay", "p.json", "w.npz", *base, "--save", saved, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert [layout["name"] for layout in value["layouts"]] == ["baseline", "reorder", "full"]
    assert value["layouts"][0]["throughput_change"] == 0 and value["backward"] is True
    for layout in value["layouts"]:
        shards = [s["attention_s"] + s["experts_s"] for s in layout["shards"]]
        assert layout["step_s"] == pytest.approx(max(shards))
    with_planted_times(Path(saved))  # kernels this small take no time that depends on their size
    cost, step = str(folder / "c.json"), str(folder / "s.json")
    assert call(folder, "calibrate", saved, "-o", cost, "--step-time", step) == 0
    out = capsys.readouterr().out
    assert "experts" in out and "attention full" in out and "R2" in out
    value = json.loads(Path(cost).read_text())
    assert value["expert_weight"] == 1.0
    assert value["stages"][0]["alpha"] == pytest.approx(3 * 1e-6 / 1e-7, rel=1e-6)
    again = ["simulate", "p.json", "w.npz", "--gpu", "sheet.yaml", *SIZES]
    assert call(folder, *again, "--step-time", step, "--against", "p.json", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["simulated"] is True and all(layout["simulated"] is True for layout in value["layouts"])
    assert value["layouts"][1]["throughput_change"] == 0


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(folder, "replay", "p.json", "w.npz", *SIZES, "--repeats", "1", "--baseline", "--budget", "0.05") == 0
    out = capsys.readouterr().out
    for text in ("baseline", "reorder", "full", "+3.80%, +8.85%", "+10.50%, +14.89%", "shard 1: experts"):
        assert text in out, text
    assert call(folder, "simulate", "p.json", "w.npz", "--gpu", "sheet.yaml", "--model", "olmoe") == 0
    assert "olmoe has 16 MoE layers, the window 3" in capsys.readouterr().out
    options = ["--pipeline", "2", "--gradients", "--nodes", "4", "--overlap", "0.5", "--forward-only"]
    assert call(folder, "simulate", "p.json", "w.npz", "--gpu", "sheet.yaml", *SIZES, *options) == 0
    out = capsys.readouterr().out
    for text in ("simulated: sheet", "all-to-all", "pipeline bubble", "gradients", "not from measurements"):
        assert text in out, text


def test_a_plan_of_another_placement_needs_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads((folder / "p.json").read_text())
    value["moved_experts"] = [m + 1 for m in value["moved_experts"]]
    (folder / "moved.json").write_text(json.dumps(value))
    arguments = ["simulate", "moved.json", "w.npz", "--gpu", "sheet.yaml", *SIZES]
    assert call(folder, *arguments) == 0
    assert "--previous" in capsys.readouterr().out
    assert call(folder, *arguments, "--previous", "p.json") == 0
    assert "expert moves" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["replay", "p.json", "other.npz", *SIZES], 4, "p.json"),
        (["replay", "p.json", "w.npz"], 4, "--model"),
        (["replay", "p.json", "w.npz", "--hidden", "16"], 4, "--expert-width"),
        (["replay", "p.json", "w.npz", *SIZES, "--model", "olmoe"], 4, "--model"),
        (["replay", "p.json", "w.npz", "--model", "nope"], 4, "nope"),
        (["replay", "p.json", "w.npz", *SIZES, "--device", "tpu"], 4, "device"),
        (["replay", "p.json", "w.npz", "--hidden", "1000000000", *SIZES[2:]], 4, "memory"),
        (["replay", "p.json", "w.npz", "--hidden", "9" * 17, *SIZES[2:]], 4, "memory"),
        (["replay", "p.json", "w.npz", *SIZES, "--save", "p.json"], 4, "input of this command"),
        (["replay", "p.json", "w.npz", *SIZES, "--scale", "2"], 2, "scale"),
        (["replay", "nope.json", "w.npz", *SIZES], 4, "nope.json"),
        (["simulate", "p.json", "w.npz", *SIZES], 2, "--gpu"),
        (["simulate", "p.json", "w.npz", *SIZES, "--gpu", "no-such"], 4, "no-such"),
        (["simulate", "p.json", "w.npz", *SIZES, "--gpu", "sheet.yaml", "--nodes", "3"], 4, "3 nodes"),
        (["simulate", "p.json", "w.npz", *SIZES, "--gpu", "sheet.yaml", "--step-time", "p.json"], 4, "format"),
        (["calibrate", "p.json"], 4, "format"),
        (["calibrate", "nope.csv"], 4, "nope.csv"),
        (["calibrate", "w.npz"], 4, "suffix"),
        (["calibrate", "t.csv", "-o", "new.json", "--step-time", "new.json"], 4, "expected two files"),
        (["calibrate"], 2, "FILE"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, word: str) -> None:
    assert call(folder, *arguments) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and word in captured.err


def test_csv_alone_needs_attention_from_somewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["tokens,activated_experts,time_us"]
    lines += [f"{t},{a},{30 + 6 * a + 0.2 * t}" for t in (1, 64, 1024) for a in (8, 32)]
    path = folder / "layer.csv"
    path.write_text("\n".join(lines) + "\n")
    out = str(folder / "c2.json")
    assert call(folder, "calibrate", str(path), "-o", out) == 4
    assert "token cap" in capsys.readouterr().err
    assert call(folder, "calibrate", str(path), "-o", out, "--token-cap", "64", "--top-k", "8") == 4
    assert "no attention times" in capsys.readouterr().err
    assert not Path(out).exists()
    arguments = ["calibrate", str(path), "-o", out, "--token-cap", "64", "--model", "qwen3-30b-a3b", "--json"]
    assert call(folder, *arguments) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["experts"]["terms"]["token"] == pytest.approx(0.2e-6 / 8)
    assert value["cost"]["stages"][0]["alpha"] == pytest.approx(192.0)
