"""Results, one JSON object a line, appended as they come: a run that dies loses the cases in work, no more."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from routepack_opt.certify.one import CLOSED, check_record
from routepack_opt.certify.summary import STATUSES
from routepack_opt.errors import InvalidInput, VerificationError
from routepack_opt.files import atomic_writer

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from routepack_opt.certify.cases import Case
    from routepack_opt.certify.one import Record, Settings

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
_START = b'{"name":'  # of every record, whole or cut short


class Journal:
    """A results file, opened for one run.

    A last line that was cut short is dropped. A record is taken over instead of made again when name, content, dp, cap
    and ep agree and it is either closed or had at least as much time and the same seed. A second run on the same file
    at the same time is refused.

    Raises
    ------
    InvalidInput
        The file cannot be written, is in use, or holds something else than results; names the line.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file and read what it holds."""
        self.path = path
        self._superseded = False
        self._checked: dict[Key, bool] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be written ({error.strerror or error})") from None
        try:
            self._lock()
            self._lines = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        """The journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave one line a case and close the file."""
        try:
            self._compact()
        finally:
            os.close(self._file)

    def find(self, case: Case, settings: Settings) -> Record | None:
        """The record that makes solving ``case`` again unnecessary, or None."""
        key = (case.name, case.sha256, settings.dp, case.cap, settings.ep)
        line = self._lines.get(key)
        if line is None:
            return None
        record: Record = json.loads(line)
        if record["rows_status"] not in CLOSED:
            tried = record["seed"] == settings.seed and record["time_limit_s"] >= settings.time_limit_s
            if not tried or record.get("error"):
                return None
        if key not in self._checked:
            self._checked[key] = self._stands(record, case)
        return record if self._checked[key] else None

    def _stands(self, record: Record, case: Case) -> bool:
        """Whether the packing and the bound of a line still hold: files are edited, copied and damaged."""
        if record["packing"] is None:
            return True  # infeasible: nothing is claimed that a later step builds on
        try:
            check_record(record, case.lengths)
        except VerificationError as error:
            logger.warning("%s: %s: refuted by the checker: %s; it is run again", self.path, case.name, error)
            return False
        return True

    def append(self, record: Record) -> None:
        """Write one record; it is on its way to the disk when this returns."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        done = 0
        while done < len(line):
            done += os.write(self._file, line[done:])
        key = _key(record)
        self._superseded |= key in self._lines
        self._lines.pop(key, None)  # the newest last
        self._checked[key] = True  # by whoever made it
        self._lines[key] = line

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: two runs on one file are then the user's to avoid
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(f"{self.path}: another run is writing to it") from None

    def _read(self) -> dict[Key, bytes]:
        with open(self._file, "rb", closefd=False) as stream:
            data = stream.read()
        lines = data.split(b"\n")
        tail = lines.pop()  # empty after a whole last line
        kept: dict[Key, bytes] = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                key = _key(record)
                _check_fields(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                if number == len(lines) and line.startswith(_START):
                    tail = line + b"\n" + tail
                    break
                raise InvalidInput(f"{self.path}: line {number} is not a result of certify") from None
            self._superseded |= key in kept
            kept.pop(key, None)
            kept[key] = line + b"\n"
        if tail:
            if not (tail.startswith(_START) or _START.startswith(tail)):
                raise InvalidInput(f"{self.path}: line {len(lines) + 1} is not a result of certify")
            os.ftruncate(self._file, len(data) - len(tail))
            logger.warning("%s: the last line was cut short; its case is run again", self.path)
        return kept

    def _compact(self) -> None:
        """Drop records that newer ones replace, in one go."""
        if not self._superseded:
            return
        with suppress(InvalidInput), atomic_writer(self.path, "wb") as stream:
            stream.writelines(self._lines.values())


def _check_fields(record: Record) -> None:
    """ValueError, KeyError or TypeError where a line lacks what is read of it later."""
    status, packing = record["rows_status"], record["packing"]
    if status not in STATUSES or not isinstance(record["rung"], str) or not isinstance(record["name"], str):
        raise ValueError
    if any(type(record[field]) not in (int, float) for field in ("seconds", "seed", "time_limit_s")):
        raise ValueError
    if type(record.get("placement_gap", 0.0)) not in (int, float) or not isinstance(record.get("error", ""), str):
        raise ValueError
    if status in ("infeasible", "failed"):
        return
    if type(record["rows"]) is not int or type(record["rows_lower_bound"]) is not int or record["rows"] < 1:
        raise ValueError
    if not isinstance(packing, list) or any(type(cell) is not int for cell in packing) or not packing:
        raise ValueError
    if "certificate" not in record:
        raise ValueError


def _key(record: Record) -> Key:
    return (record["name"], record["sha256"], record["dp"], record["token_cap"], record["ep"])
