"""Run a function on several gloo ranks: bounded in time, results by rank, and no process left behind.

``run_ranks`` starts one *leader* (this file as a script) in a session of its own. The leader imports torch and the
module of the function once, then forks the ranks, so that four ranks cost one import of torch. Every rank asks the
kernel to be killed with its leader, the leader with whoever started it: an interrupted pytest leaves nothing.

A worker function is called as ``function(**kwargs)`` with the default process group ready (``dist.get_rank()``),
one torch thread, and returns what JSON can hold.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TESTS = Path(__file__).resolve().parents[1]
_GRACE_S = 1.0  # the other ranks may still report their own errors before they are killed
_IMPORT_S = 60.0  # on top of a call's own bound: torch and the function's module


class RankFailure(RuntimeError):
    """A rank raised, died or ran out of time; ``rank`` is the first one, the message ends with its traceback."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    function: str | Callable[..., Any],
    num_ranks: int,
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    *,
    init: bool = True,
) -> list[Any]:
    """Call ``function(**kwargs)`` on ``num_ranks`` processes and return what each returned, by rank.

    Parameters
    ----------
    function
        ``"package.module:function"``, ``"path/to/file.py:function"``, or a module-level function.
    kwargs
        Arguments for every rank; must survive JSON.
    timeout_s
        Bound on the ranks' running time, imports not counted; collectives inside give up a little earlier.
    init
        False leaves ``init_process_group`` to the function (RANK, WORLD_SIZE and ROUTEPACK_STORE are set).

    Raises
    ------
    RankFailure
        With the rank, how it ended and the tail of its traceback or stderr.
    """
    if not isinstance(function, str):
        function = f"{sys.modules[function.__module__].__file__}:{function.__qualname__}"
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    job = {"function": function, "num_ranks": num_ranks, "kwargs": dict(kwargs or {}), "timeout_s": timeout_s}
    (folder / "job.json").write_text(json.dumps(job | {"init": init, "parent": os.getpid()}))
    with (folder / "leader.log").open("wb") as log:
        leader = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        try:
            leader.wait(timeout_s + _IMPORT_S)
        except subprocess.TimeoutExpired:
            raise RankFailure(f"{function}: no answer within {timeout_s:g} s\n{_tails(folder, num_ranks)}") from None
        return _collect(folder, function, num_ranks, leader.returncode)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(folder: Path, function: str, num_ranks: int, code: int) -> list[Any]:
    verdict = folder / "verdict.json"
    if not verdict.exists():
        raise RankFailure(f"{function}: leader ended with {code}\n{_tail(folder / 'leader.log')}")
    first = json.loads(verdict.read_text())
    if first is not None:
        rank, how = first["rank"], first["how"]
        detail = _tail(folder / f"error{rank}.txt") or _tail(folder / f"rank{rank}.log")
        raise RankFailure(f"{function}: rank {rank} {how}\n{detail}", rank)
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(num_ranks)]


def _tail(path: Path, size: int = 4000) -> str:
    return path.read_text(errors="replace")[-size:] if path.exists() else ""


def _tails(folder: Path, num_ranks: int) -> str:
    return "\n".join(f"rank {rank}: {_tail(folder / f'rank{rank}.log', 1000)}" for rank in range(num_ranks))


# ---- below runs in the leader and its forks ----


def _die_with_parent(parent: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _resolve(name: str) -> Callable[..., Any]:
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        path = Path(where) if Path(where).is_absolute() else _TESTS.parent / where
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, attribute)  # type: ignore[no-any-return]


def _rank_main(rank: int, folder: Path, job: Mapping[str, Any], function: Callable[..., Any]) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = job["num_ranks"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ROUTEPACK_STORE": str(folder / "store")}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if job["init"]:
            store = dist.FileStore(str(folder / "store"), world)
            timeout = timedelta(seconds=max(5.0, job["timeout_s"] - 5))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        result = json.dumps(function(**job["kwargs"]))
        (folder / f"result{rank}.json").write_text(result)
    except BaseException:
        text = traceback.format_exc()
        (folder / f"error{rank}.txt").write_text(text)
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    # no destroy_process_group: it may wait for peers; os._exit closes the sockets, all ranks have returned by then
    if job["init"]:
        with suppress(Exception):
            dist.barrier()
    os._exit(0)


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _watch(pids: dict[int, int], deadline: float) -> dict[str, Any] | None:
    """Wait for every rank; the first failure (with its rank) or None. Kills what is left after a failure."""
    first: dict[str, Any] | None = None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            rank = pids.pop(pid)
            if status and first is None:
                first = {"rank": rank, "how": _describe(status)}
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        elif time.monotonic() > deadline:
            for left in pids:
                os.kill(left, signal.SIGKILL)
            if first is None:
                first = {"rank": min(pids.values()), "how": f"(of {sorted(pids.values())}) ran out of time"}
            for left in pids:
                os.waitpid(left, 0)
            return first
        else:
            time.sleep(0.005)
    return first


def _leader_main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    _die_with_parent(job["parent"])
    sys.path[:0] = [str(_TESTS), str(Path(__file__).resolve().parent)]
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    function = _resolve(job["function"])
    leader = os.getpid()
    deadline = time.monotonic() + job["timeout_s"]  # imports, slow on a busy machine, are not the function's time
    pids: dict[int, int] = {}
    for rank in range(job["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            try:
                _die_with_parent(leader)
                _rank_main(rank, folder, job, function)
            finally:
                os._exit(1)
        pids[pid] = rank
    verdict = _watch(pids, deadline)
    (folder / "verdict.tmp").write_text(json.dumps(verdict))
    (folder / "verdict.tmp").rename(folder / "verdict.json")


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before torch: no thread pool may exist at the fork
    _leader_main(Path(sys.argv[1]))
