"""The launcher: one clear line for the first failure, signals forwarded, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.integrations.torch_moe.processes.launch import LaunchError, launch

pytestmark = pytest.mark.distributed
_PREAMBLE = "import os, pathlib, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"


def _python(body: str) -> list[str]:
    return [sys.executable, "-S", "-c", _PREAMBLE + body]


def _note_pids(folder: Path) -> str:
    return f"pathlib.Path({str(folder)!r}, f'{{os.getpid()}}.pid').touch()\n"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _left(folder: Path, expected: int, limit_s: float = 10.0) -> list[int]:
    pids = [int(path.stem) for path in folder.glob("*.pid")]
    assert len(pids) == expected
    end = time.monotonic() + limit_s
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if _alive(pid)]


def test_all_ranks_run_and_stdout_is_rank_0s(capfd: pytest.CaptureFixture[str]) -> None:
    body = "print('out', rank, os.environ['WORLD_SIZE'], os.environ['EXTRA'])\nprint('err', rank, file=sys.stderr)"
    launch(_python(body), 3, env={"EXTRA": "x"})
    out, err = capfd.readouterr()
    assert out == "out 0 3 x\n"
    assert sorted(err.splitlines()) == [
        "[rank 1] err 1",
        "[rank 1] out 1 3 x",
        "[rank 2] err 2",
        "[rank 2] out 2 3 x",
        "err 0",
    ]


def test_first_failure_is_named_and_stops_the_rest(tmp_path: Path) -> None:
    body = _note_pids(tmp_path) + (
        "if rank == 1:\n"
        f"    while len(list(pathlib.Path({str(tmp_path)!r}).glob('*.pid'))) < 3: time.sleep(0.01)\n"
        "    sys.exit('RoutePackError: the reason')\n"
        "time.sleep(60)"
    )
    with pytest.raises(RoutePackError) as caught:
        launch(_python(body), 3, timeout_s=30)
    assert str(caught.value) == (
        "rank 1 ended with exit code 1 (last line of its stderr: RoutePackError: the reason);"
        " the other ranks were stopped; restart with --resume"
    )
    assert _left(tmp_path, 3) == []


def test_a_killed_rank_is_named_by_its_signal() -> None:
    with pytest.raises(LaunchError, match=r"^rank 0 was killed by SIGKILL \(it wrote nothing to stderr\); ") as caught:
        launch(_python("os.kill(os.getpid(), signal.SIGKILL)"), 1)
    assert (caught.value.rank, caught.value.returncode) == (0, -signal.SIGKILL)


def test_ranks_that_ignore_sigterm_are_killed(tmp_path: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + _note_pids(tmp_path)
        + (
            "if rank == 0:\n"
            f"    while len(list(pathlib.Path({str(tmp_path)!r}).glob('*.pid'))) < 2: time.sleep(0.01)\n"
            "    sys.exit(3)\n"
            "time.sleep(60)"
        )
    )
    with pytest.raises(LaunchError, match="rank 0 ended with exit code 3"):
        launch(_python(body), 2, grace_s=0.2, timeout_s=30)
    assert _left(tmp_path, 2) == []


def test_timeout_stops_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] still ran after 1 s and were stopped"):
        launch(_python(_note_pids(tmp_path) + "time.sleep(60)"), 2, timeout_s=1, grace_s=1)
    assert _left(tmp_path, 2) == []


def test_children_of_a_rank_that_ended_well_are_killed(tmp_path: Path) -> None:
    child = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch(); time.sleep(60)"
    body = (
        "null = subprocess.DEVNULL\n"
        f"subprocess.Popen([sys.executable, '-S', '-c', {child!r}], stderr=null, stdout=null)\n"
        f"while not list(pathlib.Path({str(tmp_path)!r}).glob('*.pid')): time.sleep(0.01)"
    )
    launch(_python(body), 1, timeout_s=30)
    assert _left(tmp_path, 1) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_launcher_leave_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG")
    ranks, seen = tmp_path / "ranks", tmp_path / "seen"
    ranks.mkdir()
    body = (
        f"def note(number, frame): pathlib.Path({str(seen)!r}).touch(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, note); signal.signal(signal.SIGINT, note)\n"
        + _note_pids(ranks)
        + "time.sleep(60)"
    )
    module = "routepack_opt.integrations.torch_moe.processes.launch"
    code = f"from {module} import launch; launch({_python(body)!r}, 2, grace_s=2)"
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 30
    while len(list(ranks.glob("*.pid"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(launcher.pid, number)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == -number or (number == signal.SIGINT and b"KeyboardInterrupt" in err)
    assert _left(ranks, 2) == []
    assert seen.exists() == (number != signal.SIGKILL)


def test_a_command_that_cannot_start_says_so() -> None:
    with pytest.raises(LaunchError, match=r"no-such-program-here: cannot be started \(No such file"):
        launch(["no-such-program-here"], 2)


@pytest.mark.parametrize("count", [0, -1, True, "2", 10**9])
def test_wrong_counts_are_refused(count: object) -> None:
    with pytest.raises(InvalidInput, match="num_processes"):
        launch(["x"], count)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="command: is empty"):
        launch([], 1)


_SETUP = """
import sys
import torch, torch.distributed as dist
from routepack_opt.integrations.torch_moe.processes.process_setup import process_group
with process_group(backend="gloo", timeout_s=30, num_threads=1) as setup:
    value = torch.tensor([setup.rank + 1])
    dist.all_reduce(value)
    if setup.rank == 0:
        print(setup.world_size, int(value), setup.device, setup.backend)
"""


def test_ranks_meet_through_the_file_store(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    launch([sys.executable, "-c", _SETUP], 2, timeout_s=60)
    assert capfd.readouterr().out == "2 3 cpu gloo\n"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x'; expected an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'; expected an integer from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set but MASTER_ADDR is not"),
    ],
)
def test_broken_environments_are_refused(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str) -> None:
    pytest.importorskip("torch")
    from routepack_opt.integrations.torch_moe.processes.process_setup import init_process_group

    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "ROUTEPACK_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=words):
        init_process_group(backend="gloo")
    with pytest.raises(InvalidInput, match="backend: 'mpi' is not one of"):
        monkeypatch.delenv("RANK")
        init_process_group(backend="mpi")
