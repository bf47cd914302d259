"""The harness itself: results by rank, the failing rank's words, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from harness import RankFailure, run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(offset: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return {"rank": dist.get_rank(), "sum": int(value), "threads": torch.get_num_threads(), "pid": os.getpid()}


def _raise_on_one(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("the words of the failing rank")
    dist.barrier()


def _killed_on_one(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _sleep(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(60)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_until_gone(pids: list[int], limit_s: float = 10.0) -> list[int]:
    end = time.monotonic() + limit_s
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if _alive(pid)]


def test_results_come_back_by_rank() -> None:
    results = run_ranks(_sum_of_ranks, 3, {"offset": 10}, timeout_s=40)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert {result["sum"] for result in results} == {33}
    assert {result["threads"] for result in results} == {1}
    assert _wait_until_gone([result["pid"] for result in results]) == []


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 ended with exit code 1(.|\n)*the words of the failing rank"):
        run_ranks(_raise_on_one, 2, {"rank": 1}, timeout_s=40)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL"):
        run_ranks(_killed_on_one, 2, {"rank": 0}, timeout_s=40)


def test_timeout_kills_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"of \[0, 1\]\) ran out of time"):
        run_ranks(_sleep, 2, {"folder": str(tmp_path)}, timeout_s=2, init=False)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert _wait_until_gone(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_killed_caller_leaves_no_rank(tmp_path: Path) -> None:
    here = str(Path(__file__).resolve())
    code = f"from harness import run_ranks; run_ranks({here + ':_sleep'!r}, 2, {{'folder': {str(tmp_path)!r}}}, 60)"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(here).parent, start_new_session=True)
    end = time.monotonic() + 40
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert _wait_until_gone(pids) == []
