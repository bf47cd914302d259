"""Rates of a cluster, from the YAML sheets of GPUs."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routepack_opt.errors import FormatError, InvalidInput, MissingDependency
from routepack_opt.files import file_path, read_text


@dataclass(frozen=True)
class Cluster:
    """Published rates of one kind of GPU in its nodes.

    Parameters
    ----------
    name
        Of the sheet.
    flops_per_s
        Dense bf16 peak.
    memory_bytes_per_s
        Peak times the sheet's empirical factor.
    intra_bytes_per_s, inter_bytes_per_s
        A GPU's links inside its node and out of it, one direction.
    latency_s
        Of one message round.
    gpus_per_node
        How many share the fast links.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float
    gpus_per_node: int

    def __post_init__(self) -> None:
        """Validate."""
        for field in ("flops_per_s", "memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s"):
            _rate(f"cluster {self.name}", field, getattr(self, field))
        if not math.isfinite(self.latency_s) or self.latency_s < 0:
            raise InvalidInput(f"cluster {self.name}: latency_s: {self.latency_s!r} is not a number >= 0")
        if isinstance(self.gpus_per_node, bool) or not isinstance(self.gpus_per_node, int) or self.gpus_per_node < 1:
            raise InvalidInput(f"cluster {self.name}: gpus_per_node: {self.gpus_per_node!r} is not an integer >= 1")


def sheets_folder() -> Path:
    """Where sheets are looked up by name: ``timings`` in ROUTEPACK_DATA, or in shared/data beside the checkout."""
    named = os.environ.get("ROUTEPACK_DATA")
    data = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    return data / "timings"


def find_sheet(name: str) -> Path:
    """A YAML file: ``name`` itself, or of that name in :func:`sheets_folder`.

    Raises
    ------
    InvalidInput
        Neither; names the sheets there are.
    """
    path = file_path(name)
    if path.suffix.lower() in (".yaml", ".yml") or path.exists():
        return path
    folder = sheets_folder()
    found = folder / f"{name}.yaml"
    if "/" not in name and found.is_file():
        return found
    known = ", ".join(sorted(sheet.stem for sheet in folder.glob("*.yaml"))) or f"none in {folder}"
    raise InvalidInput(f"gpu: {name!r} is neither a YAML file nor a known sheet ({known})")


def load_cluster(name: str) -> Cluster:
    """Read a sheet (aiconfigurator's fields ``gpu`` and ``node``).

    Raises
    ------
    FormatError
        Not such a sheet; names file and field.
    MissingDependency
        pyyaml is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise MissingDependency("sheets need pyyaml; install it with: pip install routepack-opt[simulate]") from None
    path = find_sheet(name)
    text = read_text(path)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FormatError(f"{path}: not valid YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected fields 'gpu' and 'node'")
    gpu, node = (value.get(part) for part in ("gpu", "node"))
    for part, fields in (("gpu", gpu), ("node", node)):
        if not isinstance(fields, dict):
            raise FormatError(f"{path}: field {part!r}: expected an object")
    assert isinstance(gpu, dict) and isinstance(node, dict)
    factor = _field(path, "gpu", gpu, "mem_bw_empirical_scaling_factor", 1.0)
    latency = node.get("p2p_latency")
    none = latency is None or (latency == 0 and not isinstance(latency, bool))
    latency_s = 0.0 if none else _field(path, "node", node, "p2p_latency")
    gpus = node.get("num_gpus_per_node")
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise FormatError(f"{path}: field 'node.num_gpus_per_node': {gpus!r} is not an integer >= 1")
    return Cluster(
        path.stem,
        _field(path, "gpu", gpu, "bfloat16_tc_flops"),
        _field(path, "gpu", gpu, "mem_bw") * factor,
        _field(path, "node", node, "intra_node_bw"),
        _field(path, "node", node, "inter_node_bw"),
        latency_s,
        gpus,
    )


def _field(path: Path, part: str, fields: dict[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    return _rate(str(path), f"{part}.{name}", value)


def _rate(where: str, name: str, value: Any) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not 0 < value <= sys.float_info.max:
        raise FormatError(f"{where}: field {name!r}: {value!r} is not a finite number > 0")
    return float(value)
