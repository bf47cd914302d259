"""Statistics of an annealing run: CSV, JSONL, and a plot of acceptance, energy and slowest shard over time."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput, MissingDependency
from routepack_opt.files import atomic_writer

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from routepack_opt.solvers.annealing.population import LevelStatistics


def statistics_format(path: str | os.PathLike[str]) -> str:
    """The extension, ".csv" or ".jsonl"; another is an InvalidInput."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise InvalidInput(f"{path}: statistics are written as .csv or .jsonl")
    return suffix


def write_statistics(levels: Sequence[LevelStatistics], path: str | os.PathLike[str]) -> None:
    """One line a temperature, as ``.csv`` or ``.jsonl``; the columns are the fields of LevelStatistics.

    Raises
    ------
    InvalidInput
        Another extension, or a path that cannot be written.
    """
    from routepack_opt.solvers.annealing.population import LevelStatistics

    suffix = statistics_format(path)
    with atomic_writer(path, "w") as stream:
        if suffix == ".jsonl":
            for level in levels:
                stream.write(json.dumps(asdict(level), allow_nan=False) + "\n")
            return
        writer = csv.DictWriter(stream, [field.name for field in fields(LevelStatistics)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(level) for level in levels)


def plot_annealing(levels: Sequence[LevelStatistics], ax: Any = None) -> Any:
    """Slowest shard of the incumbent (left axis) and share of accepted proposals (right, logarithmic) over seconds.

    Parameters
    ----------
    ax
        A matplotlib axes, or None for a new one. Nothing is shown.

    Returns
    -------
    The axes.
    """
    if ax is None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingDependency(
                "plots need matplotlib; install it with: pip install routepack-opt[report]"
            ) from None
        ax = Figure(figsize=(7.0, 4.0), layout="constrained").subplots()
    seconds = [level.seconds for level in levels]
    ax.plot(seconds, [level.best_slowest_shard for level in levels], color="C0", label="slowest shard")
    ax.set_xlabel("seconds")
    ax.set_ylabel("slowest shard of the incumbent", color="C0")
    right = ax.twinx()
    accepted = [level.num_accepted / level.num_scored if level.num_scored else float("nan") for level in levels]
    right.semilogy(seconds, accepted, color="C1", label="accepted")
    right.set_ylabel("share of scored proposals accepted", color="C1")
    return ax
