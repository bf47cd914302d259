"""A job that dies in the middle of moving experts says so, and a restart ends where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from harness import RankFailure, run_ranks

from routepack_opt.integrations.torch_moe.checkpoint.manifest import latest_checkpoint
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import read_header
from routepack_opt.integrations.torch_moe.processes.launch import LaunchError, launch

pytestmark = pytest.mark.distributed
STEPS, SAVED, FAILS_AT = 5, 2, 3  # a checkpoint after step 2, the failure in step 3 (counted from 0)
HERE = Path(__file__).resolve().parent


def _settings(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    own = {"ep": 2, "shards": 2, "steps": STEPS, "folder": str(folder / "run"), "result": str(folder / "end")}
    return own | {"options": {"shard_expert_state": True}} | more


def _command(settings: dict[str, Any]) -> list[str]:
    return [sys.executable, str(HERE / "restart_job.py"), json.dumps(settings)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    settings = _settings(tmp_path_factory.mktemp("undisturbed"))
    results = run_ranks("restart_job:train", 4, {"settings": settings}, timeout_s=120)
    assert results[0]["version"] == STEPS
    return Path(settings["result"]), results[0]["losses"]


def _same_end(settings: dict[str, Any], undisturbed: Path) -> None:
    """Weights, masters and moments of both runs, bit for bit."""
    names = read_header(undisturbed).tensors
    assert {"expert.0.gate_up.exp_avg", "expert.1.down.exp_avg_sq", "expert.1.gate_up.weight"} <= set(names)
    assert Path(settings["result"]).read_bytes() == undisturbed.read_bytes()


def test_killed_while_experts_move(tmp_path: Path, undisturbed: tuple[Path, list[float]]) -> None:
    settings = _settings(tmp_path)
    fail = {"rank": 1, "step": FAILS_AT, "round": 1, "how": "kill"}
    with pytest.raises(LaunchError) as caught:
        launch(_command(settings | {"fail": fail}), 4, timeout_s=120)
    message = str(caught.value)
    assert message.startswith("rank 1 was killed by SIGKILL")
    assert message.endswith("the other ranks were stopped; restart with --resume")
    assert not Path(settings["result"]).exists()
    path = latest_checkpoint(settings["folder"])
    assert path is not None and path.name == f"step-{SAVED:08d}"

    results = run_ranks("restart_job:train", 4, {"settings": settings | {"resume": True}}, timeout_s=120)
    assert results[0]["first"] == SAVED
    assert results[0]["losses"] == undisturbed[1]
    _same_end(settings, undisturbed[0])


def test_exception_while_experts_move_stops_all_and_the_checkpoint_heals(
    tmp_path: Path, undisturbed: tuple[Path, list[float]]
) -> None:
    settings = _settings(tmp_path, fail={"rank": 2, "step": FAILS_AT, "round": 1, "how": "raise"})
    results = run_ranks("restart_job:fail_and_recover", 4, {"settings": settings}, timeout_s=120)
    for result in results:
        assert "rank 2: ValueError: the disk of the moon is full" in result["message"]
        assert "restart from the last checkpoint" in result["message"]
        assert "restart from the last checkpoint" in result["save"]  # a mixed state cannot be saved
        assert result["broken"]
    assert results[0]["losses"] == undisturbed[1]
    _same_end(settings, undisturbed[0])


def test_rank_that_hangs_while_experts_move_ends_in_a_bound(tmp_path: Path) -> None:
    settings = _settings(tmp_path, fail={"rank": 0, "step": 0, "round": 1, "how": "hang"})
    with pytest.raises(RankFailure, match=r"rank [123] ended with exit code 1(.|\n)*MovementFailed"):
        run_ranks("restart_job:train", 4, {"settings": settings}, timeout_s=50)
    assert not os.path.exists(settings["result"])


def test_next_step_is_the_same_on_other_sizes(tmp_path: Path) -> None:
    results = run_ranks("restart_job:next_step_elsewhere", 4, {"folder": str(tmp_path)}, timeout_s=120)
    for found in results[0]:
        for kind in ("loss", "weight", "exp_avg", "exp_avg_sq"):
            assert found[kind] <= 2e-5, found
    assert (
        max(results[0][0][kind] for kind in ("loss", "weight", "exp_avg", "exp_avg_sq")) == 0
    )  # the same job: bitwise
