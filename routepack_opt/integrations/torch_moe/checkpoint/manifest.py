"""What a checkpoint folder promises: its manifest, and which folders under a root are complete.

A checkpoint is ``<root>/step-00000012/`` with one ``rank-00003.safetensors`` per rank that wrote, and
``manifest.json``. The folder gets its name by a rename after everything in it is on disk, so a name is a promise; what
a crash left behind begins with a dot and is removed by the next save.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
FORMAT = "routepack.checkpoint/1"
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,18})")
_SCRAP = re.compile(r"\.(tmp|old)-step-\d{8,18}-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
_MAX_INTEGER = 1 << 62


@dataclass(frozen=True)
class FileRecord:
    """A tensor file as it was written: name in the folder, bytes, tensors, sha256 of length field and header."""

    name: str
    num_bytes: int
    num_tensors: int
    header_sha256: str


@dataclass(frozen=True, eq=False)
class Manifest:
    """Everything about a checkpoint but the tensors.

    Attributes
    ----------
    checkpoint_id
        Random, repeated in every file's metadata: a file of another checkpoint is found out.
    step
        Optimizer steps of the job, as the caller counts them.
    model
        ``MoEConfig.to_dict()``.
    topology
        ``{"dp", "ep", "shards"}`` of the job that wrote it; loading needs none of them to be the same.
    logical_to_slot, placement_version
        int64 [L, E], the placement in force.
    optimizer
        ``{"steps": n}``, or None where only the model was saved.
    files, extra
        Tensor files; the caller's own JSON.
    """

    checkpoint_id: str
    step: int
    model: dict[str, Any]
    topology: dict[str, Any]
    logical_to_slot: NDArray[np.int64]
    placement_version: int
    optimizer: dict[str, Any] | None
    files: tuple[FileRecord, ...]
    extra: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The content of ``manifest.json``."""
        return {
            "format": FORMAT,
            "id": self.checkpoint_id,
            "step": self.step,
            "model": self.model,
            "topology": self.topology,
            "placement": {"version": self.placement_version, "logical_to_slot": self.logical_to_slot.tolist()},
            "optimizer": self.optimizer,
            "files": [
                {"name": f.name, "bytes": f.num_bytes, "tensors": f.num_tensors, "header_sha256": f.header_sha256}
                for f in self.files
            ],
            "extra": self.extra,
        }


def step_folder(step: int) -> str:
    """Name of a step's folder."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise InvalidInput(f"step: {step!r} is not an integer from 0 to 10^18 - 1")
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's tensor file."""
    return f"rank-{rank:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, synced; ``extra`` that JSON cannot hold raises InvalidInput."""
    try:
        write_json(folder / MANIFEST, manifest.to_json())
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"extra: not plain JSON ({error})") from None


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check a manifest; the tensor files are not looked at.

    Raises
    ------
    FormatError
        No manifest, another format, or a field that cannot be; names the file and the field.
    """
    path = file_path(folder) / MANIFEST
    if not path.exists():
        raise FormatError(f"{path}: not found; expected the folder of one complete checkpoint (step-NNNNNNNN)")
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(f"{path}: field 'format': expected {FORMAT!r}, found {found!r}")
    reader = _Reader(path, data)
    placement = _Reader(path, reader.table("placement"), "placement.")
    optimizer = data.get("optimizer")
    if optimizer is not None:
        _Reader(path, reader.table("optimizer"), "optimizer.").integer("steps")
    model, topology = reader.table("model"), reader.table("topology")
    _check_sizes(path, topology)
    return Manifest(
        checkpoint_id=reader.text("id", re.compile(r"[0-9a-f]{32}")),
        step=reader.integer("step"),
        model=model,
        topology=topology,
        logical_to_slot=_placement(path, placement.value("logical_to_slot", list)),
        placement_version=placement.integer("version"),
        optimizer=optimizer,
        files=_file_records(path, reader.value("files", list)),
        extra=reader.table("extra"),
    )


def _check_sizes(path: Path, topology: dict[str, Any]) -> None:
    sizes = _Reader(path, topology, "topology.")
    sizes.integer("dp")
    sizes.integer("ep")


def _placement(path: Path, rows: list[Any]) -> NDArray[np.int64]:
    where = f"{path}: field 'placement.logical_to_slot'"
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    for layer, row in enumerate(rows):
        plain = isinstance(row, list) and all(type(slot) is int for slot in row)
        if not plain or len(row) != width or sorted(row) != list(range(width)):
            raise FormatError(f"{where}[{layer}]: not a permutation of slots 0..{width - 1}")
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def _file_records(path: Path, entries: list[Any]) -> tuple[FileRecord, ...]:
    records = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise FormatError(f"{path}: field 'files[{index}]': expected an object")
        reader = _Reader(path, entry, f"files[{index}].")
        name = reader.text("name", _FILE_NAME)  # a plain file name: nothing outside the folder can be meant
        digest = reader.text("header_sha256", re.compile(r"[0-9a-f]{64}"))
        records.append(FileRecord(name, reader.integer("bytes"), reader.integer("tensors"), digest))
    if len({record.name for record in records}) != len(records):
        raise FormatError(f"{path}: field 'files': a file is listed twice")
    return tuple(records)


@dataclass(frozen=True)
class _Reader:
    path: Path
    data: dict[str, Any]
    prefix: str = ""

    def value(self, name: str, kind: type) -> Any:
        if name not in self.data:
            raise FormatError(f"{self.path}: field '{self.prefix}{name}' is missing")
        value = self.data[name]
        if type(value) is not kind:
            found = type(value).__name__
            raise FormatError(f"{self.path}: field '{self.prefix}{name}': expected {kind.__name__}, found {found}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = self.value(name, dict)
        return result

    def integer(self, name: str) -> int:
        value: int = self.value(name, int)
        if not 0 <= value < _MAX_INTEGER:
            raise FormatError(f"{self.path}: field '{self.prefix}{name}': {value} is out of range")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value: str = self.value(name, str)
        if not pattern.fullmatch(value):
            raise FormatError(f"{self.path}: field '{self.prefix}{name}': {value[:80]!r} is not what it should be")
        return value


def check_file_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file is there with the bytes it was written with, or FormatError."""
    for record in manifest.files:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
        if size != record.num_bytes:
            raise FormatError(f"{path}: {size} bytes, {record.num_bytes} were written; it may be truncated")


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints under ``root``, oldest step first; damaged ones are logged and left out."""
    root = file_path(root)
    found: list[tuple[int, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP_FOLDER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        try:
            check_file_sizes(path, read_manifest(path))
        except FormatError as error:
            _log.warning("checkpoint left out: %s", error)
        else:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    complete = list_checkpoints(root)
    return complete[-1] if complete else None


def put_in_place(temporary: Path, final: Path, token: str) -> None:
    """Give a finished folder its name; one of the same name (a step saved again) makes room first."""
    old = final.with_name(f".old-{final.name}-{token}")
    try:
        if final.exists():
            final.rename(old)
        try:
            temporary.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        sync_folder(final.parent)
    except OSError as error:
        raise InvalidInput(f"{final}: cannot be written ({error.strerror or error})") from None
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power failure, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_scraps(root: Path) -> None:
    """Remove what earlier crashes left half-written."""
    _remove(root, lambda name: _SCRAP.fullmatch(name) is not None)


def prune(root: Path, keep_last: int, newest: Path) -> None:
    """Keep ``keep_last`` complete checkpoints up to ``newest``; later steps are another run's and left alone."""
    complete = list_checkpoints(root)
    if newest not in complete:
        return
    gone = {path.name for path in complete[: max(0, complete.index(newest) + 1 - keep_last)]}
    _remove(root, gone.__contains__)


def _remove(root: Path, wanted: Callable[[str], bool]) -> None:
    for path in list(root.iterdir()):
        if not wanted(path.name):
            continue
        try:
            # without its manifest a folder is nobody's checkpoint, however far the removal gets
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        except OSError as error:
            _log.warning("%s: cannot be removed (%s)", path, error.strerror or error)
