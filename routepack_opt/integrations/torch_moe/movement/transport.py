"""The bytes of a transfer plan, from slot to slot: views of the live tensors, a staging buffer, messages by rounds.

Shape suffixes: H local slots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.agreement import wait_all
from routepack_opt.integrations.torch_moe.movement.transfer_plan import (
    LAYER,
    SOURCE,
    SOURCE_SLOT,
    TARGET,
    TARGET_SLOT,
    Chunk,
    Piece,
    TransferPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Move:
    """One rank's part of a change of placement, ready to run.

    Attributes
    ----------
    rows
        uint8 [H, bytes of a slot] of every slot tensor, see :func:`slot_bytes`.
    staging
        uint8, as large as the plan says for this rank.
    new_slots
        int64 [L, E], logical_to_slot after the move.
    """

    plan: TransferPlan
    rows: list[torch.Tensor]
    staging: torch.Tensor
    new_slots: NDArray[np.int64]


class Counter:
    """Bytes handed to the transport by this rank."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.sent = 0


def slot_bytes(entry: Any, num_slots: int, device: torch.device) -> torch.Tensor:
    """uint8 [H, bytes], a view of one slot tensor; refuses tensors whose slots cannot be written in place."""
    tensor = entry.tensor.detach()
    if tensor.ndim < 1 or tensor.shape[0] != num_slots:
        raise InvalidInput(f"slot_tensors: {entry.name}: shape {tuple(tensor.shape)}, expected {num_slots} slots first")
    if not tensor.is_contiguous():
        raise InvalidInput(f"slot_tensors: {entry.name}: not contiguous; slots cannot be moved in place")
    if tensor.device.type != device.type:
        raise InvalidInput(f"slot_tensors: {entry.name}: lives on {tensor.device}, the job communicates on {device}")
    return tensor.view(num_slots, tensor.numel() // num_slots).view(torch.uint8)


def move_experts(
    move: Move, mesh: ParallelMesh, timeout_s: float, on_round: Callable[[int], None] | None, counter: Counter
) -> None:
    """Carry out all chunks; an error of ``on_round`` is raised at the end, after the others got what they wait for."""
    if move.plan.num_rounds and mesh.device.type != "cpu":
        # NCCL sets a group up in its first collective, in which all members must take part
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.ep_group)
    failure: Exception | None = None
    done = 0
    for chunk in move.plan.chunks:
        pieces = _pieces_by_layer(chunk)
        landings = _stage_copies(move, chunk.copies, pieces, mesh.ep_rank)
        for transfers in chunk.rounds:
            operations, arriving = _round(move, transfers, pieces, mesh, landings)
            counter.sent += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
            if operations:
                works = dist.batch_isend_irecv(operations)
                wait_all(works, time.monotonic() + timeout_s, f"rank {mesh.rank} moving experts")
            landings += arriving
            done += 1
            if on_round is not None and failure is None:
                try:
                    on_round(done)
                except Exception as error:
                    failure = error
        for target, staged in landings:
            target.copy_(staged)
    if failure is not None:
        raise failure


_Landings = list[tuple[torch.Tensor, torch.Tensor]]  # (bytes of a slot, what goes there)


def _pieces_by_layer(chunk: Chunk) -> dict[int, list[Piece]]:
    pieces: dict[int, list[Piece]] = {}
    for piece in chunk.pieces:
        pieces.setdefault(piece.moe_layer, []).append(piece)
    return pieces


def _room(move: Move, landings: _Landings, num_bytes: int) -> torch.Tensor:
    start = landings[-1][1].storage_offset() + landings[-1][1].numel() if landings else 0
    return move.staging[start : start + num_bytes]


def _stage_copies(move: Move, copies: NDArray[np.int64], pieces: dict[int, list[Piece]], ep_rank: int) -> _Landings:
    landings: _Landings = []
    for row in copies[copies[:, SOURCE] == ep_rank].tolist():
        for piece in pieces[row[LAYER]]:
            view, part = move.rows[piece.tensor], slice(piece.low, piece.high)
            staged = _room(move, landings, piece.num_bytes)
            staged.copy_(view[row[SOURCE_SLOT], part])
            landings.append((view[row[TARGET_SLOT], part], staged))
    return landings


def _round(
    move: Move,
    transfers: NDArray[np.int64],
    pieces: dict[int, list[Piece]],
    mesh: ParallelMesh,
    landings: _Landings,
) -> tuple[list[dist.P2POp], _Landings]:
    """One expert at most leaves, straight from its slot, and one arrives in staging."""
    operations, arrived = [], list(landings)
    mine = (transfers[:, SOURCE] == mesh.ep_rank) | (transfers[:, TARGET] == mesh.ep_rank)
    for row in transfers[mine].tolist():
        for piece in pieces[row[LAYER]]:
            view, part = move.rows[piece.tensor], slice(piece.low, piece.high)
            if row[SOURCE] == mesh.ep_rank:
                peer = mesh.ep_members[row[TARGET]]
                operations.append(dist.P2POp(dist.isend, view[row[SOURCE_SLOT], part], peer, group=mesh.ep_group))
            else:
                staged = _room(move, arrived, piece.num_bytes)
                peer = mesh.ep_members[row[SOURCE]]
                operations.append(dist.P2POp(dist.irecv, staged, peer, group=mesh.ep_group))
                arrived.append((view[row[TARGET_SLOT], part], staged))
    return operations, arrived[len(landings) :]
