"""What all ranks must hear before they go on: short records gathered, plans broadcast, with a bound on every wait.

On the CPU both are stars of point-to-point messages and not a collective: a gloo message that times out closes
the connections of its group, so a rank that died or hangs makes all the others raise at once; a gloo collective would
leave a thread behind that keeps the process from ending.
"""

from __future__ import annotations

import hashlib
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from routepack_opt.errors import RoutePackError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh


class PlacementDisagreement(RoutePackError):
    """The ranks were asked for different placements, versions or tensors; nothing was moved."""


class MovementFailed(RoutePackError):
    """Experts could not all be moved; the placement is broken on every rank and a checkpoint must be loaded."""


_HEADER = struct.Struct("<q32s")  # length and sha256 of what follows


def wait_all(works: Sequence[Any], deadline: float, doing: str) -> None:
    """Wait for messages until ``deadline`` (of ``time.monotonic``).

    Raises
    ------
    MovementFailed
        A message did not arrive in time, or its connection is gone.
    """
    for work in works:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            done = work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise MovementFailed(f"{doing}: {str(error).splitlines()[0]}") from error
        if done is False:
            raise MovementFailed(f"{doing}: no answer in time")


def gather_records(record: bytes, mesh: ParallelMesh, *, timeout_s: float, doing: str) -> list[bytes]:
    """The record of every DP rank, in rank order; all records have one length.

    Raises
    ------
    MovementFailed
        A rank did not answer within ``timeout_s``, or is gone.
    """
    group, world = mesh.dp_group, mesh.num_ranks
    if group is None or world == 1:
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    table = torch.empty((world, len(record)), dtype=torch.uint8)
    try:
        if mesh.device.type == "cpu":
            _star(mine, table, mesh, timeout_s, doing)
        else:
            gathered = table.to(mesh.device)
            work = dist.all_gather_into_tensor(gathered, mine.to(mesh.device), group=group, async_op=True)
            wait_all([work], time.monotonic() + timeout_s, doing)
            table.copy_(gathered)
    except RuntimeError as error:
        raise MovementFailed(f"{doing}: {str(error).splitlines()[0]}") from error
    return [bytes(row.tolist()) for row in table]


def _star(mine: torch.Tensor, table: torch.Tensor, mesh: ParallelMesh, timeout_s: float, doing: str) -> None:
    group, root = mesh.dp_group, 0
    others = [rank for rank in range(mesh.num_ranks) if rank != root]
    deadline = time.monotonic() + timeout_s
    if mesh.rank == root:
        table[root] = mine
        arrivals = {rank: dist.irecv(table[rank], src=rank, group=group) for rank in others}
        for rank, work in arrivals.items():
            wait_all([work], deadline, f"{doing}: waiting for rank {rank}")
        wait_all([dist.isend(table, dst=rank, group=group) for rank in others], deadline, f"{doing}: answering")
        return
    wait_all([dist.isend(mine, dst=root, group=group)], deadline, f"{doing}: telling rank {root}")
    # later than the root's own deadline, so that the root, who can name the missing rank, is the first to give up
    wait_all([dist.irecv(table, src=root, group=group)], deadline + 0.5 + 0.1 * timeout_s, f"{doing}: rank {root}")


def broadcast_bytes(payload: bytes | None, mesh: ParallelMesh, *, source: int, timeout_s: float, doing: str) -> bytes:
    """The payload of DP rank ``source`` on every rank, checked by its hash; nothing is unpickled.

    Raises
    ------
    MovementFailed
        It did not arrive within ``timeout_s``, or not intact.
    """
    if mesh.dp_group is None or mesh.num_ranks == 1:
        assert payload is not None
        return payload
    header = torch.zeros(_HEADER.size, dtype=torch.uint8)
    if payload is not None:
        record = _HEADER.pack(len(payload), hashlib.sha256(payload).digest())
        header = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    deadline = time.monotonic() + timeout_s
    try:
        header = _send_to_all(header, mesh, source, deadline, doing)
        length, digest = _HEADER.unpack(bytes(header.tolist()))
        body = torch.zeros(length, dtype=torch.uint8)
        if payload:
            body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        body = _send_to_all(body, mesh, source, deadline, doing)
    except RuntimeError as error:
        raise MovementFailed(f"{doing}: {str(error).splitlines()[0]}") from error
    received: bytes = body.numpy().tobytes()
    if hashlib.sha256(received).digest() != digest:
        raise MovementFailed(f"{doing}: what rank {source} sent did not arrive intact")
    return received


def _send_to_all(tensor: torch.Tensor, mesh: ParallelMesh, source: int, deadline: float, doing: str) -> torch.Tensor:
    group = mesh.dp_group
    if mesh.device.type != "cpu":
        on_device = tensor.to(mesh.device)
        wait_all([dist.broadcast(on_device, src=source, group=group, async_op=True)], deadline, doing)
        return on_device.cpu()
    if mesh.rank == source:
        others = [rank for rank in range(mesh.num_ranks) if rank != source]
        wait_all([dist.isend(tensor, dst=rank, group=group) for rank in others], deadline, doing)
    else:
        wait_all([dist.irecv(tensor, src=source, group=group)], deadline, f"{doing}: waiting for rank {source}")
    return tensor
