"""Kernel times that others measured: CSV files of one MoE layer, and the parquet grid of MoE kernels."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput, MissingDependency
from routepack_opt.files import read_text
from routepack_opt.simulation.measurements import Measurements, read_measurements

if TYPE_CHECKING:
    import os

    from routepack_opt.model_shapes import ModelShape

_COLUMNS = ("tokens", "activated_experts", "time_us")
_GRID = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "latency")


def read_timings(
    path: str | os.PathLike[str], model: ModelShape | None = None, top_k: int | None = None
) -> Measurements:
    """Kernel times from any file calibrate knows, told by its suffix: .json, .csv or .parquet.

    Parameters
    ----------
    model
        Chooses the rows of a grid, and gives the sizes a CSV does not tell.
    top_k
        Experts a token of a CSV uses: its tokens are counted as ``top_k`` assignments each. None takes the model's;
        without either, 1.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return read_layer_csv(path, model, top_k)
    if suffix == ".parquet":
        return read_kernel_grid(path, model)
    if suffix == ".json":
        return read_measurements(path)
    raise InvalidInput(f"{path}: the suffix names no format; expected .json, .csv or .parquet")


def read_layer_csv(
    path: str | os.PathLike[str], model: ModelShape | None = None, top_k: int | None = None
) -> Measurements:
    """A CSV with columns tokens, activated_experts, time_us: one MoE layer on one device, forward."""
    reader = csv.DictReader(read_text(path).splitlines())
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise FormatError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(_COLUMNS)}")
    rows = []
    try:
        for line, entry in enumerate(reader, start=2):
            if None in entry:  # where the reader puts what has no column
                raise FormatError(f"{path}: line {line}: more values than the {len(reader.fieldnames or ())} columns")
            rows.append([_cell(path, line, name, entry[name]) for name in _COLUMNS])
    except csv.Error as error:
        raise FormatError(f"{path}: line {len(rows) + 2}: not valid CSV ({error})") from None
    values = np.array(rows, dtype=np.float64).reshape(-1, 3)
    per_token = top_k or (1 if model is None else model.top_k)
    with np.errstate(over="ignore"):  # the fit refuses what is not finite
        values[:, 0] *= per_token
    values[:, 2] *= 1e-6
    notes = () if per_token > 1 else ("a CSV's tokens are counted as one assignment each; give --model or --top-k",)
    return Measurements(
        source=str(path),
        experts=values,
        hidden=None if model is None else model.hidden,
        expert_width=None if model is None else model.expert_width,
        notes=notes,
    )


def _cell(path: str | os.PathLike[str], line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise FormatError(f"{path}: line {line}, column {name!r}: {text!r} is not a finite number >= 0")
    return value


def read_kernel_grid(path: str | os.PathLike[str], model: ModelShape | None) -> Measurements:
    """The MoE kernels of a parquet grid for one model: bfloat16, whole layer on one device, balanced routing.

    Rows with more than one EP rank are never taken: their power-law times are below the balanced ones, so they cannot
    stand for stragglers. Power-law rows of one EP rank do not say how many experts were active, balanced ones have
    min(E, top_k * tokens).

    Raises
    ------
    InvalidInput
        No model, or the grid has no rows for it; names the shapes it has.
    MissingDependency
        pyarrow is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency("parquet needs pyarrow; install it with: pip install routepack-opt[parquet]") from None
    if model is None:
        raise InvalidInput(f"{path}: a grid holds many shapes; choose one with --model")
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as parquet ({' '.join(str(error).split())[:200]})") from None
    missing = [name for name in (*_GRID, "distribution", "moe_dtype") if not rows or name not in rows[0]]
    if missing:
        raise FormatError(f"{path}: column {missing[0]!r} is missing")
    whole = [
        row
        for row in rows
        if (row["moe_ep_size"], row["moe_tp_size"]) == (1, 1)
        and (row["distribution"], row["moe_dtype"]) == ("balanced", "bfloat16")
    ]
    wanted = (model.hidden, model.expert_width, model.top_k, model.num_experts)
    chosen = [row for row in whole if tuple(row[name] for name in _GRID[1:5]) == wanted]
    if not chosen:
        known = sorted({tuple(row[name] for name in _GRID[1:5]) for row in whole})
        raise InvalidInput(
            f"{path}: no bfloat16 rows for hidden, expert width, top-k, experts = {wanted}; the grid has {known}"
        )
    sources = sorted({str(row.get("kernel_source")) for row in chosen})
    chosen = [row for row in chosen if str(row.get("kernel_source")) == sources[0]]
    values = []
    for k, row in enumerate(chosen):
        assignments = row["num_tokens"] * model.top_k
        latency = _cell(path, k, "latency", str(row["latency"]))
        values.append([assignments, min(model.num_experts, assignments), latency * 1e-3])
    notes = () if len(sources) == 1 else (f"kernel {sources[0]} of {', '.join(sources)}",)
    return Measurements(
        source=f"{path} ({chosen[0].get('device', 'unknown device')})",
        experts=np.array(values, dtype=np.float64),
        hidden=model.hidden,
        expert_width=model.expert_width,
        notes=notes,
    )
