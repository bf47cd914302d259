"""Safe file access shared by every reader and writer: npz without pickles, strict JSON, atomic writes."""

from __future__ import annotations

import json
import math
import os
import tempfile
import zipfile
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

_NPY_HEADER_LIMIT = 10_000


def file_path(path: Any) -> Path:
    """``path`` as a Path; what cannot name a file (None, a number, text with a NUL) is a :class:`FormatError`."""
    if not isinstance(path, (str, os.PathLike)):
        raise FormatError(f"path: expected a file name, found {type(path).__name__}")
    if "\0" in str(path):
        raise FormatError(f"path: {str(path)!r} cannot name a file")
    return Path(path)


def _available_memory_bytes() -> int:
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."


def _read_npy_header(stream: IO[bytes], field: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, _NPY_HEADER_LIMIT)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream, _NPY_HEADER_LIMIT)
        else:
            raise FormatError(f"{field}: npy version {version} is not supported; expected 1.0 or 2.0")
    except (FormatError, OSError, MemoryError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # numpy parses the header as Python text, which fails in many ways
        raise FormatError(f"{field}: not a valid npy array ({_one_line(error)})") from None
    if any(isinstance(size, bool) or not 0 <= size < 1 << 62 for size in shape):
        raise FormatError(f"{field}: header declares shape {_one_line(ValueError(shape))}; expected sizes >= 0")
    if dtype.hasobject:
        raise FormatError(f"{field}: object arrays need pickle and are refused; store plain numbers")
    return shape, fortran, dtype


def _read_npy_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> NDArray[Any]:
    field = f"{path}: field {name!r}"
    with archive.open(info) as stream:
        shape, fortran, dtype = _read_npy_header(stream, field)
        count = math.prod(shape)
        declared = count * dtype.itemsize
        present = info.file_size - stream.tell()
        if declared != present:
            raise FormatError(
                f"{field}: header declares shape {tuple(shape)} ({declared} bytes) but {present} bytes are stored"
            )
        if declared > _available_memory_bytes():
            raise FormatError(f"{field}: {declared} bytes do not fit in the memory of this machine")
        raw = np.empty(declared, dtype=np.uint8)
        view = memoryview(raw)  # type: ignore[arg-type]
        offset = 0
        while offset < declared:
            got = stream.readinto(view[offset : offset + (1 << 24)])  # type: ignore[attr-defined]
            if not got:
                raise FormatError(f"{field}: ends after {offset} of {declared} bytes")
            offset += got
        stream.read(1)  # reaching the end makes zipfile compare the CRC
    if dtype.kind == "U":
        codes = raw.view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if (codes > 0x10FFFF).any() or ((codes >= 0xD800) & (codes <= 0xDFFF)).any():  # numpy would crash on use
            raise FormatError(f"{field}: not Unicode text")
    try:
        return np.ndarray(shape, dtype, buffer=raw, order="F" if fortran else "C")
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{field}: shape {tuple(shape)} cannot be an array ({_one_line(error)})") from None


def read_npz(path: str | os.PathLike[str], fields: tuple[str, ...] | None = None) -> dict[str, NDArray[Any]]:
    """Read a numpy zip without unpickling anything.

    Parameters
    ----------
    path
        The ``.npz`` file.
    fields
        Read only these where present; None reads all.

    Raises
    ------
    FormatError
        Missing or unreadable file, truncated zip, object arrays, headers that disagree with the stored bytes.
    """
    path = file_path(path)
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if fields is not None and name not in fields:
                    continue
                if name in arrays:
                    raise FormatError(f"{path}: field {name!r} is stored twice")
                arrays[name] = _read_npy_member(path, archive, info, name)
    except FormatError:
        raise
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # zipfile and its decoders fail on hostile bytes in many ways, struct.error among them
        raise FormatError(f"{path}: not a readable npz file ({_one_line(error)}); it may be truncated") from None
    return arrays


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write an uncompressed numpy zip atomically (temporary file, then rename)."""
    with atomic_writer(path, "wb") as stream:
        np.savez(stream, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]


def scalar_text(arrays: Mapping[str, NDArray[Any]], name: str, path: str | os.PathLike[str]) -> str:
    """The text stored as a zero-dimensional string array, or an empty string when absent."""
    if name not in arrays:
        return ""
    value = arrays[name]
    if value.ndim != 0 or value.dtype.kind not in "US":
        raise FormatError(f"{path}: field {name!r}: expected one text value, found {value.dtype} {value.shape}")
    item = value.item()
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice in one object")
        result[key] = value
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON; use a finite number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a float; use a finite number")
    return value


def parse_json(text: str | bytes, where: str) -> Any:
    """Strict JSON: no NaN or Infinity, no duplicated keys; ``where`` names the source in the message."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON ({_one_line(error)})") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file; a missing or unreadable one is a :class:`FormatError`."""
    try:
        return file_path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read strict JSON from a file, see :func:`parse_json`."""
    return parse_json(read_text(path), str(path))


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = None) -> None:
    """Write JSON atomically; NaN and Infinity are a programming error and raise ValueError."""
    text = json.dumps(value, indent=indent, allow_nan=False, separators=(",", ":") if indent is None else None)
    with atomic_writer(path, "w") as stream:
        stream.write(text + "\n")


@contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: str) -> Iterator[IO[Any]]:
    """A temporary file beside ``path`` that replaces it on success and vanishes on any error."""
    path = file_path(path)
    temporary = None
    try:
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.", suffix=".tmp")
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be written ({error.strerror or error})") from None
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        try:
            os.replace(temporary, path)
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be written ({error.strerror or error})") from None
        temporary = None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
