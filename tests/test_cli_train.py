"""``routepack train``: refusals before any process starts, and one short run through the launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from routepack_opt.cli import main

CONFIG = """\
[model]
hidden_size = 16
num_heads = 2
num_kv_heads = 1
head_dim = 8
expert_size = 16
[parallel]
backend = "gloo"
timeout_s = 30
[sampling]
prompts = 4
group_size = 2
[plan]
token_cap = 40
budget_steps = 50
[run]
steps = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG + f'out = "{tmp_path / "run"}"\n')
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "routepack_opt", "train", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()  # its ranks die with it
    return process.returncode, out, err


def wait_for_a_step(config: Path, process: subprocess.Popen[str]) -> Path:
    metrics, deadline = config.with_name("run") / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    return metrics


def test_refusals_are_one_line_and_exit_4(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("hidden_size = 16", "hidden_size = -1"))
    assert main(["train", "--config", str(config)]) == 4
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "job.toml: model.hidden_size: expected a whole number" in err
    assert main(["train", "--config", str(config.with_name("none.toml"))]) == 4
    assert "none.toml" in capsys.readouterr().err


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert main(["train", "--config", "x", "--steps", "0"]) == 2
    assert "--config" in capsys.readouterr().err


def test_without_torch_the_extra_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
    )
    assert main(["train", "--config", str(config)]) == 2
    assert "pip install routepack-opt[train]" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from routepack_opt.cli import main\n"
        "assert main(['train', '--help']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.distributed
def test_a_short_run_prints_its_summary(config: Path) -> None:
    pytest.importorskip("torch")
    code, out, err = finish(start("--config", config, "--json", "-q"))
    assert code == 0, err
    summary = json.loads(out)
    assert summary["steps"] == 2 and summary["out"] == str(config.with_name("run")) and not summary["interrupted"]
    for name in ("metrics.jsonl", "summary.json", "timeline.json", "config.json", "checkpoints"):
        assert (config.with_name("run") / name).exists(), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "extra", "words"),
    [
        ("", ["--resume"], "holds no checkpoint to resume from"),
        ("", ["--out", "/proc/none"], "/proc/none: cannot be written (No such file or directory)"),
        ('hf = "/none"', [], "/none: cannot be read (No such file or directory)"),
        ("num_heads = 500_000_000", [], "this needs more memory than the device has; lower the sizes"),
    ],
)
def test_a_refusal_of_the_ranks_is_one_line_with_its_exit_code(
    config: Path, change: str, extra: list[str], words: str
) -> None:
    pytest.importorskip("torch")
    config.write_text(config.read_text().replace("num_heads = 2", change or "num_heads = 2"))
    code, out, err = finish(start("--config", config, *extra))
    assert code == 4 and not out
    assert err.startswith("routepack train: ") and words in err and err.count("\n") == 1
    assert "--resume" not in extra or not config.with_name("run").exists()


@pytest.mark.distributed
def test_a_killed_rank_is_one_line_without_the_tracebacks_of_its_peers(config: Path) -> None:
    pytest.importorskip("torch")
    process = start("--config", config, "--steps", "100000", "-q")
    wait_for_a_step(config, process)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[2]), signal.SIGKILL)
    code, out, err = finish(process)
    *others, last = err.splitlines()
    assert code == 1 and not out and all(line.startswith("compiling") for line in others), err
    assert last.startswith("routepack train: rank 2 was killed by SIGKILL") and "restart with --resume" in last


@pytest.mark.distributed
def test_a_background_job_that_is_interrupted_exits_130(config: Path) -> None:
    pytest.importorskip("torch")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a plain shell starts what ends with an ampersand
    try:
        process = start("--config", config, "--steps", "100000", "-q")
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_a_step(config, process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and err.endswith("routepack train: interrupted\n")


@pytest.mark.distributed
def test_an_interrupted_run_leaves_a_checkpoint(config: Path) -> None:
    pytest.importorskip("torch")
    process = start("--config", config, "--steps", "100000")
    metrics = wait_for_a_step(config, process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in err and "mean reward" in out
    (checkpoint,) = (config.with_name("run") / "checkpoints").glob("step-*")
    assert len(metrics.read_text().splitlines()) == int(checkpoint.name.removeprefix("step-"))
