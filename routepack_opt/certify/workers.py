"""Worker processes on this machine: one case at a time each, replaced when they die, gone when the run ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from routepack_opt.certify.tasks import Task, work
from routepack_opt.errors import RoutePackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from routepack_opt.certify.one import Record, Settings

_GRACE_S = 60.0  # beyond twice its time limit a worker is taken for hung
_STARTS = 3  # workers that die before they are ready, before the run gives up
_READY = "ready"


def run_local(tasks: Iterable[Task], wanted: Settings, num_jobs: int) -> Iterator[Record]:
    """Records in the order they are finished.

    Even one job is a process apart: a solver that crashes or is killed for its memory takes down its case only, which
    is then tried once more by the cheap rungs alone.

    Raises
    ------
    RoutePackError
        Workers die while they start.
    """
    pool = _Pool(deque(tasks), wanted)
    try:
        yield from pool.run(num_jobs)
    finally:
        pool.stop()


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    task: Task | None = None
    deadline_s: float = float("inf")


class _Pool:
    def __init__(self, queue: deque[Task], wanted: Settings) -> None:
        self.queue, self.wanted = queue, wanted
        self.workers: list[_Worker] = []
        self.failed_starts = 0

    def run(self, num_jobs: int) -> Iterator[Record]:
        for _ in range(min(num_jobs, len(self.queue))):
            self.workers.append(_start(self.wanted.ep is not None))
        while self.workers:
            busy: list[Any] = [part for w in self.workers for part in (w.connection, w.process.sentinel)]
            wait(busy, timeout=1.0)
            for worker in list(self.workers):
                record = self._attend(worker)
                if record is not None:
                    yield record

    def _attend(self, worker: _Worker) -> Record | None:
        """Take what a worker sent, or notice that it died or hangs; a record when a case is over."""
        record: Record | None = None
        try:
            if worker.connection.poll():
                message = worker.connection.recv()
                if message == _READY:
                    worker.ready = True
                    self.failed_starts = 0
                elif worker.task is not None:
                    record = worker.task.finish(message, self.wanted)
                self._give(worker)
                return record
        except (EOFError, OSError):
            worker.process.join(5)
        if worker.process.is_alive() and time.monotonic() < worker.deadline_s:
            return None
        return self._bury(worker)

    def _give(self, worker: _Worker) -> None:
        """The next task, or the sign to leave."""
        worker.task = self.queue.popleft() if self.queue else None
        worker.deadline_s = float("inf")
        if worker.task is not None:
            worker.deadline_s = time.monotonic() + 2 * worker.task.settings.time_limit_s + _GRACE_S
        with contextlib.suppress(OSError):  # it died just now: the next look at it finds that out
            worker.connection.send(worker.task)
        if worker.task is None:
            worker.process.join(5)
            _end(worker)
            self.workers.remove(worker)

    def _bury(self, worker: _Worker) -> Record | None:
        hung = worker.process.is_alive()
        _end(worker)
        self.workers.remove(worker)
        code, task = worker.process.exitcode, worker.task
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= _STARTS:
                raise RoutePackError(f"worker processes end while they start (exit code {code})")
        reason = "worker hung and was ended" if hung else f"worker {_death(code)}"
        record = None
        if task is not None:
            once_more = task.again(reason)
            if once_more is None:
                record = task.fail(reason, self.wanted)
            else:
                self.queue.append(once_more)
        if self.queue:
            self.workers.append(_start(self.wanted.ep is not None))
        return record

    def stop(self) -> None:
        """End every worker; called on every way out."""
        for worker in self.workers:
            _end(worker)
        self.workers.clear()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"ended with code {code}"


def _start(placement: bool) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, placement), daemon=True, name="routepack-certify")
    main = threading.current_thread() is threading.main_thread()
    # Ctrl-C goes to every process of the terminal; workers inherit that they leave it to us
    old = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        process.start()
    finally:
        if main:
            signal.signal(signal.SIGINT, old)
    theirs.close()
    return _Worker(process, ours)


def _end(worker: _Worker) -> None:
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _serve(connection: Connection, placement: bool) -> None:
    """Main function of a worker."""
    from routepack_opt.certify.one import warmup

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # solvers print; stdout belongs to results
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()
    warmup(placement)
    with contextlib.suppress(EOFError, OSError):
        connection.send(_READY)
        while (task := connection.recv()) is not None:
            connection.send(work(task))


def _leave_with(sentinel: int) -> None:
    """A run that is killed leaves no worker behind, not even in the middle of a case."""
    wait([sentinel])
    os._exit(1)
