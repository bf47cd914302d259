"""Save and load a training job in logical order: any EP size, EDP size and placement reads what any other wrote.

Saving: every rank writes its share into a temporary folder, all confirm, rank 0 writes the manifest and renames the
folder. Loading: every rank checks all it needs against headers and sizes, all confirm, and only then are tensors
written. A rank that fails, in either, makes all ranks raise.

Names: L MoE layers, E experts.
"""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path
from routepack_opt.integrations.torch_moe.checkpoint.failures import CheckpointError, attempt, share
from routepack_opt.integrations.torch_moe.checkpoint.manifest import (
    FileRecord,
    Manifest,
    check_file_sizes,
    latest_checkpoint,
    list_checkpoints,
    prune,
    put_in_place,
    rank_file,
    remove_scraps,
    step_folder,
    write_manifest,
)
from routepack_opt.integrations.torch_moe.checkpoint.pieces import Piece, local_pieces
from routepack_opt.integrations.torch_moe.checkpoint.reading import LoadPlan, plan_loading, restore_random_states
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import TensorFile, read_range, write_tensors

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap

__all__ = ["CheckpointError", "latest_checkpoint", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

_ID_BYTES = 16


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
        problem = attempt(lambda: _open_folder(_temporary(final, checkpoint_id), keep_last, extra))
    checkpoint_id = share(mesh, problem, timeout_s, "opening a checkpoint", checkpoint_id)[0][2][:_ID_BYTES]
    temporary = _temporary(final, checkpoint_id)
    written: list[TensorFile] = []

    def write() -> None:
        pieces = local_pieces(model, optimizer, mesh, slot_map.slot_to_logical.cpu().numpy())
        mine = [(piece.key, _shaped(piece)) for piece in pieces if piece.writer == mesh.rank]
        metadata = {"format": "pt", "checkpoint": checkpoint_id.hex(), "rank": str(mesh.rank)}
        written.append(write_tensors(temporary / rank_file(mesh.rank), [*mine, *_random_states(mesh)], metadata))

    problem = attempt(write)
    try:
        reports = share(mesh, problem, timeout_s, "writing a checkpoint", b"", *written)
        if mesh.rank == 0:
            manifest = _manifest(checkpoint_id, step, model, optimizer, slot_map, mesh, reports, extra)
            problem = attempt(lambda: _publish(temporary, final, manifest, keep_last))
        share(mesh, problem, timeout_s, "finishing a checkpoint")
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
        MoEAdamW, or None to read weights only; an optimizer that exists already then needs its
        ``refresh_masters()``, or bf16 weights go back to the old masters with its next step.
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
    plans: list[LoadPlan] = []
    problem = attempt(
        lambda: plans.append(plan_loading(file_path(folder), model, optimizer, slot_map, mesh, placement))
    )
    identity = bytes.fromhex(plans[0].manifest.checkpoint_id) if plans else b""
    reports = share(mesh, problem, timeout_s, "checking a checkpoint", identity, failure=FormatError)
    if len({report[2] for report in reports}) > 1:
        raise FormatError(f"{folder}: the ranks see different checkpoints there")
    (plan,) = plans
    manifest = plan.manifest
    try:
        problem = attempt(lambda: _read(plan))
        share(mesh, problem, timeout_s, "reading a checkpoint", failure=FormatError)
    except BaseException as error:
        slot_map.poison(f"a checkpoint was read in part: {error}")
        raise
    same = np.array_equal(plan.logical_to_slot, manifest.logical_to_slot)
    slot_map.restore(plan.logical_to_slot, manifest.placement_version + (0 if same else 1))
    if optimizer is not None and manifest.optimizer is not None:
        optimizer.steps = manifest.optimizer["steps"]
    if restore_random:
        restore_random_states(plan.random_states, mesh)
    return manifest.extra


def _read(plan: LoadPlan) -> None:
    for stored, start, stop, target in plan.reads:
        read_range(stored, start, stop, target)


def _random_states(mesh: ParallelMesh) -> list[tuple[str, torch.Tensor]]:
    states = [(f"random.cpu.{mesh.rank}", torch.get_rng_state())]
    if mesh.device.type == "cuda":
        states.append((f"random.cuda.{mesh.rank}", torch.cuda.get_rng_state(mesh.device)))
    return states
