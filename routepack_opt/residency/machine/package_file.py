"""Read a package from TOML; anything unknown, missing or out of range is refused with one line."""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path, read_text
from routepack_opt.residency.machine.package import Compute, LinkSpec, Package, Region, ResidencyRules, Router, Tier

if TYPE_CHECKING:
    import os

PRESETS = ("paper", "gpu-host-nvme", "cxl")
_INF = math.inf
# Positive numbers of a package, in its units: beyond these times and energies overflow, and no machine is there.
_LEAST, _MOST = 1e-9, 1e12


class _Table:
    """Typed access to one TOML table; ``done`` refuses what was not asked for."""

    def __init__(self, values: Any, where: str, path: str) -> None:
        self.where, self.path = where, path
        if not isinstance(values, dict):
            raise FormatError(f"{where}: field {path!r}: expected a table")
        self.values = values
        self.known: list[str] = []

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, message: str) -> FormatError:
        return FormatError(f"{self.where}: field {self.name(key)!r}: {message}")

    def get(self, key: str, expected: str, default: Any = None) -> Any:
        self.known.append(key)
        if key in self.values:
            return self.values[key]
        if default is None:
            raise self.error(key, f"is missing; expected {expected}")
        return default

    def number(
        self,
        key: str,
        *,
        zero: bool = False,
        low: float = 0.0,
        high: float = _INF,
        default: float | None = None,
        least: float = _LEAST,
    ) -> float:
        """A finite number above ``low`` and at most ``high``; with ``zero`` 0 is allowed too.

        Positive ones are at least ``least`` and, where ``high`` says nothing else, at most 1e12.
        """
        expected = f"a finite number {'>=' if zero else '>'} {low:g}" + (f" and <= {high:g}" if high < _INF else "")
        value = self.get(key, expected, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, f"{value!r} is not {expected}")
        if value < low or (value == low and not zero) or value > high:
            raise self.error(key, f"{value!r} is not {expected}")
        most = high if high < _INF else _MOST
        if 0 < value < least or value > most:
            raise self.error(key, f"{value!r} is out of range; expected {least:g} to {most:g}")
        return float(value)

    def integer(self, key: str, *, low: int = 1, high: int = 1 << 40, default: int | None = None) -> int:
        expected = f"an integer {low}..{high}"
        value = self.get(key, expected, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"{value!r} is not {expected}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, "text", default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.error(key, f"{value!r} is not a name")
        return value

    def items(self, key: str, expected: str, kind: type) -> list[Any]:
        value = self.get(key, expected)
        if not isinstance(value, list) or not value:
            raise self.error(key, f"expected {expected}")
        for index, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, kind):
                raise self.error(f"{key}[{index}]", f"{item!r} is not {expected}")
        return value

    def table(self, key: str, *, required: bool = True) -> _Table | None:
        self.known.append(key)
        if key not in self.values and not required:
            return None
        if key not in self.values:
            raise self.error(key, f"is missing; expected a table [{self.name(key)}]")
        return _Table(self.values[key], self.where, self.name(key))

    def tables(self, key: str, *, required: bool) -> list[_Table]:
        self.known.append(key)
        value = self.values.get(key, [])
        if not isinstance(value, list) or (required and not value):
            raise self.error(key, f"expected at least one [[{key}]]")
        return [_Table(item, self.where, f"{self.name(key)}[{index}]") for index, item in enumerate(value)]

    def done(self) -> None:
        for key in self.values:
            if key not in self.known:
                raise self.error(key, f"is unknown; expected {', '.join(self.known)}")


def load_package(source: str | os.PathLike[str]) -> Package:
    """The package behind a preset name or a TOML file.

    Raises
    ------
    InvalidInput
        Neither a preset nor a readable file, or a field that is unknown, missing or wrong.
    """
    if isinstance(source, str) and source in PRESETS:
        folder = resources.files("routepack_opt.residency.machine") / "presets"
        text = folder.joinpath(f"{source}.toml").read_text("utf-8")
        return parse_package(text, source)
    path = file_path(source)
    if not path.exists() and path.suffix != ".toml":
        raise InvalidInput(f"package: {str(source)!r} is neither a file nor one of {', '.join(PRESETS)}")
    return parse_package(read_text(path), str(path))


def parse_package(text: str, where: str) -> Package:
    """The package written in ``text``; ``where`` names its source in every refusal."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: not valid TOML ({error})") from None
    root = _Table(values, where, "")
    name, description = root.text("name"), root.text("description", "")
    compute = _compute(root)
    mesh_table = root.table("mesh_link", required=False)
    mesh_link = None
    if mesh_table is not None:
        mesh_link = _link(mesh_table)
        mesh_table.done()
    routers = tuple(_router(table) for table in root.tables("router", required=False))
    tiers = tuple(_tier(table) for table in root.tables("tier", required=True))
    rules = _rules(root.table("residency", required=False))
    idle, budget = 0.0, _INF
    power = root.table("power", required=False)
    if power is not None:
        idle = power.number("idle_w", zero=True, default=0.0)
        budget = power.number("budget_w", low=idle) if "budget_w" in power.values else budget
        power.done()
    root.done()
    return Package(name, description, compute, mesh_link, routers, tiers, rules, idle, budget, where)


def _compute(root: _Table) -> Compute:
    table = root.table("compute")
    assert table is not None
    mesh = None
    if "mesh" in table.values:
        sizes = table.items("mesh", "[rows, columns]", int)
        if len(sizes) != 2 or min(sizes) < 1:
            raise table.error("mesh", f"{sizes!r} is not [rows, columns], both at least 1")
        mesh = (sizes[0], sizes[1])
    compute = Compute(
        num_chiplets=table.integer("chiplets"),
        mesh=mesh,
        cores=table.integer("cores"),
        clock_hz=table.number("clock_ghz") * 1e9,
        mac_per_cycle=table.number("mac_per_cycle", default=256.0),
        utilisation=table.number("utilisation", high=1.0, default=0.7),
        mac_energy_j=table.number("mac_energy_pj", zero=True, default=0.8) * 1e-12,
    )
    table.done()
    return compute


def _link(table: _Table) -> LinkSpec:
    return LinkSpec(
        table.number("bandwidth_gbs") * 1e9,
        table.number("latency_ns", zero=True) * 1e-9,
        table.number("energy_pj_per_byte", zero=True, default=6.4) * 1e-12,
    )


def _router(table: _Table) -> Router:
    router = Router(table.text("name"), tuple(table.items("attach", "a list of node names", str)), _link(table))
    table.done()
    return router


def _tier(table: _Table) -> Tier:
    regions = []
    for inner in table.tables("regions", required=True):
        node = inner.text("node") if "node" in inner.values else None
        regions.append(Region(node, tuple(inner.items("chiplets", "a list of chiplet numbers", int))))
        inner.known.append("node")
        inner.done()
    tier = Tier(
        name=table.text("name"),
        capacity_bytes=int(table.number("capacity_mib", high=2**43) * 2**20),
        bandwidth=table.number("bandwidth_gbs") * 1e9,
        banks=table.integer("banks", default=1),
        latency_s=table.number("latency_ns", zero=True) * 1e-9,
        energy_j_per_byte=table.number("energy_pj_per_byte", zero=True) * 1e-12,
        regions=tuple(regions),
    )
    table.done()
    return tier


def _rules(table: _Table | None) -> ResidencyRules:
    default = ResidencyRules()
    if table is None:
        return default
    rules = ResidencyRules(
        budget_copies=table.number("budget_copies", high=1e6, default=default.budget_copies),
        r_max=table.integer("r_max", high=16, default=default.r_max),
        bytes_per_weight=table.number("bytes_per_weight", high=8, default=default.bytes_per_weight),
        bytes_per_activation=table.number("bytes_per_activation", high=8, default=default.bytes_per_activation),
        activation_reserve=table.number("activation_reserve", zero=True, high=0.9, default=default.activation_reserve),
        metadata_reserve_kib=table.number("metadata_reserve_kib", zero=True, default=default.metadata_reserve_kib),
        min_residency_windows=table.integer("min_residency_windows", low=0, default=default.min_residency_windows),
        migration_threshold=table.number("migration_threshold", high=1.0, default=default.migration_threshold),
        migration_chunk_kib=table.number("migration_chunk_kib", default=default.migration_chunk_kib),
        gate_constant_s=table.number(
            "gate_constant_s", zero=True, high=1e6, least=0.0, default=default.gate_constant_s
        ),
        context_tokens=table.integer("context_tokens", low=0, default=default.context_tokens),
        other_weights_tier=table.text("other_weights_tier", default.other_weights_tier),
    )
    table.done()
    return rules
