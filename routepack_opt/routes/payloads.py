"""Payload decoding: the forms one sample's routes take inside a record -> a numpy array [rows, layers, K]."""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.files import _read_npy_header
from routepack_opt.routes.samples import to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
NEMO_MAGIC = "nrlre1:"
NPY_MAGIC = b"\x93NUMPY"


def decode_routes(
    payload: Any,
    *,
    dtype: str | None = None,
    shape: Sequence[int] | None = None,
    rows: int | None = None,
    num_layers: int | None = None,
    top_k: int | None = None,
    where: str = "routed_experts",
) -> NDArray[Any]:
    """Decode one sample's routes.

    Parameters
    ----------
    payload
        A numpy array or torch tensor; nested lists; base64 text of a ``.npy`` (vLLM) or of raw little-endian ids
        (SGLang, slime); ``nrlre1:<dtype>:<S>x<L>x<K>:<base64>`` (NeMo-RL); or the bytes behind the base64.
    dtype
        Name of the id type of raw bytes; checked against nested lists.
    shape
        [rows, layers, K] of flat data; one entry may be -1.
    rows, num_layers, top_k
        What is known of the shape when ``shape`` is not given.
    where
        How error messages begin.

    Raises
    ------
    InvalidInput
        Bad base64, unknown dtype, sizes that do not fit the shape, ids outside the declared dtype.
    """
    if isinstance(payload, str) and payload.startswith(NEMO_MAGIC):
        return _decode_nemo(payload, where)
    wanted = _checked_dtype(dtype, where)
    if isinstance(payload, str):
        payload = _decode_base64(payload, where)
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return _decode_bytes(bytes(payload), wanted, _full_shape(shape, rows, num_layers, top_k, where), where)
    if payload is None or isinstance(payload, (bool, int, float, dict)):
        raise InvalidInput(f"{where}: expected routes, found {type(payload).__name__}")
    array = to_numpy(payload, where)
    if array.size == 0 and array.dtype.kind == "f":  # an empty list has no type
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"{where}: expected integer expert ids, found dtype {array.dtype}")
    if wanted is not None and wanted != array.dtype and array.size:
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise InvalidInput(f"{where}: id {low if low < limits.min else high} does not fit the dtype {wanted}")
        array = array.astype(wanted)
    if array.ndim != 3 or shape is not None:
        array = _shaped(array, _full_shape(shape, rows, num_layers, top_k, where), where)
    return array


def _checked_dtype(name: Any, where: str) -> np.dtype[Any] | None:
    if name is None:
        return None
    text = str(name).removeprefix("torch.").removeprefix("np.").removeprefix("numpy.")
    if text not in DTYPES:
        raise InvalidInput(f"{where}: dtype {name!r} is unknown; expected one of {', '.join(DTYPES)}")
    return np.dtype(text)


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{where}: not valid base64 ({error})") from None


def _decode_nemo(text: str, where: str) -> NDArray[Any]:
    parts = text.split(":", 3)
    sizes = parts[2].split("x") if len(parts) == 4 else []
    if len(sizes) != 3 or not all(size.isdecimal() and size.isascii() and len(size) < 12 for size in sizes):
        raise InvalidInput(f"{where}: {text[:60]!r} is not nrlre1:<dtype>:<S>x<L>x<K>:<base64>")
    shape = tuple(int(size) for size in sizes)
    return _raw_array(_decode_base64(parts[3], where), _checked_dtype(parts[1], where), shape, where)


def _decode_bytes(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, where: str) -> NDArray[Any]:
    fits = dtype is not None and shape is not None and min(shape) >= 0
    if fits and len(data) == math.prod(shape) * dtype.itemsize:  # type: ignore[arg-type,union-attr]
        return _raw_array(data, dtype, shape, where)  # type: ignore[arg-type]
    if data.startswith(NPY_MAGIC):
        return _decode_npy(data, where)
    if dtype is None:
        raise InvalidInput(f"{where}: raw ids need a dtype; expected the field 'dtype', one of {', '.join(DTYPES)}")
    if shape is None:
        raise InvalidInput(f"{where}: raw ids need a shape; expected the field 'shape' [rows, layers, top_k]")
    return _raw_array(data, dtype, shape, where)


def _raw_array(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    assert dtype is not None
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{where}: {len(data)} bytes are not a whole number of {dtype} ids")
    return _shaped(np.frombuffer(data, dtype=dtype.newbyteorder("<")), shape, where)


def _decode_npy(data: bytes, where: str) -> NDArray[Any]:
    stream = io.BytesIO(data)
    shape, fortran, dtype = npy_header(stream, where)
    declared, present = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if declared != present:
        raise InvalidInput(f"{where}: npy header declares shape {shape} ({declared} bytes) but {present} bytes follow")
    array: NDArray[Any] = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    return array.reshape(shape[::-1]).transpose() if fortran else array.reshape(shape)


def npy_header(stream: Any, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of the npy that ``stream`` starts with; object and text arrays are refused."""
    shape, fortran, dtype = _read_npy_header(stream, where)
    if dtype.kind not in "iu":
        raise InvalidInput(f"{where}: expected integer expert ids, found dtype {dtype}")
    return tuple(int(size) for size in shape), bool(fortran), dtype


def _full_shape(
    shape: Any, rows: int | None, num_layers: int | None, top_k: int | None, where: str
) -> tuple[int, ...] | None:
    """[rows, layers, K] with at most one unknown (-1), or None when too little is known."""
    if shape is not None:
        if hasattr(shape, "tolist"):
            shape = shape.tolist()
        good = isinstance(shape, (list, tuple)) and len(shape) == 3
        if not good or any(isinstance(s, bool) or not isinstance(s, int) or not -1 <= s < 2**40 for s in shape):
            raise InvalidInput(f"{where}: shape {shape!r} is not [rows, layers, top_k]")
        if list(shape).count(-1) > 1:
            raise InvalidInput(f"{where}: shape {shape!r} leaves more than one size open")
        return tuple(shape)
    known = (rows, num_layers, top_k)
    if sum(size is None for size in known) > 1:
        return None
    return tuple(-1 if size is None else size for size in known)


def _shaped(flat: NDArray[Any], shape: tuple[int, ...] | None, where: str) -> NDArray[Any]:
    if shape is None:
        raise InvalidInput(
            f"{where}: expected shape [rows, layers, top_k], found {tuple(flat.shape)}; flat ids need the field 'shape'"
        )
    if -1 in shape:
        rest = -math.prod(shape)
        if rest == 0 or flat.size % rest:
            raise InvalidInput(f"{where}: {flat.size} ids do not fill the shape {list(shape)}")
        shape = tuple(flat.size // rest if size == -1 else size for size in shape)
    if math.prod(shape) != flat.size:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {math.prod(shape)} ids but {flat.size} are given")
    return flat.reshape(shape)
