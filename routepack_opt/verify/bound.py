"""The layout bound: a number no placement and no layout can get below, and the gap to it.

Averaging. Let X be the attention work of all samples, ``X = sum_s sum_i (alpha_s t_i / C + beta_s (t_i / C)^2)``,
m_g the number of DP ranks of shard g, D their sum, and ``Y = (1/C) sum_l gamma_l LB_l`` with LB_l the integer bound on
the fullest rank of layer l (:func:`routepack_opt.verify.placement.rank_load_bound`).

1. In a row the slowest DP rank of a shard is at least its average one, so ``U_g >= X_g / m_g + F_g`` where X_g is the
   work of the samples given to shard g and F_g = sum_r E[r, g].
2. ``sum_g F_g >= Y``: summed over rows and shards, the fullest rank carries at least what any one rank carries, which
   is max_p G, hence LB_l.
3. For weights c_g >= 0 of sum 1, ``max_g U_g >= sum_g c_g U_g >= X min_g(c_g / m_g) + Y min_g c_g``. The best c make
   both minima tight: ``c_g = x max(m_g, m_k)`` for some shard size m_k, with x = 1 / sum_g max(m_g, m_k). So
   ``bound = max_k (X + Y m_k) / sum_g max(m_g, m_k)``. With equal shards of m it is ``(X / m + Y) / G``.
4. When all shards meet every row, ``sum_r max_g J >= max_g U_g``: the same bound holds.

Truncation. A stage may be bounded by more than its average, see :mod:`routepack_opt.verify.truncation`: then its
share of X is the sum of its prices, and what long samples cost their row-shards beyond the level joins Y in step 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import VerificationError
from routepack_opt.verify.facts import is_number
from routepack_opt.verify.placement import layer_bounds
from routepack_opt.verify.scoring import TOLERANCE, nearly, show
from routepack_opt.verify.truncation import StageProof, check_stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from routepack_opt.verify.facts import Facts


@dataclass(frozen=True)
class Proved:
    """What a derivation gives: the bound, and the most its attention and expert terms can be."""

    value: Fraction
    attention: Fraction
    experts: Fraction


def averaging(facts: Facts, certificate: dict[str, Any]) -> Proved:
    """The averaging bound of the module docstring; the certificate needs no further fields."""
    del certificate
    return _weighed(facts, [StageProof(work, Fraction()) for work in _stage_work(facts)])


def truncated(facts: Facts, certificate: dict[str, Any]) -> Proved:
    """Averaging, with every stage listed in ``stages`` bounded by :mod:`routepack_opt.verify.truncation`."""
    stages = [StageProof(work, Fraction()) for work in _stage_work(facts)]
    entries = certificate.get("stages")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise VerificationError("certificates.layout", "'stages' is not a list of objects")
    seen: set[int] = set()
    for entry in entries:
        stage, proof = check_stage(facts, entry)
        if stage in seen:
            raise VerificationError("certificates.layout", f"stage {stage} is listed twice")
        seen.add(stage)
        stages[stage] = proof
    return _weighed(facts, stages)


def _stage_work(facts: Facts) -> list[Fraction]:
    tokens, squares = sum(facts.lengths), sum(t * t for t in facts.lengths)
    return [a * tokens / facts.cap + b * squares / facts.cap**2 for a, b in facts.stages]


def _weighed(facts: Facts, stages: list[StageProof]) -> Proved:
    """Step 3 of the module docstring: the best weights for ``work`` X and for what row-shards pay, Y and ``excess``."""
    work = sum((stage.work for stage in stages), Fraction())
    excess = sum((stage.excess for stage in stages), Fraction())
    experts = sum(
        (gamma * bound for gamma, bound in zip(facts.expert_weights, layer_bounds(facts), strict=True)),
        Fraction(),
    )
    experts /= facts.cap
    sizes = [len(ranks) for ranks in facts.shards]
    sums = {m: sum(max(m, other) for other in sizes) for m in set(sizes)}
    return Proved(
        max((work + (excess + experts) * m) / total for m, total in sums.items()),
        max((work + excess * m) / total for m, total in sums.items()),
        experts / len(sizes),
    )


# A new kind of bound is one function here: it re-derives what the certificate says and returns what is proved.
KINDS: dict[str, Callable[[Facts, dict[str, Any]], Proved]] = {"averaging": averaging, "truncation": truncated}


def check_bound(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Check certificates.layout, bound and gap."""
    claim = "certificates.layout"
    certificate = plan["certificates"].get("layout")
    if not isinstance(certificate, dict):
        raise VerificationError(claim, "missing")
    kind = certificate.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise VerificationError(claim, f"kind {kind!r} is unknown; expected one of {', '.join(KINDS)}")
    for name in ("attention", "experts", "value"):
        if not is_number(certificate.get(name)) or certificate[name] < 0:
            raise VerificationError(claim, f"{name!r} is not a finite number >= 0")
    proved = KINDS[kind](facts, certificate)
    for name, most in (("attention", proved.attention), ("experts", proved.experts), ("value", proved.value)):
        _at_most(claim, name, certificate[name], most)
    if not nearly(certificate["value"], Fraction(certificate["attention"]) + Fraction(certificate["experts"])):
        raise VerificationError(claim, "value is not the sum of its terms")
    if not nearly(plan["bound"], Fraction(certificate["value"])):
        raise VerificationError("bound", f"says {plan['bound']!r}, its certificate {certificate['value']!r}")
    _at_most("bound", "the plan's bound", plan["bound"], proved.value)
    _check_gap(plan)
    return [f"bound: {show(Fraction(plan['bound']), 6)} ({kind}), gap {show(100 * Fraction(plan['gap']), 4)}%"]


def _at_most(claim: str, name: str, claimed: float, most: Fraction) -> None:
    if Fraction(claimed) > most * (1 + TOLERANCE):
        raise VerificationError(claim, f"{name} says {claimed!r}, only {show(most)} is proved")


def _check_gap(plan: dict[str, Any]) -> None:
    score, bound, gap = (Fraction(v) for v in (plan["score"][0], plan["bound"], plan["gap"]))
    ratio = score / bound if bound else score
    expected = ratio - 1 if bound else score
    if abs(gap - expected) > TOLERANCE * max(Fraction(1), ratio):
        raise VerificationError("gap", f"says {plan['gap']!r}, (score - bound) / bound is {show(expected)}")
