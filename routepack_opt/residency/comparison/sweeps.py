"""What a comparison runs: tables of policies under variations of the machine, the budget and the start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routepack_opt.residency.control.policy_registry import NO_MAP, OURS, PEERS, SIGNALS, STATIC, group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.simulator.simulate_window import Level

MAIN, ABLATION, BUDGET, CAPACITY, COLD, TIER = "main", "ablation", "budget", "capacity", "cold", "no-tier"
COPIES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
FAST_CAPACITIES = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Variation:
    """What differs from the package as given.

    Parameters
    ----------
    copies
        Replica budget; None: the package's.
    fast_capacity
        Factor on the capacity of every tier but the slowest.
    without
        A tier that is left out.
    cold
        Start from one copy of every expert, placed as if all were equally popular.
    """

    copies: float | None = None
    fast_capacity: float = 1.0
    without: str = ""
    cold: bool = False

    def package(self, package: Package) -> Package:
        """The machine."""
        tiers = tuple(
            replace(tier, capacity_bytes=int(tier.capacity_bytes * (self.fast_capacity if place else 1.0)))
            for place, tier in zip([True] * (len(package.tiers) - 1) + [False], package.tiers, strict=True)
            if tier.name != self.without
        )
        rules = package.rules
        if self.without and rules.other_weights_tier == self.without:
            rules = replace(rules, other_weights_tier="")
        return replace(package, tiers=tiers, rules=rules)

    @property
    def label(self) -> str:
        """Short, unique among variations."""
        parts = [] if self.copies is None else [f"copies={self.copies:g}"]
        parts += [f"fast={self.fast_capacity:g}"] if self.fast_capacity != 1.0 else []
        parts += [f"without={self.without}"] if self.without else []
        return ",".join(parts + (["cold"] if self.cold else [])) or "as-given"


@dataclass(frozen=True)
class Table:
    """Policies x variations x levels; all of them cover the same layers, those that fit under every variation."""

    name: str
    policies: tuple[str, ...]
    levels: tuple[Level, ...] = ("stage",)
    variations: tuple[Variation, ...] = (Variation(),)


def tables_of(policies: Sequence[str], levels: Sequence[Level], package: Package, *, sweeps: bool) -> list[Table]:
    """The tables of a comparison.

    Parameters
    ----------
    policies
        Of the main table.
    levels
        Of the main table; sweeps are at stage level.
    package
        The machine as given.
    sweeps
        Also ablation, copy budgets, fast-tier capacities, cold start, and a machine without its middle tier.
    """
    tables = [Table(MAIN, tuple(policies), tuple(levels))]
    if not sweeps:
        return tables
    chosen = [name for name in policies if group_of(name) in ("peer", "ours")]
    fixed = [name for name in policies if group_of(name) == "fixed"][-1:]
    swept = tuple(name for name in (*fixed, *chosen) if name in (*fixed, *PEERS, OURS))
    if OURS in policies:
        tables.append(Table(ABLATION, (OURS, *(f"{OURS}-no-{name}" for name in SIGNALS), NO_MAP)))
    tables.append(Table(BUDGET, swept, variations=tuple(Variation(copies=copies) for copies in COPIES)))
    if len(package.tiers) > 1:
        sizes = tuple(Variation(fast_capacity=factor) for factor in FAST_CAPACITIES)
        tables.append(Table(CAPACITY, (STATIC, *swept), variations=sizes))
    cold = tuple(name for name in policies if group_of(name) not in ("fixed", "naive"))
    tables.append(Table(COLD, cold, variations=(Variation(cold=True),)))
    if len(package.tiers) > 2 and OURS in policies:
        middle = package.tiers[-2].name
        tables.append(Table(TIER, (OURS,), variations=(Variation(), Variation(without=middle))))
    return tables
