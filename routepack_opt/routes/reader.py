"""read_routes: files -> window. Chooses a reader by extension and content, streams blocks, counts on threads."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path
from routepack_opt.routes.assemble import WindowBuilder, announce, build_window
from routepack_opt.routes.payloads import npy_header
from routepack_opt.routes.records import DIALECTS, Dialect
from routepack_opt.routes.report import IngestReport
from routepack_opt.routes.samples import RouteBlock, checked_ids, single_sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from routepack_opt.window import Window

CONTAINERS = ("npz", "npy", "jsonl", "parquet", "pt", "megatron")
FORMATS = (*CONTAINERS, *DIALECTS)
_ALIASES = {
    "json": "jsonl", "ndjson": "jsonl", "pq": "parquet", "pth": "pt", "torch": "pt", "nemo_rl": "nemo-rl",
    "nemo": "nemo-rl", "nemorl": "nemo-rl", "trt-llm": "trtllm", "tensorrt-llm": "trtllm", "trt_llm": "trtllm",
    "megatron-lm": "megatron",
}  # fmt: skip
_EXTENSIONS = {
    ".npz": "npz", ".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
    ".pq": "parquet", ".pt": "pt", ".pth": "pt",
}  # fmt: skip


def read_routes(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    *,
    format: str | None = None,  # the name users type on the command line
    report: IngestReport | None = None,
    counts: Literal["recorded", "predicted"] = "recorded",
    max_workers: int | None = None,
    num_layers: int | None = None,
    top_k: int | None = None,
) -> Window:
    """Read routing-replay dumps into one window; samples keep the order of files, then of samples in a file.

    Parameters
    ----------
    paths
        One file or several.
    num_experts
        E, logical experts of a layer.
    moe_layers
        The MoE layers among the dump's layers. None drops layers that are zero in every sample of all files.
    format
        A container (npz, npy, jsonl, parquet, pt, megatron) or a framework (vllm, sglang, verl, nemo-rl, slime,
        trtllm); None decides by extension and content.
    report
        Collects totals, notes and warnings; None raises them as :class:`RouteWarning`.
    counts
        "predicted" marks demand recorded under an older policy.
    max_workers
        Counting threads; None takes the CPUs of this process, at most 8.
    num_layers, top_k
        Shape of flat ids whose records do not tell it (SGLang).

    Raises
    ------
    FormatError
        Naming file, sample, row and layer of the first wrong value.
    MissingDependency
        A ``.pt`` or parquet file without torch or pyarrow.
    """
    try:
        files = [file_path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    except TypeError:
        raise InvalidInput(f"paths: expected file names, found {type(paths).__name__}") from None
    if not files:
        raise InvalidInput("paths: no files given")
    own = IngestReport() if report is None else report
    builder = WindowBuilder(num_experts, moe_layers, own)
    container, dialect = _checked_format(format, num_layers, top_k)
    blocks = _named(block for path in files for block in _file_blocks(path, container, dialect, own))
    try:
        window = build_window(blocks, builder, max_workers=max_workers, counts=counts)
    except FormatError:
        raise
    except InvalidInput as error:
        raise FormatError(str(error)) from None
    if report is None:
        announce(own)
    return window


def _checked_format(name: str | None, num_layers: int | None, top_k: int | None) -> tuple[str | None, Dialect]:
    container, dialect = None, Dialect("auto")
    if name is not None:
        text = str(name).lower()
        text = _ALIASES.get(text, text)
        if text not in FORMATS:
            raise InvalidInput(f"format: {name!r} is unknown; expected one of {', '.join(FORMATS)}")
        container = text if text in CONTAINERS else None
        dialect = DIALECTS.get(text, dialect)
    return container, Dialect(dialect.name, dialect.dtype, dialect.rows_short, top_k, num_layers)


def _file_blocks(path: Path, container: str | None, dialect: Dialect, report: IngestReport) -> Iterator[RouteBlock]:
    """Blocks of one file; every refusal names the file."""
    report.num_files += 1
    try:
        yield from _reader(path, container or detect_container(path), dialect, report)
    except InvalidInput as error:
        text = str(error)
        raise FormatError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _reader(path: Path, container: str, dialect: Dialect, report: IngestReport) -> Iterator[RouteBlock]:
    if container == "npz":
        from routepack_opt.routes.npz import read_npz_routes

        return read_npz_routes(path)
    if container == "npy":
        return _read_npy(path, dialect)
    if container == "parquet":
        from routepack_opt.routes.parquet import read_parquet_routes

        return read_parquet_routes(path, dialect)
    if container == "pt":
        from routepack_opt.routes.torch_file import read_torch_routes

        return read_torch_routes(path, dialect)
    from routepack_opt.routes.jsonl import read_json_routes

    return read_json_routes(path, dialect, report, trace=True if container == "megatron" else None)


def detect_container(path: Path) -> str:
    """The container of a file: its first bytes decide, then its extension."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(64)
        if head.startswith(b"PK"):
            named = _EXTENSIONS.get(path.suffix.lower())
            if named in ("npz", "pt"):
                return named
            with zipfile.ZipFile(path) as archive:
                pickled = any(name.endswith("data.pkl") for name in archive.namelist())
            return "pt" if pickled else "npz"
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path}: not a readable zip file ({error}); it may be truncated") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "jsonl"
    named = _EXTENSIONS.get(path.suffix.lower())
    if named is None and head.startswith(b"\x80"):
        return "pt"
    if named is None:
        raise FormatError(f"{path}: unknown kind of file; name one with format, of {', '.join(FORMATS)}")
    return named


def _read_npy(path: Path, dialect: Dialect) -> Iterator[RouteBlock]:
    """A bare array is one sample as vLLM and TensorRT-LLM return it: one row fewer than tokens."""
    try:
        with open(path, "rb") as stream:
            shape, _, dtype = npy_header(stream, str(path))
            stored = os.fstat(stream.fileno()).st_size - stream.tell()
            if int(np.prod([float(size) for size in shape]) * dtype.itemsize) != stored:
                raise InvalidInput(f"header declares shape {shape} of {dtype} but {stored} bytes are stored")
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise FormatError(f"{path}: not a readable npy file ({error})") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    ids = checked_ids(array, str(path))
    short = 1 if dialect.rows_short is None else dialect.rows_short
    yield single_sample(ids, ids.shape[0] + short, source=str(path), index=0)


def _named(blocks: Iterator[RouteBlock]) -> Iterator[RouteBlock]:
    """Give samples without an id the name <file stem>:<index>."""
    from dataclasses import replace

    for block in blocks:
        if None in block.ids:
            stem = Path(block.source).stem
            names = (f"{stem}:{block.first_index + at}" if name is None else name for at, name in enumerate(block.ids))
            block = replace(block, ids=tuple(names))
        yield block
