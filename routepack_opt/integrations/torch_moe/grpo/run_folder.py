"""The folder of a run: chosen, claimed for as long as the run lasts, and the same on every rank."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.grpo.metrics import NAME
from routepack_opt.integrations.torch_moe.parallel.mesh import broadcast_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_TAKEN = -1  # in place of an error number: another run writes there


@contextmanager
def claimed_folder(out: str, mesh: ParallelMesh, *, resume: bool) -> Iterator[Path]:
    """``out``, or where a run is in it or writes to it the next free name; every rank calls it.

    Rank 0 holds a lock on it inside the context; the lock goes with the process, however that ends. With ``resume``
    it is ``out`` itself, and nothing is made.

    Raises
    ------
    InvalidInput
        On every rank: it cannot be written, or (``resume``) another run writes to it.
    """
    answer = torch.zeros(2, dtype=torch.int64, device=mesh.device)
    lock: IO[bytes] | None = None
    if mesh.rank == 0:
        number, error, lock = _resumed(out) if resume else _new(out)
        answer[0], answer[1] = number, error
        if number > 1:
            logger.info("%s holds a run already; this one goes to %s", out, numbered_folder(out, number))
    broadcast_(answer, 0, mesh.dp_group)
    number, error = answer.tolist()
    folder = numbered_folder(out, number)
    try:
        if error == _TAKEN:
            raise InvalidInput(f"{folder}: another run writes there")
        if error:
            raise InvalidInput(f"{folder}: cannot be written ({os.strerror(error)})")
        yield folder
    finally:
        if lock is not None:
            lock.close()


def free_folder(out: str, first: int = 1) -> int:
    """The least n, from ``first`` on, such that no run is in ``out`` (n = 1) or ``out``-n."""
    number = first
    while (numbered_folder(out, number) / NAME).exists():
        number += 1
    return number


def numbered_folder(out: str, number: int) -> Path:
    """``out`` for 1, ``out``-2 for 2 and so on."""
    return Path(out) if number == 1 else Path(f"{out}-{number}")


Claim = tuple[int, int, "IO[bytes] | None"]  # number of the folder, error number (0: none), lock


def _new(out: str) -> Claim:
    number = 1
    while True:
        number = free_folder(out, number)
        folder = numbered_folder(out, number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            error, lock = _locked(folder)
        except OSError as failure:
            return number, failure.errno or 1, None
        # a run that began and ended between the look and the lock has left its metrics
        if error == _TAKEN or (folder / NAME).exists():
            if lock is not None:
                lock.close()
            number += 1
            continue
        return number, error, lock


def _resumed(out: str) -> Claim:
    if not Path(out).is_dir():  # whoever looks for the checkpoint says so
        return 1, 0, None
    try:
        return 1, *_locked(Path(out))
    except OSError as failure:
        return 1, failure.errno or 1, None


def _locked(folder: Path) -> tuple[int, IO[bytes] | None]:
    """Error number, and the open file that holds the lock."""
    stream = (folder / _LOCK).open("ab")
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return _TAKEN, None
    except (OSError, ImportError):  # a file system, or a system, without locks
        logger.debug("%s: cannot be locked", folder)
    return 0, stream
