"""npz dumps: ``routed_experts`` [rows, L, K] and ``seq_lens`` [n], read a few samples at a time."""

from __future__ import annotations

import math
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import _one_line, read_npz
from routepack_opt.routes.payloads import npy_header
from routepack_opt.routes.samples import MAX_LAYERS, MAX_LENGTH, RouteBlock, refuse_huge
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20  # enough rows to keep a counting thread busy for milliseconds


def read_npz_routes(path: Path) -> Iterator[RouteBlock]:
    """Blocks of an npz dump, streamed: neither the file nor all of its rows are ever in memory.

    ``rows = sum(seq_lens)`` or ``sum(seq_lens - 1)``. Optional: ``start_len`` int [n], ``sample_ids`` str [n],
    ``group_ids`` int [n].
    """
    fields = read_npz(path, ("seq_lens", "start_len", "sample_ids", "group_ids", "format"))
    if "seq_lens" not in fields:
        known = str(fields["format"]) if "format" in fields else ""
        hint = "; this is already a window" if known.startswith("routepack.window") else ""
        raise FormatError(f"{path}: field 'seq_lens' is missing{hint}")
    lengths = integer_array(fields["seq_lens"], "seq_lens", 1, low=1, high=MAX_LENGTH).astype(np.int64)
    if lengths.size == 0:
        raise InvalidInput("field 'seq_lens': no samples; expected at least one")
    starts = _per_sample(fields, "start_len", lengths.size, -1)
    groups = _per_sample(fields, "group_ids", lengths.size, None)
    names = _per_sample(fields, "sample_ids", lengths.size, None)
    try:
        with zipfile.ZipFile(path) as archive:
            yield from _stream(path, archive, lengths, starts, names, groups)
    except InvalidInput:
        raise
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # zipfile and its decoders fail on hostile bytes in many ways
        raise FormatError(f"{path}: not a readable npz file ({_one_line(error)}); it may be truncated") from None


def _per_sample(fields: dict[str, NDArray[Any]], name: str, size: int, default: Any) -> list[Any]:
    if name not in fields:
        return [default] * size
    array = fields[name]
    if array.shape != (size,) or array.dtype.kind not in ("U" if name == "sample_ids" else "iu"):
        kind = "text" if name == "sample_ids" else "integers"
        raise InvalidInput(f"field {name!r}: found {array.dtype} {array.shape}; expected {kind} of shape ({size},)")
    values: list[Any] = array.tolist()
    return values


def _stream(
    path: Path,
    archive: zipfile.ZipFile,
    lengths: NDArray[np.int64],
    starts: list[int],
    names: list[str | None],
    groups: list[int | None],
) -> Iterator[RouteBlock]:
    members = [info for info in archive.infolist() if info.filename in ("routed_experts.npy", "routed_experts")]
    if len(members) != 1:
        raise InvalidInput(f"field 'routed_experts' is {'missing' if not members else 'stored twice'}")
    with archive.open(members[0]) as stream:
        shape, fortran, dtype = npy_header(stream, "field 'routed_experts'")
        declared, present = math.prod(shape) * dtype.itemsize, members[0].file_size - stream.tell()
        num_rows = _rows_per_sample(shape, dtype, declared, present, lengths, np.array(starts, dtype=np.int64))
        whole = None
        if fortran:  # rows are not contiguous in the file
            whole = read_npz(path, ("routed_experts",))["routed_experts"]
        row_bytes = shape[1] * shape[2] * dtype.itemsize
        ends = np.cumsum(num_rows)
        first = 0
        while first < lengths.size:
            begun = int(ends[first] - num_rows[first])
            within = int(np.searchsorted(ends, begun + max(1, BLOCK_BYTES // row_bytes), side="right"))
            last = max(first + 1, within)
            rows = int(ends[last - 1]) - begun
            if whole is None:
                routes = _read_rows(stream, (rows, shape[1], shape[2]), dtype)
            else:
                routes = whole[begun : begun + rows]
            yield RouteBlock(
                routes=routes,
                num_rows=num_rows[first:last],
                lengths=lengths[first:last],
                start_lens=np.array(starts[first:last], dtype=np.int64),
                ids=tuple(names[first:last]),
                groups=tuple(groups[first:last]),
                first_index=first,
                source=str(path),
            )
            first = last
        stream.read(1)  # reaching the end makes zipfile compare the CRC


def _rows_per_sample(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    declared: int,
    present: int,
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> NDArray[np.int64]:
    field = "field 'routed_experts'"
    if len(shape) != 3:
        raise InvalidInput(f"{field}: found {dtype} {shape}; expected integers [rows, layers, top_k]")
    if not 1 <= shape[1] <= MAX_LAYERS or not 1 <= shape[2] <= MAX_LENGTH:
        raise InvalidInput(
            f"{field}: shape {shape} has {shape[1]} layers and top_k {shape[2]}; expected 1 to {MAX_LAYERS}"
        )
    if declared != present:
        raise InvalidInput(f"{field}: header declares shape {shape} ({declared} bytes) but {present} bytes are stored")
    covered = lengths - np.maximum(starts, 0)
    for rows in (covered, covered - 1):
        if int(rows.sum()) == shape[0]:
            return rows
    raise InvalidInput(
        f"{field}: {shape[0]} rows for {lengths.size} samples;"
        f" expected sum(seq_lens) = {int(covered.sum())} or sum(seq_lens - 1) = {int(covered.sum()) - lengths.size}"
    )


def _read_rows(stream: Any, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    refuse_huge(math.prod(shape) * dtype.itemsize, "field 'routed_experts'")
    array: NDArray[Any] = np.empty(shape, dtype=dtype)
    view = memoryview(array.reshape(-1).view(np.uint8) if array.size else b"")  # type: ignore[arg-type]
    offset = 0
    while offset < len(view):
        got = stream.readinto(view[offset : offset + (1 << 24)])
        if not got:
            raise InvalidInput(f"field 'routed_experts': ends after {offset} of {len(view)} bytes of a block")
        offset += got
    return array
