"""Safetensors files by ranges: headers checked before any byte of data is trusted, nothing unpickled, nothing mapped.

The format is eight bytes of header length, a JSON header (name -> dtype, shape, offsets), then raw little-endian data.
Tensors are written one after the other, so that a checkpoint needs no second copy of what it stores. Reads go through
plain file reads: a file cut short while it is read is an error, where a memory map would end the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the format's own limit
_BLOCK = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file.

    Attributes
    ----------
    path, key
        The file, and the name in it.
    offset
        Of the first byte, from the start of the file.
    """

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def where(self) -> str:
        """How messages call it."""
        return f"{self.path}: tensor {self.key!r}"


@dataclass(frozen=True)
class TensorFile:
    """A checked header: ``num_bytes`` of the whole file, ``header_sha256`` over length field and header."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]
    num_bytes: int
    header_sha256: str


def read_header(path: Path) -> TensorFile:
    """Read and check a header; no tensor data is read.

    Raises
    ------
    FormatError
        Missing or truncated file, a header that is too long, not JSON, or that does not describe exactly the bytes
        that follow it; names the tensor.
    """
    try:
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            size = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or size < 2 or size > num_bytes - 8:
                raise FormatError(f"{path}: {num_bytes} bytes are no safetensors file; it may be truncated")
            if size > _HEADER_LIMIT:
                raise FormatError(f"{path}: a header of {size} bytes is above the limit of {_HEADER_LIMIT}")
            header = stream.read(size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(header) < size:
        raise FormatError(f"{path}: ends inside its header")
    entries = parse_json(header, f"{path}: header")
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: header: expected an object, found {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: header: __metadata__ must hold texts only")
    tensors = _check_entries(path, entries, 8 + size, num_bytes)
    return TensorFile(path, metadata, tensors, num_bytes, hashlib.sha256(prefix + header).hexdigest())


def _check_entries(path: Path, entries: dict[str, Any], start: int, num_bytes: int) -> dict[str, StoredTensor]:
    spans = []
    tensors = {}
    for key, entry in entries.items():
        where = f"{path}: tensor {key!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"{where}: header entry must have dtype, shape and data_offsets")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise FormatError(f"{where}: dtype {entry['dtype']!r} is not one of {', '.join(DTYPES)}")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
            raise FormatError(f"{where}: shape and data_offsets must be lists of sizes")
        dtype = DTYPES[entry["dtype"]]
        low, high = offsets
        wanted = math.prod(shape) * dtype.itemsize
        if high - low != wanted:
            raise FormatError(f"{where}: shape {shape} of {entry['dtype']} is {wanted} bytes, its offsets {high - low}")
        if start + high > num_bytes:
            raise FormatError(f"{where}: ends at byte {start + high} of a file of {num_bytes}; it may be truncated")
        spans.append((low, high, key))
        tensors[key] = StoredTensor(path, key, dtype, tuple(shape), start + low)
    end = 0
    for low, high, key in sorted(spans):
        if low != end:
            raise FormatError(f"{path}: tensor {key!r}: begins at {low} where {end} is expected (gap or overlap)")
        end = high
    if start + end != num_bytes:
        raise FormatError(f"{path}: {num_bytes} bytes where its header describes {start + end}")
    return tensors


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def read_range(stored: StoredTensor, start: int, stop: int, target: torch.Tensor) -> None:
    """Copy elements [start, stop) of a stored tensor, row-major, into the contiguous ``target`` of the same dtype.

    Raises
    ------
    FormatError
        The file ends early or cannot be read.
    """
    assert target.dtype == stored.dtype and target.numel() == stop - start and target.is_contiguous()
    if start == stop:
        return
    item = stored.dtype.itemsize
    direct = target.device.type == "cpu"
    landing = target if direct else torch.empty(stop - start, dtype=stored.dtype)
    view = memoryview(_bytes_of(landing))
    try:
        with stored.path.open("rb", buffering=0) as stream:
            stream.seek(stored.offset + start * item)
            done = 0
            while done < len(view):
                got = stream.readinto(view[done : done + _BLOCK])
                if not got:
                    raise FormatError(f"{stored.where}: the file ended while it was read")
                done += got
    except OSError as error:
        raise FormatError(f"{stored.where}: cannot be read ({error.strerror or error})") from None
    if not direct:
        target.copy_(landing.view(target.shape))


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a numpy view."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> TensorFile:
    """Write a file in the order given, synced to disk; ``path`` must be in a folder nobody reads yet.

    Raises
    ------
    InvalidInput
        The file cannot be written, or a tensor has a dtype that the format lacks.
    """
    listed = list(tensors)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, tensor in listed:
        if tensor.dtype not in _CODES:
            raise InvalidInput(f"tensor {key!r}: dtype {tensor.dtype} cannot be stored")
        if key in entries:
            raise InvalidInput(f"tensor {key!r}: named twice")
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[key] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # data begins on 8 bytes, as other writers of the format have it
    try:
        with path.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for _, tensor in listed:
                if tensor.numel():
                    stream.write(_bytes_of(tensor.detach().contiguous().cpu()))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written ({error.strerror or error})") from None
    return read_header(path)
