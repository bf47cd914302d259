"""What the records of a comparison say: geometric means over workloads, distance from the bounds, what binds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.residency.comparison.sweeps import MAIN
from routepack_opt.residency.control.policy_registry import OURS, PEERS, STATIC, group_of

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


def complete(runs: Sequence[Record]) -> list[Record]:
    """Runs of workloads that all policies ran; an interrupted comparison has others. All runs where there is none."""
    wanted = set(names(runs))
    ran: dict[Workload, set[str]] = {}
    for r in runs:
        ran.setdefault(workload_key(r), set()).add(r["policy"])
    kept = [r for r in runs if ran[workload_key(r)] == wanted]
    return kept or list(runs)


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
    runs = complete(select(records, table, level, phase=phase))
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
        Mean share of the routed time by stage; of memory and compute only the longer one of each layer.
    streaming, arithmetic
        Models whose memory stage is the longer one in most layers and windows, and the others.
    busiest_region, busiest_chiplet
        Mean utilisation of the busiest region in the former, of the busiest chiplet in the latter.
    """

    share: dict[str, float]
    streaming: list[str]
    arithmetic: list[str]
    busiest_region: float
    busiest_chiplet: float

    @property
    def sentence(self) -> str:
        """Such as "streaming weights binds 5 workloads (busiest region 97% busy), arithmetic 3 (...)"."""
        parts = []
        if self.streaming:
            parts.append(
                f"streaming weights binds {_listed(self.streaming)} (busiest region {self.busiest_region:.0%} busy)"
            )
        if self.arithmetic:
            parts.append(
                f"arithmetic binds {_listed(self.arithmetic)} (busiest chiplet {self.busiest_chiplet:.0%} busy)"
            )
        share = self.share["dispatch"] + self.share["gather"]
        return ", ".join(parts) + f"; token traffic takes {share:.1%} of the time"


def _listed(models: list[str]) -> str:
    different = list(dict.fromkeys(models))
    return ", ".join(different) if len(different) <= 3 else f"{len(different)} models"


def binding(runs: Iterable[Record], policy: str) -> Binding | None:
    """What binds a policy; None when it did not run."""
    own = [r for r in runs if r["policy"] == policy]
    if not own:
        return None
    share = dict.fromkeys(STAGE_NAMES, 0.0)
    streaming: list[Record] = []
    arithmetic: list[Record] = []
    for r in own:
        stages = dict(zip(STAGE_NAMES, r["stages"], strict=True))
        stages["memory"], stages["compute"] = r["binding_s"]  # layer by layer only the longer of the two counts
        total = sum(stages.values())
        for name, seconds in stages.items():
            share[name] += seconds / max(total, 1e-30) / len(own)
        (streaming if r["memory_bound"] >= 0.5 else arithmetic).append(r)
    return Binding(
        share,
        [r["model"] for r in streaming],
        [r["model"] for r in arithmetic],
        mean(max(r["region_use"]) for r in streaming),
        mean(max(r["chiplet_use"]) for r in arithmetic),
    )


def sweep(runs: Sequence[Record], policy: str, field: str, base: Values) -> dict[float, float | None]:
    """Routed latency over ``base`` by the value of a swept field, geometric means."""
    found: dict[float, float | None] = {}
    for value in sorted({r[field] for r in runs}):
        inside = [r for r in runs if r[field] == value]
        found[value] = geometric(values(inside, policy), base)
    return found
