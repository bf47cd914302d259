"""What loading will do on this rank, checked to the last tensor before any of it is done.

Names: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.errors import FormatError
from routepack_opt.integrations.torch_moe.checkpoint.manifest import Manifest, check_file_sizes, read_manifest
from routepack_opt.integrations.torch_moe.checkpoint.pieces import STATE_KINDS, Piece, local_pieces, logical_names
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import StoredTensor, read_header
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

_log = logging.getLogger(__name__)
_RUN_DEPENDENT = {"max_positions"}  # model fields that change no tensor and no result
Read = tuple[StoredTensor, int, int, torch.Tensor]  # entries [start, stop) of a stored tensor go there


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """A checked checkpoint: its manifest, the placement to come, what to read, and room for the generators' states."""

    manifest: Manifest
    logical_to_slot: NDArray[np.int64]
    reads: list[Read]
    random_states: dict[str, torch.Tensor]


def plan_loading(
    folder: Path, model: Any, optimizer: Any | None, slot_map: SlotMap, mesh: ParallelMesh, placement: ArrayLike | None
) -> LoadPlan:
    """All that loading will do on this rank, checked; changes nothing.

    Raises
    ------
    FormatError
        The checkpoint is damaged, or another model's; names file and tensor.
    """
    manifest = read_manifest(folder)
    _check_model(folder, manifest, model)
    if optimizer is not None and manifest.optimizer is None:
        raise FormatError(f"{folder}: holds weights only, no optimizer state; load it without an optimizer")
    table_LE = manifest.logical_to_slot if placement is None else SlotMap(placement).logical_to_slot.numpy()
    expected = (slot_map.num_layers, slot_map.num_experts)
    if not table_LE.shape[0]:  # no MoE layer at all: JSON's empty list has lost the number of experts
        table_LE = table_LE.reshape(0, slot_map.num_experts)
    if table_LE.shape != expected:
        where = f"{folder}: placement" if placement is None else "placement"
        raise FormatError(f"{where}: is for {table_LE.shape} MoE layers and experts, the model has {expected}")
    check_file_sizes(folder, manifest)
    index = _index(folder, manifest)
    _check_names(folder, index, model, optimizer)
    reads: list[Read] = []
    for piece in local_pieces(model, optimizer, mesh, np.argsort(table_LE, axis=1)):
        reads += _reads_of(folder, piece, index)
    states, random_reads = _random_reads(index, manifest, mesh)
    return LoadPlan(manifest, table_LE, reads + random_reads, states)


def _check_model(folder: Path, manifest: Manifest, model: Any) -> None:
    own = model.config.to_dict()
    for name in sorted((set(own) | set(manifest.model)) - _RUN_DEPENDENT):
        if name not in manifest.model or name not in own or own[name] != manifest.model[name]:
            found, wanted = manifest.model.get(name, "nothing"), own.get(name, "nothing")
            raise FormatError(
                f"{folder / 'manifest.json'}: field 'model.{name}': the checkpoint has {_brief(found)},"
                f" this model {_brief(wanted)}"
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


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


def _reads_of(folder: Path, piece: Piece, index: dict[str, list[tuple[int, StoredTensor]]]) -> list[Read]:
    """What to read for one piece; its tensor must be stored whole: no gap, no overlap, one dtype, the right shape."""
    parts = index.get(piece.name, [])
    if not parts:
        raise FormatError(f"{folder}: tensor {piece.name!r} is missing")
    reads: list[Read] = []
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


def _random_reads(
    index: dict[str, list[tuple[int, StoredTensor]]], manifest: Manifest, mesh: ParallelMesh
) -> tuple[dict[str, torch.Tensor], list[Read]]:
    """Room for this rank's states of the random generators, by device, and the reads that fill it."""
    if manifest.topology["dp"] != mesh.num_ranks:
        _log.info("random generators stay as they are: the checkpoint was written by another number of ranks")
        return {}, []
    states, reads = {}, []
    for device in ("cpu", "cuda") if mesh.device.type == "cuda" else ("cpu",):
        for _, stored in index.get(f"random.{device}.{mesh.rank}", []):
            states[device] = torch.empty(stored.shape, dtype=stored.dtype)
            reads.append((stored, 0, stored.numel, states[device]))
    return states, reads


def restore_random_states(states: dict[str, torch.Tensor], mesh: ParallelMesh) -> None:
    """Put torch's generators where they were; another version of torch may keep other states, which is only logged."""
    for device, state in states.items():
        try:
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, mesh.device)
        except (RuntimeError, TypeError) as error:
            _log.warning("random generator of %s left as it is: the stored state does not fit (%s)", device, error)
