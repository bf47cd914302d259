"""What a plan is about: window identity, topology, constraints and cost, read afresh from the JSON."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from routepack_opt.errors import FormatError, VerificationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.window import Window

_INTEGER_RULES = {"min_rows": 1, "row_multiple": 1, "pad_multiple": 1}
_RULES = {*_INTEGER_RULES, "max_samples_per_cell", "equal_samples_per_rank", "groups", "oversize", "max_moved"}


@dataclass(frozen=True)
class Rules:
    """The ``constraints`` object; ``groups`` is None, "cell", "rank" or N group numbers."""

    min_rows: int
    row_multiple: int
    pad_multiple: int
    max_samples_per_cell: int | None
    equal_samples_per_rank: bool
    groups: str | list[int] | None
    oversize_alone: bool
    max_moved: Fraction | None


@dataclass(frozen=True)
class Facts:
    """Plain numbers every check works on.

    Attributes
    ----------
    num_rows
        R the plan claims; :func:`routepack_opt.verify.layout.check_layout` holds it against the cells.
    lengths, padded
        Tokens of each sample, true and rounded up to ``pad_multiple``.
    demand
        int32 [N, L, E].
    load
        int64 [L, E], demand of the whole window.
    group
        Group of each sample when groups are atomic, else None.
    stages
        (alpha, beta) of each attention stage.
    expert_weights
        gamma of each layer.
    """

    num_rows: int
    dp: int
    ep: int
    shards: list[list[int]]
    cap: int
    rules: Rules
    lengths: list[int]
    padded: list[int]
    demand: NDArray[np.int32]
    load: NDArray[np.int64]
    group: list[int] | None
    stages: list[tuple[Fraction, Fraction]]
    expert_weights: list[Fraction]
    sync: str

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.demand.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.demand.shape[2])

    @property
    def group_per_cell(self) -> list[int] | None:
        """Group of each sample where a whole group must share one cell (then the group is the packed unit)."""
        return None if self.rules.groups == "rank" else self.group


def is_int(value: Any) -> TypeGuard[int]:
    """A JSON integer of 64 bits; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def is_number(value: Any) -> TypeGuard[float]:
    """A finite JSON number; booleans are not."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def read_facts(plan: dict[str, Any], window: Window) -> tuple[Facts, list[str]]:
    """Check identity of the window and the topology, and read the rest."""
    _check_window(plan["window"], window)
    shards = _read_topology(plan["topology"], window.num_experts)
    rules = _read_rules(plan["constraints"])
    stages, weights, sync = _read_cost(plan["cost"], window.num_layers)
    lengths = [int(t) for t in window.lengths]
    pad = rules.pad_multiple
    facts = Facts(
        num_rows=plan["rows"],
        dp=plan["topology"]["dp"],
        ep=plan["topology"]["ep"],
        shards=shards,
        cap=plan["token_cap"],
        rules=rules,
        lengths=lengths,
        padded=[-(-t // pad) * pad for t in lengths],
        demand=window.demand,
        load=np.add.reduce(window.demand, axis=0, dtype=np.int64),
        group=_read_groups(rules.groups, window),
        stages=stages,
        expert_weights=weights,
        sync=sync,
    )
    shape = f"{len(lengths)} samples x {facts.num_layers} layers x {facts.num_experts} experts"
    return facts, [
        f"window: {shape}, sha256 agrees",
        f"topology: {facts.dp} DP ranks in {len(shards)} EDP shards, {facts.ep} EP ranks",
    ]


def _check_window(claimed: dict[str, Any], window: Window) -> None:
    found = dict(zip(("samples", "layers", "experts"), window.demand.shape, strict=True))
    for name, size in found.items():
        if claimed[name] != size:
            raise VerificationError(f"window.{name}", f"the plan says {claimed[name]}, the window has {size}")
    counts = claimed.get("counts", window.counts)
    if counts != window.counts:  # not part of the digest
        raise VerificationError("window.counts", f"the plan says {counts!r}, the window {window.counts!r}")
    digest = hashlib.sha256()
    for array, dtype in ((window.lengths, "<i8"), (window.demand, "<i4")):
        digest.update(np.ascontiguousarray(array, dtype=dtype).data)
    if claimed["sha256"] != digest.hexdigest():
        raise VerificationError(
            "window.sha256", f"the window's is {digest.hexdigest()}; the plan is for another window"
        )


def _read_topology(topology: dict[str, Any], num_experts: int) -> list[list[int]]:
    dp, ep, shards = topology["dp"], topology["ep"], topology["shards"]
    for name, value in (("dp", dp), ("ep", ep)):
        if value < 1:
            raise VerificationError(f"topology.{name}", f"{value} is not positive")
    seen: set[int] = set()
    for index, ranks in enumerate(shards):
        if not isinstance(ranks, list) or not ranks or not all(map(is_int, ranks)):
            raise FormatError(f"plan: field 'topology.shards[{index}]': expected a non-empty list of DP ranks")
        for rank in ranks:
            if not 0 <= rank < dp:
                raise VerificationError("topology.shards", f"shard {index} names DP rank {rank} of {dp}")
            if rank in seen:
                raise VerificationError("topology.shards", f"DP rank {rank} appears twice")
            seen.add(rank)
    if len(seen) != dp:
        raise VerificationError("topology.shards", f"the shards hold {len(seen)} of {dp} DP ranks")
    if num_experts % ep:
        raise VerificationError("topology.ep", f"{num_experts} experts do not divide over {ep} EP ranks")
    return [list(ranks) for ranks in shards]


def _read_rules(value: dict[str, Any]) -> Rules:
    def refuse(name: str, expected: str) -> FormatError:
        return FormatError(f"plan: field 'constraints.{name}': expected {expected}")

    for name in value:
        if name not in _RULES:
            raise refuse(str(name), "no such constraint; it cannot be checked")
    numbers = {name: value.get(name, default) for name, default in _INTEGER_RULES.items()}
    for name, number in numbers.items():
        if not is_int(number) or number < 1:
            raise refuse(name, "an integer >= 1")
    most = value.get("max_samples_per_cell")
    if most is not None and (not is_int(most) or most < 1):
        raise refuse("max_samples_per_cell", "null or an integer >= 1")
    equal = value.get("equal_samples_per_rank", False)
    if not isinstance(equal, bool):
        raise refuse("equal_samples_per_rank", "true or false")
    groups = value.get("groups")
    if isinstance(groups, bool):
        groups = "cell" if groups else None
    if not (groups is None or groups in ("cell", "rank") or (isinstance(groups, list) and all(map(is_int, groups)))):
        raise refuse("groups", "null, 'cell', 'rank' or a list of group numbers")
    oversize = value.get("oversize", "error")
    if oversize not in ("error", "alone"):
        raise refuse("oversize", "'error' or 'alone'")
    share = value.get("max_moved")
    if share is not None and (not is_number(share) or not 0 <= share <= 1):
        raise refuse("max_moved", "null or a share between 0 and 1")
    return Rules(**numbers, max_samples_per_cell=most, equal_samples_per_rank=equal, groups=groups,
                 oversize_alone=oversize == "alone", max_moved=None if share is None else Fraction(share))  # fmt: skip


def _read_groups(groups: str | list[int] | None, window: Window) -> list[int] | None:
    if groups is None:
        return None
    if isinstance(groups, list):
        if len(groups) != window.num_samples:
            raise VerificationError(
                "constraints.groups", f"{len(groups)} group numbers for {window.num_samples} samples"
            )
        return groups
    if window.group_ids is None:
        raise VerificationError("constraints.groups", f"{groups!r} needs group_ids, the window has none")
    return [int(g) for g in window.group_ids]


def _read_cost(value: dict[str, Any], num_layers: int) -> tuple[list[tuple[Fraction, Fraction]], list[Fraction], str]:
    def weight(name: str, number: Any) -> Fraction:
        if not is_number(number) or number < 0:
            raise FormatError(f"plan: field 'cost.{name}': expected a finite number >= 0")
        return Fraction(number)

    unknown = [name for name in value if name not in ("stages", "expert_weight", "sync")]
    if unknown:
        raise FormatError(f"plan: field 'cost': unknown key {str(unknown[0])!r}")
    stages = value.get("stages")
    if not isinstance(stages, list) or not all(isinstance(s, dict) and {"alpha", "beta"} <= set(s) for s in stages):
        raise FormatError("plan: field 'cost.stages': expected a list of objects with alpha and beta")
    pairs = [
        (weight(f"stages[{i}].alpha", s["alpha"]), weight(f"stages[{i}].beta", s["beta"])) for i, s in enumerate(stages)
    ]
    gamma = value.get("expert_weight", 1.0)
    if isinstance(gamma, list):
        if len(gamma) != num_layers:
            raise VerificationError("cost.expert_weight", f"{len(gamma)} weights for {num_layers} MoE layers")
        weights = [weight(f"expert_weight[{i}]", w) for i, w in enumerate(gamma)]
    else:
        weights = [weight("expert_weight", gamma)] * num_layers
    sync = value.get("sync", "shard")
    if sync not in ("shard", "row"):
        raise FormatError("plan: field 'cost.sync': expected 'shard' or 'row'")
    return pairs, weights, sync
