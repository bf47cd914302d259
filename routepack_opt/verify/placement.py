"""The placement: a bijection per layer, and what no placement can beat.

The bounds are integers about one layer: loads a_1 >= ... >= a_E over P ranks of exactly H = E / P slots.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import VerificationError
from routepack_opt.verify.facts import is_int
from routepack_opt.verify.scoring import TOLERANCE, rank_loads

if TYPE_CHECKING:
    from routepack_opt.verify.facts import Facts


def check_placement(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Check that every layer maps experts one to one onto slots, and the share of moved experts."""
    num_layers, num_experts = facts.num_layers, facts.num_experts
    for layer, slots in enumerate(plan["logical_to_slot"]):
        taken: dict[int, int] = {}
        for expert, slot in enumerate(slots):
            if not 0 <= slot < num_experts:
                raise VerificationError(
                    "logical_to_slot", f"layer {layer}, expert {expert}: slot {slot} of {num_experts}"
                )
            if slot in taken:
                raise VerificationError(
                    "logical_to_slot", f"layer {layer}: experts {taken[slot]} and {expert} share slot {slot}"
                )
            taken[slot] = expert
    moved = plan.get("moved_experts") or []
    for layer, count in enumerate(moved):
        if not 0 <= count <= num_experts:
            raise VerificationError("moved_experts", f"layer {layer}: {count} of {num_experts} experts")
    share = facts.rules.max_moved
    if share is not None:
        if not moved:
            raise VerificationError("moved_experts", "missing, but constraints.max_moved caps it")
        if sum(moved) > (share + TOLERANCE) * num_layers * num_experts:
            raise VerificationError(
                "constraints.max_moved",
                f"{sum(moved)} of {num_layers * num_experts} experts moved, above the share {float(share):g}",
            )
    return [f"logical_to_slot: one to one in each of {num_layers} layers, {num_experts // facts.ep} slots a rank"]


def check_placement_certificate(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Check the bound and the reached peak of every layer."""
    entries = plan["certificates"].get("placement")
    claim = "certificates.placement"
    if not isinstance(entries, list) or len(entries) != facts.num_layers:
        raise VerificationError(claim, f"expected one entry for each of {facts.num_layers} layers")
    slots = np.array(plan["logical_to_slot"], dtype=np.int64)
    peaks = rank_loads(facts.load, slots, facts.ep).max(axis=1).tolist()
    bounds = layer_bounds(facts)
    met = solver_met = 0
    for layer, entry in enumerate(entries):
        where = f"layer {layer}"
        if not isinstance(entry, dict) or not is_int(entry.get("bound")) or not is_int(entry.get("reached")):
            raise VerificationError(claim, f"{where}: expected integers 'bound' and 'reached'")
        if entry["reached"] != peaks[layer]:
            raise VerificationError(
                claim, f"{where}: reached says {entry['reached']}, the fullest rank has {peaks[layer]}"
            )
        bound, kind = entry["bound"], entry.get("kind")
        if not isinstance(kind, str):
            raise VerificationError(claim, f"{where}: 'kind' names no argument")
        if bound < 0 or bound > entry["reached"]:
            raise VerificationError(
                claim, f"{where}: bound {bound} is refuted by the plan, which reaches {peaks[layer]}"
            )
        if kind == "solver":
            for name in ("solver", "version"):
                if not isinstance(entry.get(name), str) or not entry[name]:
                    raise VerificationError(claim, f"{where}: a solver's bound must carry its {name!r}")
        elif bound > bounds[layer]:
            raise VerificationError(claim, f"{where}: bound {bound} is not proved, {bounds[layer]} is")
        met += bound == peaks[layer] and kind != "solver"
        solver_met += bound == peaks[layer] and kind == "solver"
    sentence = f"certificates.placement: fullest rank proved smallest in {met} of {facts.num_layers} layers"
    return [sentence + (f", solver-proved in {solver_met} more (not re-checked)" if solver_met else "")]


def layer_bounds(facts: Facts) -> list[int]:
    """Lower bound on max_p G of each layer, for every placement."""
    return [rank_load_bound([int(a) for a in loads], facts.ep) for loads in facts.load]


def rank_load_bound(loads: list[int], num_ranks: int) -> int:
    """Largest of the integer lower bounds on the fullest of P ranks with exactly E / P experts each.

    - mean: the fullest rank carries at least the average;
    - cardinality: of the jP + 1 hottest experts some rank holds j + 1 or more, and fills up with the coldest
      (j = 0 is: the hottest expert plus the H - 1 coldest);
    - pigeonhole, see :func:`_pigeonhole`;
    - pairing: with two experts a rank, hottest with coldest is optimal (exchange argument);
    - divisor: rank loads are multiples of the greatest common divisor of the loads.
    """
    hot = sorted(loads, reverse=True)
    if hot[0] == 0:
        return 0
    per_rank = len(hot) // num_ranks
    heads = [0, *accumulate(hot)]  # heads[k] = a_1 + ... + a_k
    tails = [0, *accumulate(reversed(hot))]  # tails[k] = the k smallest
    best = -(-heads[-1] // num_ranks)
    for j in range(per_rank):
        last = j * num_ranks + 1
        best = max(best, heads[last] - heads[last - j - 1] + tails[per_rank - j - 1])
        best = max(best, _pigeonhole(j, heads, tails, num_ranks))
    if per_rank == 2:
        best = max(best, *(hot[i] + hot[-1 - i] for i in range(num_ranks)))
    divisor = math.gcd(*hot)
    return -(-best // divisor) * divisor


def _pigeonhole(j: int, heads: list[int], tails: list[int], num_ranks: int) -> int:
    """Look at the n = jP + h hottest, 1 <= h <= P (j = 0: two of them share a rank, or each has its own).

    Crowded: some rank holds j + 2 of them, at best the coldest, and fills up with the coldest of all. Spread: no rank
    holds more than j + 1. Then for every k <= h the jP + k hottest are spread as well, so k ranks hold exactly j + 1
    of those, and these k ranks together carry k (j + 1) of them and k (H - j - 1) others; one carries the average.
    """
    per_rank = (len(heads) - 1) // num_ranks
    best = spread = 0
    for h in range(1, num_ranks + 1):
        last = j * num_ranks + h
        together = heads[last] - heads[last - h * (j + 1)] + tails[h * (per_rank - j - 1)]
        spread = max(spread, -(-together // h))
        if j + 2 > per_rank or j + 2 > last:  # a rank cannot be crowded
            best = max(best, spread)
        else:
            crowded = heads[last] - heads[last - j - 2] + tails[per_rank - j - 2]
            best = max(best, min(crowded, spread))
    return best
