"""measurements.json: kernel times as replay writes them and calibrate reads them; and the sweep that helps a fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError
from routepack_opt.files import read_json
from routepack_opt.simulation.work import AttentionKernel, ExpertKernel

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.simulation.kernel_shape import KernelShape
    from routepack_opt.simulation.timing import Measured, Statistic
    from routepack_opt.simulation.work import Kernel

FORMAT = "routepack.measurements/1"
_MOST = sys.float_info.max  # JSON has whole numbers beyond it
_ATTENTION = ("tokens", "squares", "seconds")
_EXPERTS = ("tokens", "active", "seconds")


@dataclass(frozen=True, eq=False)
class Measurements:
    """Kernel times ready to fit.

    Attributes
    ----------
    source
        Where they come from: file, device, date.
    attention
        Block name -> float64 [n, 3]: tokens, sum of squared lengths, seconds of one layer.
    block_layers
        Block name -> layers of it.
    experts
        float64 [n, 3]: assignments, active experts, seconds of one layer.
    token_cap
        C of the plan that was replayed, None when there is none.
    hidden, expert_width
        Of the kernels, None when the file does not say.
    backward
        Whether the times are forward and backward.
    """

    source: str
    experts: NDArray[np.float64]
    attention: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    block_layers: dict[str, float] = field(default_factory=dict)
    token_cap: int | None = None
    hidden: int | None = None
    expert_width: int | None = None
    backward: bool = False
    notes: tuple[str, ...] = ()


def sweep_kernels(num_blocks: int, token_cap: int, num_slots: int, most_assignments: int) -> list[Kernel]:
    """Kernels of well spread sizes: a window's own cells are too alike to tell the terms of a fit apart.

    Cells of an eighth to all of the cap, of one to eight equal samples; experts with an eighth to all of
    ``most_assignments`` on one, a half and all of the slots.
    """
    kernels: dict[Kernel, None] = {}
    for block in range(num_blocks):
        for share in (8, 4, 2, 1):
            for samples in (1, 2, 8):
                length = max(1, token_cap // share // samples)
                kernels[AttentionKernel(block, (length,) * samples)] = None
    for share in (8, 4, 2, 1):
        for active in sorted({1, max(1, num_slots // 2), num_slots}):
            each = max(1, most_assignments // share // active)
            kernels[ExpertKernel((each,) * active + (0,) * (num_slots - active))] = None
    return list(kernels)


def measurements_json(
    measured: dict[Kernel, Measured],
    shape: KernelShape,
    *,
    num_moe_layers: int,
    token_cap: int,
    statistic: Statistic,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The object of measurements.json; ``about`` names device, dtype, date and whether backward is in."""
    layers = shape.block_layers(num_moe_layers)
    attention, experts = [], []
    for kernel, runs in measured.items():
        entry = {"seconds": runs.value_s(statistic), "runs": len(runs.runs_s), "tokens": kernel.tokens}
        if isinstance(kernel, AttentionKernel):
            name = shape.blocks[kernel.block].name
            attention.append({"block": name, "samples": len(kernel.lengths), "squares": kernel.squares, **entry})
        else:
            experts.append({"slots": len(kernel.counts), "active": kernel.num_active, **entry})
    return {
        "format": FORMAT,
        **about,
        "statistic": statistic,
        "token_cap": token_cap,
        "shape": shape.to_json(),
        "block_layers": {block.name: n for block, n in zip(shape.blocks, layers, strict=True)},
        "attention": attention,
        "experts": experts,
    }


def read_measurements(path: str | os.PathLike[str]) -> Measurements:
    """Read measurements.json.

    Raises
    ------
    FormatError
        Naming file, field and index of the first wrong value.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{path}: field 'format': expected {FORMAT!r}")
    shape, layers = value.get("shape"), value.get("block_layers")
    if not isinstance(shape, dict) or not isinstance(layers, dict):
        raise FormatError(f"{path}: fields 'shape' and 'block_layers': expected objects")
    for name, number in layers.items():
        _number(path, f"block_layers[{name!r}]", number)
    sizes = [shape.get(name) for name in ("hidden", "expert_width")] + [value.get("token_cap")]
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise FormatError(f"{path}: fields 'shape.hidden', 'shape.expert_width', 'token_cap': expected integers >= 1")
    if not isinstance(value.get("backward"), bool):
        raise FormatError(f"{path}: field 'backward': expected true or false")
    rows: dict[str, list[list[float]]] = {name: [] for name in layers}
    for k, entry in enumerate(_entries(path, value, "attention")):
        block = entry.get("block")
        if not isinstance(block, str) or block not in rows:
            raise FormatError(f"{path}: attention[{k}].block: {block!r} is not in block_layers")
        rows[block].append([_number(path, f"attention[{k}].{name}", entry.get(name)) for name in _ATTENTION])
    experts = [
        [_number(path, f"experts[{k}].{name}", entry.get(name)) for name in _EXPERTS]
        for k, entry in enumerate(_entries(path, value, "experts"))
    ]
    return Measurements(
        source=f"{path} ({value.get('device', 'unknown device')})",
        experts=np.array(experts, dtype=np.float64).reshape(-1, 3),
        attention={name: np.array(entries, dtype=np.float64).reshape(-1, 3) for name, entries in rows.items()},
        block_layers={name: float(number) for name, number in layers.items()},
        token_cap=value["token_cap"],
        hidden=shape["hidden"],
        expert_width=shape["expert_width"],
        backward=value["backward"],
    )


def _entries(path: str | os.PathLike[str], value: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
    entries = value.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError(f"{path}: field {name!r}: expected a list of objects")
    return entries


def _number(path: str | os.PathLike[str], name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise FormatError(f"{path}: {name}: {value!r} is not a finite number >= 0")
    return float(value)
