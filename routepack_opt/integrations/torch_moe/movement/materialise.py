"""Move experts between EP ranks into the tensors that exist already: weights, masters, moments, whatever is per slot.

A change of placement is a transaction. All ranks first agree on the version, the map and the tensors
(:class:`PlacementDisagreement`, nothing changed). Then the bytes of :mod:`transfer_plan` travel, and nothing else.
Then all ranks confirm, and the slot map is published. Whatever goes wrong in between poisons the slot map on every
rank: the tensors may be mixed, so every later use is refused until a checkpoint is loaded.

Shape suffixes: L MoE layers, E experts, P EP ranks, H local slots (E / P).
"""

from __future__ import annotations

import hashlib
import struct
import time
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.integrations.torch_moe.movement.agreement import (
    MovementFailed,
    PlacementDisagreement,
    gather_records,
)
from routepack_opt.integrations.torch_moe.movement.report import MovementReport
from routepack_opt.integrations.torch_moe.movement.transfer_plan import (
    SlotBytes,
    TransferPlan,
    check_placement,
    plan_transfers,
)
from routepack_opt.integrations.torch_moe.movement.transport import Counter, Move, move_experts, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap

__all__ = ["DEFAULT_CHUNK_BYTES", "MovementFailed", "PlacementDisagreement", "materialise"]

DEFAULT_CHUNK_BYTES = 64 << 20
_FIELDS = ("standing version", "next version", "chunk_bytes", "standing placement", "placement", "slot tensors")
_BALLOT = struct.Struct("<?qqq32s32s32s160s")  # fit to go on, the fields in their order, what is wrong
_RESULT = struct.Struct("<?dqq160s")  # all well, seconds, bytes sent, staging bytes, what went wrong


@torch.no_grad()
def materialise(
    slot_tensors: Sequence[Any],
    slot_map: SlotMap,
    new_logical_to_slot: ArrayLike | torch.Tensor,
    mesh: ParallelMesh,
    *,
    version: int,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    timeout_s: float = 60.0,
    on_round: Callable[[int], None] | None = None,
) -> MovementReport:
    """Put the next placement in force; every rank of the job calls it with the same map and version.

    Parameters
    ----------
    slot_tensors
        Objects with ``name``, ``moe_layer`` and ``tensor`` [H, ...] of any dtype, dim 0 the local slot: all per-expert
        state, in one order on all ranks.
    slot_map
        In force now; published at the end.
    new_logical_to_slot
        int [L, E].
    version
        ``slot_map.version + 1``.
    chunk_bytes
        Most bytes of staging on any rank.
    timeout_s
        The longest wait for any other rank.
    on_round
        Called with the number of each finished round (progress, tests). Should it raise, this rank still serves the
        others' transfers, and then all ranks raise.

    Raises
    ------
    PlacementDisagreement
        The ranks differ, or some rank cannot take part; nothing has changed anywhere.
    InvalidInput
        On the rank whose own arguments are wrong; nothing has changed anywhere.
    MovementFailed
        Anything later; the slot map is poisoned on every rank that is still alive.
    """
    start = time.perf_counter()
    move, refusal = _prepare(slot_tensors, slot_map, new_logical_to_slot, mesh, version, chunk_bytes)
    try:
        _agree(slot_tensors, slot_map, move, refusal, mesh, version, chunk_bytes, timeout_s)
    except MovementFailed as error:  # another rank may have gone ahead
        slot_map.poison(str(error))
        raise
    assert move is not None
    counter, failure = Counter(), None
    try:
        move_experts(move, mesh, timeout_s, on_round, counter)
    except Exception as error:
        failure = error
    except BaseException:
        slot_map.poison(f"version {version}: interrupted while experts moved")
        raise
    if not move.plan.chunks:
        slot_map.publish(move.new_slots, version)
        return _report(move.plan, mesh, version, counter.sent, counter.sent, time.perf_counter() - start, 0)
    return _confirm(move, slot_map, mesh, version, timeout_s, counter, failure, start)


def _prepare(
    slot_tensors: Sequence[Any],
    slot_map: SlotMap,
    new_logical_to_slot: ArrayLike | torch.Tensor,
    mesh: ParallelMesh,
    version: int,
    chunk_bytes: int,
) -> tuple[Move | None, Exception | None]:
    """Plan, take views, allocate: all that can fail on one rank alone happens before any rank moves anything."""
    try:
        if version != slot_map.version + 1:
            raise InvalidInput(f"version: {version} does not follow {slot_map.version}")
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int):
            raise InvalidInput(f"chunk_bytes: {chunk_bytes!r} is not an integer")
        old = slot_map.logical_to_slot.cpu().numpy()
        if isinstance(new_logical_to_slot, torch.Tensor):
            new_logical_to_slot = new_logical_to_slot.cpu().numpy()
        new = check_placement(new_logical_to_slot, "new_logical_to_slot")
        if new.shape != old.shape:
            raise InvalidInput(f"new_logical_to_slot: shape {new.shape}, expected {old.shape}")
        num_slots = old.shape[1] // mesh.num_ep
        rows = [slot_bytes(entry, num_slots, mesh.device) for entry in slot_tensors]
        sizes = [
            SlotBytes(int(entry.moe_layer), int(view.shape[1]), int(entry.tensor.element_size()))
            for entry, view in zip(slot_tensors, rows, strict=True)
        ]
        plan = plan_transfers(old, new, mesh.num_ep, sizes, chunk_bytes=chunk_bytes)
        size = int(plan.staging_bytes[mesh.ep_rank])
        return Move(plan, rows, torch.empty(size, dtype=torch.uint8, device=mesh.device), new), None
    except Exception as error:  # told to the other ranks, then raised
        return None, error


def _agree(
    slot_tensors: Sequence[Any],
    slot_map: SlotMap,
    move: Move | None,
    refusal: Exception | None,
    mesh: ParallelMesh,
    version: int,
    chunk_bytes: int,
    timeout_s: float,
) -> None:
    """Every rank wants the same; else every rank raises and nothing has changed."""
    standing, old, new, tensors = -1, b"", b"", ""
    if move is not None:
        standing, old = slot_map.version, slot_map.logical_to_slot.cpu().numpy().tobytes()
        new = move.new_slots.tobytes()
        tensors = repr([(e.name, int(e.moe_layer), tuple(e.tensor.shape), str(e.tensor.dtype)) for e in slot_tensors])
    else:
        version = chunk_bytes = 0  # whatever they are: this rank refuses
    ballot = _BALLOT.pack(
        refusal is None,
        standing,
        _clamp(version),
        _clamp(chunk_bytes),
        *(hashlib.sha256(text).digest() for text in (old, new, tensors.encode())),
        _short(refusal),
    )
    ballots = [
        _BALLOT.unpack(b) for b in gather_records(ballot, mesh, timeout_s=timeout_s, doing="agreeing on a placement")
    ]
    if refusal is not None:
        raise refusal
    for rank, (fit, *_, why) in enumerate(ballots):
        if not fit:
            raise PlacementDisagreement(f"version {version}: rank {rank} refuses ({_text(why)}); nothing was moved")
    for number, name in enumerate(_FIELDS, start=1):
        values = [b[number] for b in ballots]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            found = f": {values[odd[0]]} against {values[0]}" if isinstance(values[0], int) else ""
            raise PlacementDisagreement(
                f"version {version}: rank {odd[0]} differs from rank 0 in its {name}{found}; nothing was moved"
            )


def _confirm(
    move: Move,
    slot_map: SlotMap,
    mesh: ParallelMesh,
    version: int,
    timeout_s: float,
    counter: Counter,
    failure: Exception | None,
    start: float,
) -> MovementReport:
    """Publish when every rank is done; poison when any is not."""
    planned = int(move.plan.sent_bytes[mesh.ep_rank])
    if failure is None and counter.sent != planned:
        failure = AssertionError(f"sent {counter.sent} bytes, planned {planned}")
    seconds = time.perf_counter() - start
    record = _RESULT.pack(failure is None, seconds, counter.sent, move.staging.numel(), _short(failure))
    # who has failed only tells the others: whether they can still hear it is not worth a long wait
    wait_s = timeout_s if failure is None else min(timeout_s, 2.0)
    try:
        results = [
            _RESULT.unpack(r) for r in gather_records(record, mesh, timeout_s=wait_s, doing=f"confirming {version}")
        ]
    except MovementFailed as error:
        reason = f"version {version}: {error}" if failure is None else f"version {version}: rank {mesh.rank}: {failure}"
        slot_map.poison(reason)
        raise _failed(reason) from (failure or error)
    for rank, (well, *_, why) in enumerate(results):
        if not well:
            reason = f"version {version}: rank {rank}: {_text(why)}"
            slot_map.poison(reason)
            raise _failed(reason) from failure
    slot_map.publish(move.new_slots, version)
    moved = sum(results[rank][2] for rank in mesh.ep_members)
    peak = max(result[3] for result in results)
    return _report(move.plan, mesh, version, counter.sent, moved, max(result[1] for result in results), peak)


def _report(
    plan: TransferPlan, mesh: ParallelMesh, version: int, sent: int, moved: int, seconds: float, peak: int
) -> MovementReport:
    return MovementReport(
        version=version,
        planned_bytes=plan.planned_bytes,
        moved_bytes=moved,
        rank_planned_bytes=int(plan.sent_bytes[mesh.ep_rank]),
        sent_bytes=sent,
        rounds=plan.num_rounds,
        chunks=len(plan.chunks),
        seconds=seconds,
        peak_extra_bytes=peak,
        moved_experts=tuple(plan.moved_experts.tolist()),
    )


def _failed(reason: str) -> MovementFailed:
    return MovementFailed(f"experts were left between two placements ({reason}); restart from the last checkpoint")


def _clamp(value: Any) -> int:
    return max(-(2**63), min(2**63 - 1, int(value)))


def _short(error: Exception | None) -> bytes:
    if error is None:
        return b""
    text = str(error) if isinstance(error, RoutePackError) else f"{type(error).__name__}: {error}"
    return text.encode(errors="replace")[:160]


def _text(record: bytes) -> str:
    return record.rstrip(b"\0").decode(errors="replace")
