"""Loads as plain CSV: one row a window and layer, one column an expert.

The header names the columns. Experts are the columns 0, 1, ..., E - 1; ``layer_idx``, ``layer_id`` or ``layer`` is the
layer; whatever other columns there are (data set, iteration, ...) tell the windows apart.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LAYER_COLUMNS = ("layer_idx", "layer_id", "layer")
_LARGEST = 1 << 60


def read_csv_loads(path: Path) -> NDArray[np.int64]:
    """Counts as int64 [windows, L, E]: windows in the order of the file, layers by number.

    Raises
    ------
    FormatError
        An unreadable file, no layer or expert columns, ragged rows, counts that are not whole numbers >= 0, a window
        that lacks a layer or has it twice; names line and column.
    """
    counts = _read(path)
    windows = list(dict.fromkeys(window for window, _ in counts))
    layers = sorted({layer for _, layer in counts})
    for window in windows:
        for layer in layers:
            if (window, layer) not in counts:
                raise FormatError(
                    f"{path}: window {', '.join(window) or '-'} has no row of layer {layer}; expected every layer"
                )
    return np.array([[counts[window, layer] for layer in layers] for window in windows], dtype=np.int64)


def read_csv_layers(path: Path) -> list[int]:
    """Numbers of the layers, in the order :func:`read_csv_loads` has them."""
    return sorted({layer for _, layer in _read(path)})


def _read(path: Path) -> dict[tuple[tuple[str, ...], int], list[int]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.reader(stream))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise FormatError(f"{path}: not a CSV table ({error})") from None
    header = [name.strip() for name in rows[0]] if rows else []
    layer_at = next((header.index(name) for name in LAYER_COLUMNS if name in header), None)
    expert_at = {int(name): k for k, name in enumerate(header) if name.isascii() and name.isdigit()}
    if layer_at is None or not expert_at or sorted(expert_at) != list(range(len(expert_at))):
        raise FormatError(
            f"{path}: line 1: expected a column {', '.join(LAYER_COLUMNS[:-1])} or {LAYER_COLUMNS[-1]}"
            " and one for each expert, named 0, 1, ..."
        )
    experts = [expert_at[e] for e in range(len(expert_at))]
    keys = [k for k in range(len(header)) if k != layer_at and k not in set(experts)]
    counts: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(header):
            raise FormatError(f"{path}: line {number}: {len(row)} columns, the header has {len(header)}")
        layer, *values = (_count(row[k], header[k], number, path) for k in (layer_at, *experts))
        key = (tuple(row[k] for k in keys), layer)
        if key in counts:
            raise FormatError(f"{path}: line {number}: a second row of layer {layer} in the same window")
        counts[key] = values
    if not counts:
        raise FormatError(f"{path}: no rows below the header")
    return counts


def _count(text: str, column: str, number: int, path: Path) -> int:
    text = text.strip().removesuffix(".0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST):
        raise FormatError(f"{path}: line {number}, column {column}: {text!r} is not a whole number >= 0")
    return int(text)
