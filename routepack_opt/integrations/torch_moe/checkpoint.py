"""Save and load a training job in logical order: any EP size, EDP size and placement reads what any other wrote.

Saving: every rank writes its share into a temporary folder, all confirm, rank 0 writes the manifest and renames the
folder. Loading: every rank checks all it needs against headers and sizes, all confirm, and only then are tensors
written. A rank that fails, in either, makes all ranks raise.

Names: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.errors import FormatError, InvalidInput, RoutePackError
from routepack_opt.files import file_path
from routepack_opt.integrations.torch_moe.agreement import MovementFailed, gather_records
from routepack_opt.integrations.torch_moe.checkpoint_manifest import (
    FileRecord,
    Manifest,
    check_file_sizes,
    latest_checkpoint,
    list_checkpoints,
    prune,
    put_in_place,
    rank_file,
    read_manifest,
    remove_scraps,
    step_folder,
    write_manifest,
)
from routepack_opt.integrations.torch_moe.checkpoint_pieces import STATE_KINDS, Piece, local_pieces, logical_names
from routepack_opt.integrations.torch_moe.slot_map import SlotMap
from routepack_opt.integrations.torch_moe.tensor_file import (
    StoredTensor,
    TensorFile,
    read_header,
    read_range,
    write_tensors,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from routepack_opt.integrations.torch_moe.mesh import ParallelMesh

__all__ = ["latest_checkpoint", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

_log = logging.getLogger(__name__)
_REPORT = struct.Struct("<?400s32sqq32s")  # all well, what went wrong, checkpoint id, file: bytes, tensors, sha256
_ID_BYTES = 16
_RUN_DEPENDENT = {"max_positions"}  # model fields that change no tensor and no result
_Read = tuple[StoredTensor, int, int, torch.Tensor]  # entries [start, stop) of a stored tensor go there


class CheckpointError(RoutePackError):
    """A checkpoint could not be written; the ones before it are whole."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: Any,
    optimizer: Any | None,
    slot_map: SlotMap,
    mesh: ParallelMesh,
    extra: dict[str, Any] | None = None,
    *,
    keep_last: int | None = 3,
    timeout_s: float = 1800.0,
) -> Path:
    """Write ``<folder>/step-NNNNNNNN``; every rank calls it at a step boundary, on a filesystem they share.

    Parameters
    ----------
    step
        Optimizer steps done; names the checkpoint.
    optimizer
        MoEAdamW, or None for weights only.
    extra
        The caller's own state as plain JSON: data position, seeds, metrics. Rank 0's is kept.
    keep_last
        Remove older complete checkpoints beyond this many; None keeps all.
    timeout_s
        The longest wait for the slowest rank.

    Returns
    -------
    The checkpoint's folder.

    Raises
    ------
    CheckpointError
        Some rank failed (disk full, placement broken, gone); names it. Former checkpoints are untouched.
    InvalidInput
        On the rank whose own arguments are wrong.
    """
    root = file_path(folder)
    final = root / step_folder(step)
    checkpoint_id, problem = b"", None
    if mesh.rank == 0:
        checkpoint_id = secrets.token_bytes(_ID_BYTES)
        problem = _attempt(lambda: _open_folder(_temporary(final, checkpoint_id), keep_last, extra))
    checkpoint_id = _share(mesh, problem, timeout_s, "opening a checkpoint", checkpoint_id)[0][2][:_ID_BYTES]
    temporary = _temporary(final, checkpoint_id)
    written: list[TensorFile] = []

    def write() -> None:
        pieces = local_pieces(model, optimizer, mesh, slot_map.slot_to_logical.cpu().numpy())
        mine = [(piece.key, _shaped(piece)) for piece in pieces if piece.writer == mesh.rank]
        metadata = {"format": "pt", "checkpoint": checkpoint_id.hex(), "rank": str(mesh.rank)}
        written.append(write_tensors(temporary / rank_file(mesh.rank), [*mine, *_random_states(mesh)], metadata))

    problem = _attempt(write)
    try:
        reports = _share(mesh, problem, timeout_s, "writing a checkpoint", b"", *written)
        if mesh.rank == 0:
            manifest = _manifest(checkpoint_id, step, model, optimizer, slot_map, mesh, reports, extra)
            problem = _attempt(lambda: _publish(temporary, final, manifest, keep_last))
        _share(mesh, problem, timeout_s, "finishing a checkpoint")
    except Exception:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _temporary(final: Path, checkpoint_id: bytes) -> Path:
    return final.with_name(f".tmp-{final.name}-{checkpoint_id.hex()[:8]}")


def _open_folder(temporary: Path, keep_last: int | None, extra: Any) -> None:
    if extra is not None and not isinstance(extra, dict):
        raise InvalidInput(f"extra: expected a dict of plain JSON, found {type(extra).__name__}")
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise InvalidInput(f"keep_last: {keep_last!r} is not a count of at least 1, nor None")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        remove_scraps(temporary.parent)
        temporary.mkdir()
    except OSError as error:
        raise InvalidInput(f"{temporary.parent}: cannot be written ({error.strerror or error})") from None


def _shaped(piece: Piece) -> torch.Tensor:
    return piece.entries.view(piece.shape) if piece.is_whole else piece.entries


def _manifest(
    checkpoint_id: bytes,
    step: int,
    model: Any,
    optimizer: Any | None,
    slot_map: SlotMap,
    mesh: ParallelMesh,
    reports: Sequence[tuple[Any, ...]],
    extra: dict[str, Any] | None,
) -> Manifest:
    topology = mesh.topology
    return Manifest(
        checkpoint_id=checkpoint_id.hex(),
        step=step,
        model=model.config.to_dict(),
        topology={"dp": topology.dp, "ep": topology.ep, "shards": [list(ranks) for ranks in topology.shards]},
        logical_to_slot=slot_map.logical_to_slot.cpu().numpy(),
        placement_version=slot_map.version,
        optimizer=None if optimizer is None else {"steps": int(optimizer.steps)},
        files=tuple(
            FileRecord(rank_file(rank), num_bytes, num_tensors, digest.hex())
            for rank, (*_, num_bytes, num_tensors, digest) in enumerate(reports)
        ),
        extra=extra or {},
    )


def _publish(temporary: Path, final: Path, manifest: Manifest, keep_last: int | None) -> None:
    try:
        check_file_sizes(temporary, manifest)
    except FormatError as error:
        raise CheckpointError(f"rank 0 does not see what another rank wrote, do they share a disk? {error}") from None
    write_manifest(temporary, manifest)
    put_in_place(temporary, final, manifest.checkpoint_id[:8])
    if keep_last is not None:
        prune(final.parent, keep_last, final)


@torch.no_grad()
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any | None,
    slot_map: SlotMap,
    mesh: ParallelMesh,
    *,
    placement: ArrayLike | None = None,
    restore_random: bool = True,
    timeout_s: float = 1800.0,
) -> dict[str, Any]:
    """Read one checkpoint into the tensors that exist already; every rank calls it.

    Parameters
    ----------
    folder
        One checkpoint, see :func:`latest_checkpoint`.
    optimizer
        MoEAdamW, or None to read weights only.
    slot_map
        The model's; gets the placement below, and heals when it was broken.
    placement
        int [L, E] logical_to_slot; None takes the checkpoint's own.
    restore_random
        Put the random generators of torch where they were, on ranks that had a state of their own then.

    Returns
    -------
    The ``extra`` that was saved.

    Raises
    ------
    FormatError
        On every rank when any finds the checkpoint unfit: names the file and the tensor. Nothing has been changed,
        unless a disk failed while already checked data was read: then the slot map is poisoned.
    """
    plan: list[Any] = []
    problem = _attempt(lambda: plan.extend(_plan(file_path(folder), model, optimizer, slot_map, mesh, placement)))
    identity = bytes.fromhex(plan[0].checkpoint_id) if plan else b""
    reports = _share(mesh, problem, timeout_s, "checking a checkpoint", identity, failure=FormatError)
    if len({report[2] for report in reports}) > 1:
        raise FormatError(f"{folder}: the ranks see different checkpoints there")
    manifest, table_LE, reads, index = plan

    def read() -> None:
        for stored, start, stop, target in reads:
            read_range(stored, start, stop, target)

    try:
        problem = _attempt(read)
        _share(mesh, problem, timeout_s, "reading a checkpoint", failure=FormatError)
    except BaseException as error:
        slot_map.poison(f"a checkpoint was read in part: {error}")
        raise
    version = manifest.placement_version + int(not np.array_equal(table_LE, manifest.logical_to_slot))
    slot_map.restore(table_LE, version)
    if optimizer is not None:
        optimizer.steps = manifest.optimizer["steps"]
    if restore_random:
        _restore_random(index, mesh, same_ranks=manifest.topology["dp"] == mesh.num_ranks)
    result: dict[str, Any] = manifest.extra
    return result


def _plan(
    folder: Path, model: Any, optimizer: Any | None, slot_map: SlotMap, mesh: ParallelMesh, placement: ArrayLike | None
) -> tuple[Manifest, NDArray[np.int64], list[_Read], dict[str, list[tuple[int, StoredTensor]]]]:
    """All that loading will do on this rank, checked; changes nothing."""
    manifest = read_manifest(folder)
    _check_model(folder, manifest, model)
    if optimizer is not None and manifest.optimizer is None:
        raise FormatError(f"{folder}: holds weights only, no optimizer state; load it without an optimizer")
    table_LE = manifest.logical_to_slot if placement is None else SlotMap(placement).logical_to_slot.numpy()
    expected = (slot_map.num_layers, slot_map.num_experts)
    if table_LE.shape != expected:
        where = f"{folder}: placement" if placement is None else "placement"
        raise FormatError(f"{where}: is for {table_LE.shape} MoE layers and experts, the model has {expected}")
    check_file_sizes(folder, manifest)
    index = _index(folder, manifest)
    _check_names(folder, index, model, optimizer)
    reads: list[_Read] = []
    for piece in local_pieces(model, optimizer, mesh, np.argsort(table_LE, axis=1)):
        reads += _reads_of(folder, piece, index)
    return manifest, table_LE, reads, index


def _check_model(folder: Path, manifest: Manifest, model: Any) -> None:
    own = model.config.to_dict()
    for name in sorted((set(own) | set(manifest.model)) - _RUN_DEPENDENT):
        if name not in manifest.model or name not in own or own[name] != manifest.model[name]:
            found, wanted = manifest.model.get(name, "nothing"), own.get(name, "nothing")
            raise FormatError(
                f"{folder / 'manifest.json'}: field 'model.{name}': the checkpoint has {found!r}, this model {wanted!r}"
            )


def _index(folder: Path, manifest: Manifest) -> dict[str, list[tuple[int, StoredTensor]]]:
    """Logical name -> stored parts as (first entry, where), in order; every header is checked against the manifest."""
    index: dict[str, list[tuple[int, StoredTensor]]] = {}
    for record in manifest.files:
        stored_file = read_header(folder / record.name)
        if stored_file.metadata.get("checkpoint") != manifest.checkpoint_id:
            raise FormatError(f"{stored_file.path}: belongs to another checkpoint than {folder / 'manifest.json'}")
        if (stored_file.num_bytes, len(stored_file.tensors), stored_file.header_sha256) != (
            record.num_bytes,
            record.num_tensors,
            record.header_sha256,
        ):
            raise FormatError(f"{stored_file.path}: is not the file that was written (size or header differ)")
        for key, stored in stored_file.tensors.items():
            name, at, start = key.rpartition("@")
            is_part = bool(at) and start.isascii() and start.isdigit() and len(start) < 19
            index.setdefault(name if is_part else key, []).append((int(start) if is_part else 0, stored))
    for parts in index.values():
        parts.sort(key=lambda part: part[0])
    return index


def _check_names(folder: Path, index: dict[str, Any], model: Any, optimizer: Any | None) -> None:
    """Nothing that was saved is silently left behind."""
    known = logical_names(model, optimizer)
    for name in sorted(set(index) - known):
        kind = name.partition(".")[0]
        if kind != "random" and not (optimizer is None and kind in STATE_KINDS):
            raise FormatError(
                f"{folder}: tensor {name!r} has no place in this model or optimizer (other weight dtype?)"
            )


def _reads_of(folder: Path, piece: Piece, index: dict[str, list[tuple[int, StoredTensor]]]) -> list[_Read]:
    """What to read for one piece; its tensor must be stored whole: no gap, no overlap, one dtype, the right shape."""
    parts = index.get(piece.name, [])
    if not parts:
        raise FormatError(f"{folder}: tensor {piece.name!r} is missing")
    reads: list[_Read] = []
    end, size = 0, int(np.prod(piece.shape, dtype=np.int64))
    for start, stored in parts:
        if stored.dtype != piece.entries.dtype:
            raise FormatError(f"{stored.where}: dtype {stored.dtype}, expected {piece.entries.dtype}")
        whole = len(parts) == 1 and "@" not in stored.key
        if (whole and stored.shape != piece.shape) or (not whole and len(stored.shape) != 1):
            raise FormatError(f"{stored.where}: shape {stored.shape}, expected {piece.shape}")
        if start != end:
            raise FormatError(
                f"{stored.where}: begins at entry {start} where {end} is expected (stored twice, or a gap)"
            )
        end = start + stored.numel
        low, high = max(piece.start, start), min(piece.stop, end)
        if low < high:
            target = piece.entries.view(-1)[low - piece.start : high - piece.start]
            reads.append((stored, low - start, high - start, target))
    if end != size:
        raise FormatError(f"{parts[-1][1].where}: ends at entry {end} of {size}")
    return reads


def _random_states(mesh: ParallelMesh) -> list[tuple[str, torch.Tensor]]:
    states = [(f"random.cpu.{mesh.rank}", torch.get_rng_state())]
    if mesh.device.type == "cuda":
        states.append((f"random.cuda.{mesh.rank}", torch.cuda.get_rng_state(mesh.device)))
    return states


def _restore_random(index: dict[str, list[tuple[int, StoredTensor]]], mesh: ParallelMesh, *, same_ranks: bool) -> None:
    if not same_ranks:
        _log.info("random generators stay as they are: the checkpoint was written by another number of ranks")
        return
    for device in ("cpu", "cuda"):
        parts = index.get(f"random.{device}.{mesh.rank}")
        if not parts or (device == "cuda" and mesh.device.type != "cuda"):
            continue
        stored = parts[0][1]
        state = torch.empty(stored.shape, dtype=stored.dtype)
        read_range(stored, 0, stored.numel, state)
        try:
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, mesh.device)
        except (RuntimeError, TypeError) as error:  # another version of torch may keep other states
            _log.warning("%s: not a state of this generator (%s); left as it is", stored.where, error)


def _attempt(action: Callable[[], None]) -> Exception | None:
    """The error of ``action`` or None: it is shared with the other ranks before it is raised."""
    try:
        action()
    except Exception as error:
        return error
    return None


def _share(
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
