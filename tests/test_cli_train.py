"""``routepack train``: refusals before any process starts, and one short run through the launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from routepack_opt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

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
def test_a_refusal_of_the_ranks_keeps_its_exit_code(config: Path) -> None:
    pytest.importorskip("torch")
    code, out, err = finish(start("--config", config, "--resume"))
    assert code == 4 and "holds no checkpoint to resume from" in err
    assert "Traceback" not in err and not out


@pytest.mark.distributed
def test_an_interrupted_run_leaves_a_checkpoint(config: Path) -> None:
    pytest.importorskip("torch")
    process = start("--config", config, "--steps", "100000")
    metrics, deadline = config.with_name("run") / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in err and "mean reward" in out
    (checkpoint,) = (config.with_name("run") / "checkpoints").glob("step-*")
    assert len(metrics.read_text().splitlines()) == int(checkpoint.name.removeprefix("step-"))
