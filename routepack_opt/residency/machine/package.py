"""Package: what a multi-chiplet machine is made of, as its TOML file says it; every default stands here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    import os

_MAX_CHIPLETS = _MAX_ROUTERS = (
    256  # routes are tabulated for every pair of nodes: a mistyped size must not fill the memory
)


@dataclass(frozen=True)
class LinkSpec:
    """One direction of a link: bandwidth in B/s, latency (router and wire) in s, energy in J/B."""

    bandwidth: float
    latency_s: float
    energy_j_per_byte: float


@dataclass(frozen=True)
class Compute:
    """The compute chiplets.

    Parameters
    ----------
    num_chiplets
        C, numbered from 0.
    mesh
        (rows, columns) with chiplet = row * columns + column and XY routing (along the row first); None: no mesh,
        the chiplets meet in routers only.
    cores, clock_hz, mac_per_cycle, utilisation
        A chiplet does cores * clock * mac_per_cycle * utilisation multiply-adds a second.
    mac_energy_j
        Of one multiply-add.
    """

    num_chiplets: int
    mesh: tuple[int, int] | None
    cores: int
    clock_hz: float
    mac_per_cycle: float
    utilisation: float
    mac_energy_j: float


@dataclass(frozen=True)
class Router:
    """A node that does not compute (IO chiplet, switch, host), linked both ways to the nodes in ``attach``."""

    name: str
    attach: tuple[str, ...]
    link: LinkSpec


@dataclass(frozen=True)
class Region:
    """The banks of one tier that serve ``chiplets``; they sit at ``node``.

    With ``node`` None the memory is stacked on its chiplets: weights read by them use no link.
    """

    node: str | None
    chiplets: tuple[int, ...]


@dataclass(frozen=True)
class Tier:
    """One kind of memory; all figures are those of one region, experts are striped over its banks."""

    name: str
    capacity_bytes: int
    bandwidth: float
    banks: int
    latency_s: float
    energy_j_per_byte: float
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class ResidencyRules:
    """Rules of residency the paper leaves open or gives as parameters; the reasons are in docs/residency-machine.md.

    Parameters
    ----------
    budget_copies
        B_res in copies of all experts in scope.
    r_max
        Most replicas of one expert.
    bytes_per_weight, bytes_per_activation
        16-bit weights and activations.
    activation_reserve
        Share of every region kept free for activations.
    metadata_reserve_kib
        Kept free in every region for the directory and the counters.
    min_residency_windows
        A_min: windows a replica stays before it may leave.
    migration_threshold
        Links whose foreground and migration utilisation is above it take no migration.
    migration_chunk_kib
        Weights are copied in chunks of this size.
    gate_constant_s
        Of the gate of one layer, beside its arithmetic.
    context_tokens
        Keys a token attends to on average, for the non-routed events.
    other_weights_tier
        Where the non-routed weights stream from; empty: the slowest tier. They take no expert capacity.
    """

    budget_copies: float = 1.3
    r_max: int = 4
    bytes_per_weight: float = 2.0
    bytes_per_activation: float = 2.0
    activation_reserve: float = 0.02
    metadata_reserve_kib: float = 192.0
    min_residency_windows: int = 4
    migration_threshold: float = 0.9
    migration_chunk_kib: float = 256.0
    gate_constant_s: float = 1e-6
    context_tokens: int = 1024
    other_weights_tier: str = ""


@dataclass(frozen=True)
class Package:
    """A machine: chiplets, routers, memory tiers from fast to slow, rules and power.

    Raises
    ------
    InvalidInput
        Parts that do not fit together; the message names file, field, index and what would be right.
    """

    name: str
    description: str
    compute: Compute
    mesh_link: LinkSpec | None
    routers: tuple[Router, ...]
    tiers: tuple[Tier, ...]
    rules: ResidencyRules = field(default_factory=ResidencyRules)
    idle_power_w: float = 0.0
    power_budget_w: float = math.inf
    where: str = "package"

    def __post_init__(self) -> None:
        """Cross checks; single values are checked where they are read."""
        self._check_mesh()
        self._check_names()
        for index, tier in enumerate(self.tiers):
            self._check_tier(index, tier)
        if self.rules.budget_copies < 1.0:
            raise self.error("residency.budget_copies", f"{self.rules.budget_copies:g} holds no copy of every expert; "
                             "expected at least 1")  # fmt: skip
        wanted = self.rules.other_weights_tier
        if wanted and wanted not in (tier.name for tier in self.tiers):
            raise self.error("residency.other_weights_tier", f"{wanted!r} is no tier; expected one of "
                             + ", ".join(tier.name for tier in self.tiers))  # fmt: skip

    def error(self, name: str, message: str) -> InvalidInput:
        """A refusal that names file and field."""
        return InvalidInput(f"{self.where}: field {name!r}: {message}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Chiplets c0.., then the routers in file order."""
        return (*(f"c{k}" for k in range(self.compute.num_chiplets)), *(router.name for router in self.routers))

    def _check_mesh(self) -> None:
        compute = self.compute
        if compute.num_chiplets > _MAX_CHIPLETS:
            raise self.error("compute.chiplets", f"{compute.num_chiplets} is above {_MAX_CHIPLETS}")
        if compute.mesh is None:
            if self.mesh_link is not None:
                raise self.error("mesh_link", "given without compute.mesh; add mesh = [rows, columns] or leave it out")
            return
        rows, columns = compute.mesh
        if rows * columns != compute.num_chiplets:
            raise self.error(
                "compute.mesh",
                f"{rows} x {columns} is not {compute.num_chiplets} chiplets; expected rows * columns = chiplets",
            )
        if self.mesh_link is None and compute.num_chiplets > 1:
            raise self.error("mesh_link", "is missing; a mesh needs bandwidth_gbs, latency_ns, energy_pj_per_byte")

    def _check_names(self) -> None:
        if len(self.routers) > _MAX_ROUTERS:
            raise self.error("router", f"{len(self.routers)} routers; expected at most {_MAX_ROUTERS}")
        names = self.node_names
        for index, router in enumerate(self.routers):
            if names.index(router.name) != self.compute.num_chiplets + index:
                raise self.error(f"router[{index}].name", f"{router.name!r} is taken; expected a new name")
            for place, other in enumerate(router.attach):
                at = f"router[{index}].attach[{place}]"
                if other not in names:
                    raise self.error(
                        at, f"{other!r} is no node; expected c0..c{self.compute.num_chiplets - 1} or a router"
                    )
                if other == router.name or other in router.attach[:place]:
                    raise self.error(at, f"{other!r} is {'itself' if other == router.name else 'listed twice'}")
                if other in (r.name for r in self.routers[:index] if router.name in r.attach):
                    raise self.error(at, f"{other!r} already attaches {router.name!r}; list a link at one end only")
        tiers = [tier.name for tier in self.tiers]
        for index, name in enumerate(tiers):
            if name in tiers[:index]:
                raise self.error(f"tier[{index}].name", f"{name!r} is taken; expected a new name")

    def _check_tier(self, index: int, tier: Tier) -> None:
        seen: set[int] = set()
        for place, region in enumerate(tier.regions):
            at = f"tier[{index}].regions[{place}]"
            if region.node is not None and region.node not in self.node_names:
                raise self.error(
                    f"{at}.node", f"{region.node!r} is no node; expected a chiplet c0.. or a router's name"
                )
            for chiplet in region.chiplets:
                if not 0 <= chiplet < self.compute.num_chiplets:
                    raise self.error(
                        f"{at}.chiplets", f"{chiplet} is no chiplet; expected 0..{self.compute.num_chiplets - 1}"
                    )
                if chiplet in seen:
                    raise self.error(
                        f"{at}.chiplets", f"chiplet {chiplet} is listed twice; one region a tier serves it"
                    )
                seen.add(chiplet)

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Package:
        """Read a preset (``paper``, ``gpu-host-nvme``, ``cxl``) or a TOML file, see ``package_file``."""
        from routepack_opt.residency.machine.package_file import load_package

        return load_package(source)

    def describe(self) -> str:
        """Every value the package stands for, defaults included, one line each."""
        compute = self.compute
        lines = [f"package {self.name}: {self.description}" if self.description else f"package {self.name}"]
        shape = f"mesh {compute.mesh[0]}x{compute.mesh[1]}" if compute.mesh else "no mesh"
        rate = compute.cores * compute.clock_hz * compute.mac_per_cycle * compute.utilisation
        lines.append(
            f"compute: {compute.num_chiplets} chiplets ({shape}), {compute.cores} cores each, "
            f"{compute.clock_hz / 1e9:g} GHz, {compute.mac_per_cycle:g} MAC/cycle, utilisation {compute.utilisation:g} "
            f"-> {rate / 1e12:.4g} TMAC/s a chiplet; {compute.mac_energy_j * 1e12:g} pJ/MAC"
        )
        if self.mesh_link is not None:
            lines.append(f"mesh link: {_link_text(self.mesh_link)}, XY routing")
        lines += [f"{r.name}: attached to {', '.join(r.attach)} by {_link_text(r.link)}" for r in self.routers]
        for tier in self.tiers:
            nodes = sorted({region.node or "stacked" for region in tier.regions})
            lines.append(
                f"tier {tier.name}: {len(tier.regions)} regions ({', '.join(nodes)}), each "
                f"{tier.capacity_bytes / 2**20:g} MiB, {tier.bandwidth / 1e9:g} GB/s, {tier.banks} banks, "
                f"{tier.latency_s * 1e9:g} ns, "
                f"{tier.energy_j_per_byte * 1e12:g} pJ/B"
            )
        lines += [f"{f.name}: {getattr(self.rules, f.name)!r}" for f in fields(self.rules)]
        lines.append(f"power: idle {self.idle_power_w:g} W, budget {self.power_budget_w:g} W")
        return "\n".join(lines)


def _link_text(link: LinkSpec) -> str:
    return (
        f"{link.bandwidth / 1e9:g} GB/s a direction, {link.latency_s * 1e9:g} ns, "
        f"{link.energy_j_per_byte * 1e12:g} pJ/B"
    )
