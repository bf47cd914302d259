"""What the records of a comparison say: geometric means over workloads, distance from the bounds, what binds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.residency.comparison_sweeps import MAIN
from routepack_opt.residency.policy_registry import OURS, PEERS, STATIC, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Record = dict[str, Any]
Workload = tuple[str, str, int]
Values = dict[Workload, float]
STRONGEST = "strongest fixed"
STAGE_NAMES = ("gate", "dispatch", "queue", "memory", "compute", "gather", "combine")


def workload_key(record: Record) -> Workload:
    """(model, phase, seed)."""
    return record["model"], record["phase"], record["seed"]


def select(records: Iterable[Record], table: str = MAIN, level: str = "stage", **equal: object) -> list[Record]:
    """Runs of one table and level that succeeded, with the given fields equal."""
    wanted = {"table": table, "level": level, **equal}
    return [r for r in records if "error" not in r and all(r.get(k) == v for k, v in wanted.items())]


def values(runs: Iterable[Record], policy: str, measure: str = "routed_s") -> Values:
    """A measure of one policy by workload; "strongest fixed" is the best fixed-replica policy of each workload."""
    if policy != STRONGEST:
        return {workload_key(r): _measure(r, measure) for r in runs if r["policy"] == policy}
    best: dict[Workload, Record] = {}
    for r in runs:
        key = workload_key(r)
        if group_of(r["policy"]) == "fixed" and (key not in best or r["routed_s"] < best[key]["routed_s"]):
            best[key] = r
    return {key: _measure(r, measure) for key, r in best.items()}


def _measure(record: Record, name: str) -> float:
    """A field; "slow_streamed" is what the slowest tier streamed."""
    return float(record["streamed_bytes"][-1] if name == "slow_streamed" else record[name])


def geometric(over: Values, under: Values) -> float | None:
    """Geometric mean of over / under on the workloads of both; None without any."""
    logs = [math.log(over[key] / under[key]) for key in over if under.get(key, 0.0) > 0 and over[key] > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def mean(numbers: Iterable[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    listed = list(numbers)
    return sum(listed) / len(listed) if listed else 0.0


def names(runs: Iterable[Record]) -> list[str]:
    """Policies in order of appearance."""
    return list(dict.fromkeys(r["policy"] for r in runs))


def bounds_of(records: Iterable[Record]) -> dict[Workload, Record]:
    """Bound records by workload."""
    return {workload_key(r): r for r in records if r.get("table") == "bound"}


def bound_values(records: Sequence[Record], runs: Iterable[Record], policy: str) -> tuple[Values, Values]:
    """(policy, bound): routed seconds of the windows that have a bound, summed, by workload."""
    bounds = bounds_of(records)
    over: Values = {}
    under: Values = {}
    for r in runs:
        bound = bounds.get(workload_key(r))
        if r["policy"] == policy and bound is not None:
            over[workload_key(r)] = sum(r["routed_by_window"][window] for window in bound["windows"])
            under[workload_key(r)] = sum(bound["bound_s"])
    return over, under


def above_bound(records: Sequence[Record], runs: Sequence[Record], policy: str) -> float | None:
    """Geometric mean of policy over bound, less 1; None where no bound was computed."""
    if policy == STRONGEST:
        best = values(runs, STRONGEST)
        picked = [r for r in runs if group_of(r["policy"]) == "fixed" and best[workload_key(r)] == r["routed_s"]]
        runs, policy = [r | {"policy": STRONGEST} for r in picked], STRONGEST
    ratio = geometric(*bound_values(records, runs, policy))
    return None if ratio is None else ratio - 1.0


@dataclass(frozen=True)
class Line:
    """One policy in the headline table: means over the workloads of one phase.

    Parameters
    ----------
    policy
        Name.
    against
        Routed latency over that of a base, geometric mean; None where the base did not run.
    end_to_end, energy, edp
        Over static single copy, geometric means.
    hit_rate, token_hit_rate
        Mean shares served by fast tiers.
    streamed_bytes, migrated_bytes
        Mean a window.
    copies
        Mean over workloads of all windows.
    above_bound
        Geometric mean of routed latency over the bound, less 1.
    """

    policy: str
    against: dict[str, float | None]
    end_to_end: float | None
    energy: float | None
    edp: float | None
    hit_rate: float
    token_hit_rate: float
    streamed_bytes: float
    migrated_bytes: float
    copies: float
    above_bound: float | None


BASES = (STATIC, *PEERS, STRONGEST)


def headline(records: Sequence[Record], phase: str, level: str = "stage", table: str = MAIN) -> list[Line]:
    """One line a policy."""
    runs = select(records, table, level, phase=phase)
    lines = []
    for name in names(runs):
        own = [r for r in runs if r["policy"] == name]
        routed = values(runs, name)

        def over_static(measure: str, name: str = name) -> float | None:
            return geometric(values(runs, name, measure), values(runs, STATIC, measure))

        lines.append(
            Line(
                policy=name,
                against={base: geometric(routed, values(runs, base)) for base in BASES},
                end_to_end=over_static("end_to_end_s"),
                energy=over_static("energy_j"),
                edp=over_static("edp"),
                hit_rate=mean(r["read_hit_rate"] for r in own),
                token_hit_rate=mean(r["token_hit_rate"] for r in own),
                streamed_bytes=mean(sum(r["streamed_bytes"]) for r in own),
                migrated_bytes=mean(r["migrated_bytes"] for r in own),
                copies=mean(r["copies"] for r in own),
                above_bound=above_bound(records, runs, name) if level == "stage" and table == MAIN else None,
            )
        )
    return lines


def reduction(runs: Sequence[Record], base: str, measure: str = "routed_s", policy: str = OURS) -> float | None:
    """How far ``policy`` is below ``base``: 1 - geometric mean of the ratio."""
    ratio = geometric(values(runs, policy, measure), values(runs, base, measure))
    return None if ratio is None else 1.0 - ratio


def most_possible(records: Sequence[Record], runs: Sequence[Record], base: str) -> float | None:
    """How far below ``base`` the bound is: no policy can be further below it."""
    above = above_bound(records, runs, base)
    return None if above is None else 1.0 - 1.0 / (1.0 + above)


@dataclass(frozen=True)
class Binding:
    """What a policy's time goes to, over several workloads.

    Parameters
    ----------
    share
        Of the routed time by stage; of memory and compute only the longer one of each layer.
    memory_bound
        Share of (layer, window) pairs whose memory stage is the longer one.
    busiest
        Name of the busiest kind of resource, and its utilisation.
    """

    share: dict[str, float]
    memory_bound: float
    busiest: tuple[str, float]

    @property
    def sentence(self) -> str:
        """Such as "memory binds 100% of layers, 99% of the time; dram banks are 98% busy"."""
        stage = "memory" if self.memory_bound >= 0.5 else "compute"
        layers = self.memory_bound if stage == "memory" else 1.0 - self.memory_bound
        resource, use = self.busiest
        return (
            f"{stage} is the longer stage of {layers:.0%} of its layers and takes {self.share[stage]:.0%} of its time, "
            f"{resource} being {use:.0%} busy"
        )


def binding(runs: Iterable[Record], policy: str) -> Binding | None:
    """What binds a policy; None when it did not run."""
    own = [r for r in runs if r["policy"] == policy]
    if not own:
        return None
    share = dict.fromkeys(STAGE_NAMES, 0.0)
    use: dict[str, list[float]] = {}
    for r in own:
        stages = dict(zip(STAGE_NAMES, r["stages"], strict=True))
        stages["memory"], stages["compute"] = r["binding_s"]  # layer by layer only the longer of the two counts
        total = sum(stages.values())
        for name, seconds in stages.items():
            share[name] += seconds / max(total, 1e-30) / len(own)
        busy = {"the busiest chiplet": max(r["chiplet_use"]), "the busiest link": max(r["link_use"], default=0.0)}
        for tier, used in zip(r["region_tier"], r["region_use"], strict=True):
            name = f"the busiest {r['tiers'][tier]} region"
            busy[name] = max(busy.get(name, 0.0), used)
        for name, value in busy.items():
            use.setdefault(name, []).append(value)
    busiest = max(((name, mean(found)) for name, found in use.items()), key=lambda pair: pair[1])
    return Binding(share, mean(r["memory_bound"] for r in own), busiest)


def sweep(runs: Sequence[Record], policy: str, field: str, base: Values) -> dict[float, float | None]:
    """Routed latency over ``base`` by the value of a swept field, geometric means."""
    found: dict[float, float | None] = {}
    for value in sorted({r[field] for r in runs}):
        inside = [r for r in runs if r[field] == value]
        found[value] = geometric(values(inside, policy), base)
    return found
