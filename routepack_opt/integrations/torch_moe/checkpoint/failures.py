"""What the ranks tell each other while a checkpoint is written or read: one rank's failure is every rank's."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.movement.agreement import MovementFailed, gather_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import TensorFile
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

_REPORT = struct.Struct("<?400s32sqq32s")  # all well, what went wrong, checkpoint id, file: bytes, tensors, sha256


class CheckpointError(RoutePackError):
    """A checkpoint could not be written; the ones before it are whole."""


def attempt(action: Callable[[], None]) -> Exception | None:
    """The error of ``action`` or None: it is shared with the other ranks before it is raised."""
    try:
        action()
    except Exception as error:
        return error
    return None


def share(
    mesh: ParallelMesh,
    problem: Exception | None,
    timeout_s: float,
    doing: str,
    identity: bytes = b"",
    written: TensorFile | None = None,
    *,
    failure: type[RoutePackError] = CheckpointError,
) -> list[tuple[Any, ...]]:
    """Every rank's report; raises when any has a problem, this rank's own first."""
    num_bytes, num_tensors, digest = 0, 0, b""
    if written is not None:
        num_bytes, num_tensors = written.num_bytes, len(written.tensors)
        digest = bytes.fromhex(written.header_sha256)
    text = "" if problem is None else str(problem) or type(problem).__name__
    record = _REPORT.pack(problem is None, _cut(text), identity, num_bytes, num_tensors, digest)
    gone: MovementFailed | None = None
    reports: list[tuple[Any, ...]] = []
    # a rank that fails only tells the others: not worth a long wait
    wait_s = timeout_s if problem is None else min(timeout_s, 30.0)
    try:
        reports = [_REPORT.unpack(raw) for raw in gather_records(record, mesh, timeout_s=wait_s, doing=doing)]
    except MovementFailed as error:
        gone = error
    if problem is not None:
        if isinstance(problem, RoutePackError):
            raise problem
        raise failure(f"{doing}: {type(problem).__name__}: {problem}") from problem
    if gone is not None:
        raise failure(f"{gone}; a rank is gone or too slow")
    for rank, (well, what, *_) in enumerate(reports):
        if not well:
            raise failure(f"rank {rank}: {what.rstrip(bytes(1)).decode(errors='replace')}")
    return reports


def _cut(text: str) -> bytes:
    raw = text.encode(errors="replace")[:400]
    with suppress(UnicodeDecodeError):
        raw.decode()
        return raw
    return raw.decode(errors="ignore").encode()
