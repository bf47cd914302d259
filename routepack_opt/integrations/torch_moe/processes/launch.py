"""One process per rank on this machine, watched: the first failure stops the rest, and no process is ever left.

For several machines use ``torchrun``; :mod:`process_setup` reads the environment of both.

Three guards keep processes from outliving the job: each rank is the head of a session of its own, so that its whole
group can be killed, children included; ranks are reaped only after their group was killed, so that a process id is
never taken for another's; and on Linux the kernel kills a rank when the launcher dies (PR_SET_PDEATHSIG), whatever
killed it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.integrations.torch_moe.processes.process_setup import STORE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_log = logging.getLogger(__name__)
_POLL_S = 0.01  # shorter than a Python process takes to fail after its peer did: the first one seen is the cause
_MAX_PROCESSES = 4096

# Runs before the command and becomes it: PR_SET_PDEATHSIG survives exec, and no code runs between fork and exec of a
# launcher that may hold threads. getppid differs when the launcher died before prctl.
_SHIM = """\
import ctypes, os, signal, sys
try: ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
except Exception: pass
if os.getppid() != int(sys.argv[1]): os._exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"{sys.argv[2]}: cannot be started ({error.strerror})")
"""


class LaunchError(RoutePackError):
    """A rank failed, or the job ran out of time; ``rank`` and ``returncode`` (negative: signal) say which and how.

    ``reason`` is what the rank left with :func:`leave_reason`, None when it left nothing.
    """

    def __init__(
        self, message: str, rank: int | None = None, returncode: int | None = None, reason: str | None = None
    ) -> None:
        """``message`` is the one line users see."""
        super().__init__(message)
        self.rank, self.returncode, self.reason = rank, returncode, reason


def leave_reason(reason: str) -> bool:
    """Called by a rank that is about to end: the launcher says why, once, and not every rank for itself.

    Returns
    -------
    Whether a launcher of this module will read it; else the rank has to speak.
    """
    store = os.environ.get(STORE_VARIABLE)
    try:
        if store is None or not os.path.isdir(os.path.dirname(store)):
            return False
        with open(_reason_file(store, os.environ["RANK"]), "w", encoding="utf-8", errors="replace") as stream:
            stream.write(reason)
    except (OSError, KeyError):
        return False
    return True


def _reason_file(store: str, rank: object) -> str:
    return f"{store}.reason-{rank}"


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 5.0,
) -> None:
    """Run ``command`` once per rank and return when all ranks ended well.

    stdout of rank 0 passes through. Its stderr too; what the others write (both streams) goes to stderr, each line
    with its rank in front. SIGINT and SIGTERM are forwarded, and raised again here once every rank is gone; where the
    signal is ignored, as in a background job of a plain shell, that is a KeyboardInterrupt.

    Parameters
    ----------
    command
        Program and arguments; RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and the rendezvous file are set in its
        environment.
    num_processes
        Ranks.
    env
        Variables set on top of this process's own.
    timeout_s
        Wall-clock bound of the whole job; None is no bound.
    grace_s
        Time between SIGTERM and SIGKILL.

    Raises
    ------
    LaunchError
        Names the first rank that failed, its exit code or signal, and the last line of its stderr.
    InvalidInput
        No command, or a rank count that is not positive.
    """
    command = [str(word) for word in command]
    if not command:
        raise InvalidInput("command: is empty; expected a program and its arguments")
    if (
        isinstance(num_processes, bool)
        or not isinstance(num_processes, int)
        or not 1 <= num_processes <= _MAX_PROCESSES
    ):
        raise InvalidInput(f"num_processes: {num_processes!r} is not a count from 1 to {_MAX_PROCESSES}")
    folder = tempfile.mkdtemp(prefix="routepack-launch-")
    received: list[int] = []
    ranks: list[_Rank] = []
    try:
        with _signals_noted(received):
            try:
                for rank in range(num_processes):
                    ranks.append(_Rank(rank, command, _environment(rank, num_processes, folder, env)))
                failure = _watch(ranks, received, timeout_s)
                if failure is not None or received:
                    _stop(ranks, received[0] if received else signal.SIGTERM, grace_s, received)
            finally:
                for one in ranks:
                    one.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if received:
        signal.raise_signal(received[0])
        raise KeyboardInterrupt  # still here: whoever started this process made it ignore the signal
    if failure is not None:
        raise failure


def _environment(rank: int, world: int, folder: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    result = {**os.environ, **(extra or {})}
    result.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    result.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    result[STORE_VARIABLE] = os.path.join(folder, "rendezvous")
    for torchrun in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        result.pop(torchrun, None)
    return result


class _Rank:
    """A rank's process, the end of its stderr, and how it ended."""

    def __init__(self, rank: int, command: list[str], env: dict[str, str]) -> None:
        self.rank = rank
        self.reason_file = _reason_file(env[STORE_VARIABLE], rank)
        self.returncode: int | None = None
        self.last_lines: deque[str] = deque(maxlen=20)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        stream = self.process.stderr if rank == 0 else self.process.stdout
        assert stream is not None
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        prefix = "" if self.rank == 0 else f"[rank {self.rank}] "
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace")
                self.last_lines.append(line)
                with suppress(OSError, ValueError):  # our own stderr may be closed; the job goes on
                    sys.stderr.write(prefix + line)
                    sys.stderr.flush()

    def poll(self) -> int | None:
        """Exit code, negative for a signal, None while running. The process stays a zombie: its id is still ours."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                    self.returncode = -ended.si_status if killed else ended.si_status
        return self.returncode

    def send(self, signal_number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal_number)

    def kill(self) -> None:
        """SIGKILL to the whole group, children of a rank that already ended included; then reap."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._reader.join(1.0)

    def reason(self) -> str | None:
        """What the rank left with :func:`leave_reason`."""
        with suppress(OSError), open(self.reason_file, encoding="utf-8") as stream:
            return stream.read()
        return None

    def describe(self, reason: str | None) -> str:
        code = self.returncode
        assert code is not None
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if reason is not None:
            return f"rank {self.rank} {how} ({reason})"
        self._reader.join(0.5)  # its last words may still be in the pipe
        lines = [line.strip() for line in self.last_lines if line.strip()]
        words = f"last line of its stderr: {lines[-1][:500]}" if lines else "it wrote nothing to stderr"
        return f"rank {self.rank} {how} ({words})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _watch(ranks: list[_Rank], received: list[int], timeout_s: float | None) -> LaunchError | None:
    """Wait until all ended well (None), one failed, the time is over, or a signal came (None)."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not received:
        codes = [one.poll() for one in ranks]
        failed = [one for one in ranks if one.returncode]
        if failed:
            # a killed rank explains why its peers lost their connections, never the other way round
            first = min(failed, key=lambda one: ((one.returncode or 0) > 0, one.rank))
            stopped = "" if len(ranks) == 1 else "; the other ranks were stopped"
            reason = first.reason()
            message = f"{first.describe(reason)}{stopped}; restart with --resume"
            return LaunchError(message, first.rank, first.returncode, reason)
        if None not in codes:
            return None
        if deadline is not None and time.monotonic() > deadline:
            running = [one.rank for one in ranks if one.returncode is None]
            return LaunchError(
                f"ranks {running} still ran after {timeout_s:g} s and were stopped; restart with --resume"
            )
        time.sleep(_POLL_S)
    return None


def _stop(ranks: list[_Rank], signal_number: int, grace_s: float, received: list[int]) -> None:
    """Ask every rank that still runs to end, and give it ``grace_s``; a second signal ends the wait."""
    already = len(received)
    for one in ranks:
        if one.poll() is None:
            one.send(signal_number)
    deadline = time.monotonic() + grace_s
    while any(one.poll() is None for one in ranks):
        if time.monotonic() > deadline or len(received) > already:
            return
        time.sleep(_POLL_S)


@contextmanager
def _signals_noted(received: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM are appended to ``received``; only the main thread may catch signals."""

    def note(number: int, frame: Any) -> None:
        del frame
        received.append(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for wanted in (signal.SIGINT, signal.SIGTERM):
            before[wanted] = signal.signal(wanted, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
