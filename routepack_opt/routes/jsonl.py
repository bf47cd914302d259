"""JSON and JSON-lines dumps, one sample a line, read one line at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.errors import FormatError
from routepack_opt.files import parse_json
from routepack_opt.routes.megatron import is_trace_record, read_trace
from routepack_opt.routes.records import Dialect, record_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from routepack_opt.routes.report import IngestReport
    from routepack_opt.routes.samples import RouteBlock


def read_json_routes(
    path: Path, dialect: Dialect, report: IngestReport, *, trace: bool | None = None
) -> Iterator[RouteBlock]:
    """Blocks of a JSON file: sample records, or a Megatron routing trace (``trace`` None: decided by content)."""
    records = json_records(path)
    first = next(records, None)
    if first is None:
        raise FormatError(f"{path}: empty; expected one JSON object a line")
    if trace or (trace is None and is_trace_record(first[1])):
        yield from read_trace(path, _chain(first, records), report)
        return
    for index, (_, record) in enumerate(_chain(first, records)):
        yield record_block(record, dialect, source=str(path), index=index)


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of every line of a JSONL file, or of every element of one JSON array or object."""
    try:
        with open(path, "rb") as stream:
            whole = _is_one_document(stream.read(1 << 12))
            stream.seek(0)
            if whole:
                value = parse_json(stream.read(), str(path))
                values = value if isinstance(value, list) else [value]
                for index, item in enumerate(values):
                    yield f"{path}: item {index}", item
                return
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield where, parse_json(line, where)
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None


def _is_one_document(head: bytes) -> bool:
    """An array, or an object that does not close on its first line (pretty-printed)."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text[:1] == b"[" or text.partition(b"\n")[0].strip() == b"{"


def _chain(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    yield first
    yield from rest
