"""The score, in whole numbers.

Every cost weight is a float, hence a whole number over a power of two. With that power and C^2 taken out, J of a
row and shard is an integer and nothing is rounded before the comparison with the three floats of the plan.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import VerificationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.verify.facts import Facts

TOLERANCE = Fraction(1, 10**9)
_NAMES = ("slowest shard", "total", "worst row")


def check_score(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Compare the plan's score with the exact one."""
    slots = np.array(plan["logical_to_slot"], dtype=np.int64)
    exact = exact_score(plan["cells"], slots, facts)
    for name, claimed, value in zip(_NAMES, plan["score"], exact, strict=True):
        if not nearly(claimed, value):
            raise VerificationError("score", f"{name} says {claimed!r}, exact arithmetic gives {show(value)}")
    _check_never_worse(plan, facts)
    return ["score: " + ", ".join(f"{n} {show(v, 6)}" for n, v in zip(_NAMES, exact, strict=True))]


def _check_never_worse(plan: dict[str, Any], facts: Facts) -> None:
    """LPT + FFD is not re-run, but what the plan says of it may not contradict the promise never to be worse."""
    seed, seed_rows = plan["seed_score"], plan.get("seed_rows")
    if seed is None or seed_rows is None or facts.rules.max_moved is not None:
        return
    if (plan["rows"], *plan["score"]) > (seed_rows, *seed):
        raise VerificationError("seed_score", "LPT + FFD is better than the plan, by (rows, score)")


def nearly(claimed: float, exact: Fraction) -> bool:
    """Equal up to the rounding of a float computation (one part in 1e9)."""
    return abs(Fraction(claimed) - exact) <= TOLERANCE * abs(exact)


def show(value: Fraction, digits: int = 12) -> str:
    """The number for a message, whatever its size."""
    try:
        return f"{float(value):.{digits}g}"
    except OverflowError:
        return "above 1e308" if value > 0 else "below -1e308"


def exact_score(cells: list[list[list[int]]], slots: NDArray[np.int64], facts: Facts) -> tuple[Fraction, ...]:
    """(max_g U_g, sum U_g, max J), or (sum_r max_g J, sum J, max J) when all shards meet every row."""
    weights = [w for pair in facts.stages for w in pair] + facts.expert_weights
    scale = max((w.denominator for w in weights), default=1)  # all are powers of two
    stages = [(int(a * scale), int(b * scale)) for a, b in facts.stages]
    gammas = [int(w * scale) for w in facts.expert_weights]
    unit = scale * facts.cap**2

    costs: list[list[int]] = []
    for row in cells:
        tokens = [sum(facts.lengths[i] for i in cell) for cell in row]
        squares = [sum(facts.lengths[i] ** 2 for i in cell) for cell in row]
        costs.append([])
        for ranks in facts.shards:
            attention = sum(max(a * facts.cap * tokens[d] + b * squares[d] for d in ranks) for a, b in stages)
            peaks = peak_rank_loads([i for d in ranks for i in row[d]], slots, facts)
            experts = sum(gamma * peak for gamma, peak in zip(gammas, peaks, strict=True))
            costs[-1].append(attention + facts.cap * experts)

    total = sum(map(sum, costs))
    worst = max(map(max, costs))
    if facts.sync == "row":
        first = sum(map(max, costs))
    else:
        first = max(sum(row[g] for row in costs) for g in range(len(facts.shards)))
    return tuple(Fraction(value, unit) for value in (first, total, worst))


def peak_rank_loads(samples: list[int], slots: NDArray[np.int64], facts: Facts) -> list[int]:
    """max_p W of each layer when these samples run together."""
    together = np.add.reduce(facts.demand[samples], axis=0, dtype=np.int64)
    return [int(peak) for peak in rank_loads(together, slots, facts.ep).max(axis=1)]


def rank_loads(demand: NDArray[np.int64], slots: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """int64 [L, P], demand int64 [L, E] summed over the experts of each EP rank."""
    num_layers, num_experts = demand.shape
    ranks = slots // (num_experts // num_ranks)
    loads = np.zeros((num_layers, num_ranks), dtype=np.int64)
    np.add.at(loads, (np.arange(num_layers)[:, None], ranks), demand)
    return loads
