"""Metrics of a run: one JSON object a line and step, and TensorBoard events where asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import FormatError, MissingDependency
from routepack_opt.files import atomic_writer, read_text

if TYPE_CHECKING:
    import os

NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to ``metrics.jsonl``; only rank 0 has one.

    Parameters
    ----------
    folder
        Exists.
    first_step
        The step that comes next: lines of it and later ones, written by a run that ended before its checkpoint, go.
    tensorboard
        Write event files too.

    Raises
    ------
    MissingDependency
        TensorBoard is asked for and not installed.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self, folder: str | os.PathLike[str], *, first_step: int = 0, tensorboard: bool = False
    ) -> None:
        self.path = Path(folder) / NAME
        kept = [line for line in read_metrics(self.path) if line["step"] < first_step] if self.path.exists() else []
        with atomic_writer(self.path, "w") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in kept)
        self._stream = self.path.open("a", encoding="utf-8")
        self._events = _events(folder, first_step) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line; a number that is not finite is written as null, JSON has no other word for it."""
        self._stream.write(json.dumps({"step": step, **_finite(values)}, allow_nan=False) + "\n")
        self._stream.flush()  # a run that is killed keeps its lines
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush everything."""
        self._stream.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines; a last line cut short by a crash is left out.

    Raises
    ------
    FormatError
        Another line is not a JSON object with a step; names file and line.
    """
    lines = read_text(path).split("\n")
    result = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):  # no newline behind it
                break
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise FormatError(f"{path}: line {number}: expected a JSON object with a whole number 'step'")
        result.append(value)
    return result


def _events(folder: str | os.PathLike[str], first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependency(
            "run.tensorboard needs tensorboard; install it with: pip install routepack-opt[train]"
        ) from None
    return SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=first_step)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    result: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            result += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result.append((prefix + name, float(value)))
    return result
