"""Figures of the HCRMap paper (arXiv 2607.11586) next to ours; where they disagree, what the data says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.sweeps import ABLATION, BUDGET, MAIN, TIER
from routepack_opt.residency.control.policy_registry import NO_MAP, OURS, PEERS, SIGNALS

if TYPE_CHECKING:
    from collections.abc import Sequence

Record = dict[str, Any]

LATENCY = {  # below the baseline, geometric mean of the eight models: prefill, decode
    "hydra": (0.436, 0.430),
    "moentwine": (0.345, 0.331),
    "pimoe": (0.467, 0.460),
    summary.STRONGEST: (0.2495, 0.2391),
}
EDP = (0.1994, 0.1986)
WITHOUT_MAP = (0.512, 0.507)
WITHOUT_TIER_LATENCY, WITHOUT_TIER_BYTES = 0.184, 0.440
ABLATIONS = {"link": (1.21, 1.24), "bank": (1.29, 1.36), "load": (1.40, 1.39), "migration": (1.13, 1.18)}
COPIES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
COPY_BUDGETS = {  # latency over Hydra with one copy
    OURS: (0.90, 0.65, 0.51, 0.44, 0.42, 0.41),
    "hydra": (1.00, 0.89, 0.83, 0.80, 0.79, 0.79),
    "moentwine": (0.96, 0.82, 0.71, 0.66, 0.64, 0.63),
    "pimoe": (0.94, 0.79, 0.67, 0.61, 0.59, 0.58),
}
_PHASES = ("prefill", "decode")
_CLOSE = 0.05


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    Parameters
    ----------
    name
        What it measures.
    phase
        "prefill", "decode", or "" for both.
    paper, ours
        Shares (0.436 is 43.6%) or ratios; ``ours`` None when the comparison did not run it.
    is_share
        How to print both.
    sentence
        Whether they agree, and what the data says where not.
    """

    name: str
    phase: str
    paper: float
    ours: float | None
    is_share: bool
    sentence: str

    @property
    def agrees(self) -> bool:
        """Within five points, or 0.05 for ratios."""
        return self.ours is not None and abs(self.ours - self.paper) <= _CLOSE

    def show(self, value: float | None) -> str:
        """A value of this figure as text."""
        if value is None:
            return "-"
        return f"{100 * value:.1f}%" if self.is_share else f"{value:.2f}"


def figures(records: Sequence[Record]) -> list[Figure]:
    """All figures of the paper that residency.md restates."""
    found: list[Figure] = []
    for number, phase in enumerate(_PHASES):
        runs = summary.complete(summary.select(records, MAIN, phase=phase))
        for base, papers in LATENCY.items():
            ours = summary.reduction(runs, base)
            sentence = _latency_sentence(records, runs, base, papers[number], ours)
            found.append(Figure(f"latency below {base}", phase, papers[number], ours, True, sentence))
        ours = summary.reduction(runs, summary.STRONGEST, "edp")
        text = _plain(EDP[number], ours, _edp_reason(runs))
        found.append(Figure(f"EDP below {summary.STRONGEST}", phase, EDP[number], ours, True, text))
    for number, phase in enumerate(_PHASES):
        found += _ablation(records, number, phase)
    found += _without_tier(records)
    return found + _budgets(records)


def _latency_sentence(
    records: Sequence[Record], runs: Sequence[Record], base: str, paper: float, ours: float | None
) -> str:
    if ours is None:
        return "not run"
    if abs(ours - paper) <= _CLOSE:
        return "agrees within five points or 0.05"
    most = summary.most_possible(records, runs, base)
    parts = []
    if most is not None:
        verdict = "so the paper's figure is out of reach of any layout here" if most < paper else "so there is room"
        parts.append(f"by the bound no layout is more than {most:.1%} below {base} on these windows, {verdict}")
    strongest = [r for r in runs if r["policy"] == base]
    if base == summary.STRONGEST:
        best = summary.values(runs, base)
        strongest = [r for r in runs if best.get(summary.workload_key(r)) == r["routed_s"]]
    bound = summary.binding([r | {"policy": base} for r in strongest], base)
    if bound is not None:
        parts.append(f"in {base}, {bound.sentence}")
    return _side(ours, paper) + "; ".join(parts)


def order_sentence(records: Sequence[Record]) -> str | None:
    """Order of the other systems, fastest first: the paper's two, and ours."""
    runs = summary.select(records)
    base = summary.values(runs, "hydra")
    over = {name: summary.geometric(summary.values(runs, name), base) for name in PEERS}
    found = {name: ratio for name, ratio in over.items() if ratio is not None}
    if len(found) < len(PEERS):
        return None
    text = " < ".join(f"{name} ({ratio:.3f})" for name, ratio in sorted(found.items(), key=lambda pair: pair[1]))
    return (
        "Order by latency: the paper's headline has moentwine < hydra < pimoe, its copy-budget figure pimoe < "
        f"moentwine < hydra at the same budget; here, over hydra: {text}."
    )


def _edp_reason(runs: Sequence[Record]) -> str:
    energy = summary.reduction(runs, summary.STRONGEST, "energy_j")
    latency = summary.reduction(runs, summary.STRONGEST, "end_to_end_s")
    if energy is None or latency is None:
        return ""
    more = f"{abs(energy):.1%} {'less' if energy >= 0 else 'more'}"
    return f"ours takes {more} energy and {latency:.1%} less time end to end"


def _side(ours: float, paper: float) -> str:
    return f"{'less' if ours < paper else 'more'} than the paper: "


def _plain(paper: float, ours: float | None, reason: str) -> str:
    if ours is None:
        return "not run"
    if abs(ours - paper) <= _CLOSE:
        return "agrees within five points or 0.05"
    return _side(ours, paper) + reason


def _ablation(records: Sequence[Record], number: int, phase: str) -> list[Figure]:
    runs = summary.select(records, ABLATION, phase=phase)
    full, found = summary.values(runs, OURS), []
    bound = summary.binding(runs, OURS)
    copied = summary.mean(r["migrated_bytes"] / max(sum(r["streamed_bytes"]), 1.0) for r in runs if r["policy"] == OURS)
    for name in SIGNALS:
        paper = ABLATIONS[name][number]
        ours = summary.geometric(summary.values(runs, f"{OURS}-no-{name}"), full)
        found.append(Figure(f"latency without the {name} signal", phase, paper, ours, False,
                            _signal_sentence(name, paper, ours, bound, copied)))  # fmt: skip
    base = summary.values(runs, NO_MAP)
    ratio = summary.geometric(full, base)
    ours = None if ratio is None else 1.0 - ratio
    text = _plain(WITHOUT_MAP[number], ours, "without it each group takes the nearest replica; the paper does not say "
                  "what serves instead")  # fmt: skip
    return [*found, Figure("latency below ours without the fast map", phase, WITHOUT_MAP[number], ours, True, text)]


def _signal_sentence(name: str, paper: float, ours: float | None, bound: summary.Binding | None, copied: float) -> str:
    if ours is None or bound is None or abs(ours - paper) <= _CLOSE:
        return _plain(paper, ours, "")
    parts = {
        "load": ("compute", "compute"),
        "bank": ("memory and queue", "memory"),
        "link": ("dispatch and gather", "dispatch"),
    }
    if name == "migration":
        return _side(ours, paper) + f"with one edit a window ours copies {copied:.2%} of the bytes it streams"
    label, stage = parts[name]
    share = bound.share[stage]
    share += bound.share["queue"] if name == "bank" else bound.share["gather"] if name == "link" else 0.0
    return _side(ours, paper) + f"{label} take{'s' if name == 'load' else ''} {share:.0%} of our routed time"


def _without_tier(records: Sequence[Record]) -> list[Figure]:
    runs = summary.select(records, TIER, phase="decode")
    full = [r for r in runs if not r["without"]]
    less = [r for r in runs if r["without"]]
    found = []
    for name, measure, paper in (
        ("decode latency below ours without the middle tier", "routed_s", WITHOUT_TIER_LATENCY),
        ("bytes of the slowest tier below ours without the middle tier", "slow_streamed", WITHOUT_TIER_BYTES),
    ):
        ratio = summary.geometric(summary.values(full, OURS, measure), summary.values(less, OURS, measure))
        ours = None if ratio is None else 1.0 - ratio
        text = _plain(paper, ours, _tier_reason(full))
        found.append(Figure(name, "decode", paper, ours, True, text))
    return found


def _tier_reason(full: Sequence[Record]) -> str:
    if not full:
        return ""
    tiers = full[0]["tiers"]
    shares = [summary.mean(r["streamed_bytes"][k] / max(sum(r["streamed_bytes"]), 1.0) for r in full)
              for k in range(len(tiers))]  # fmt: skip
    text = ", ".join(f"{share:.0%} from {tier}" for share, tier in zip(shares, tiers, strict=True))
    return f"all tiers stream at once here, and with all of them {text} is read"


def _budgets(records: Sequence[Record]) -> list[Figure]:
    runs = summary.select(records, BUDGET)
    base = summary.values([r for r in runs if r["budget_copies"] == COPIES[0]], "hydra")
    found = []
    for policy, papers in COPY_BUDGETS.items():
        ours = summary.sweep(runs, policy, "budget_copies", base) if runs else {}
        for copies, paper in zip(COPIES, papers, strict=True):
            value = ours.get(copies)
            reason = _budget_reason(runs, policy, copies)
            found.append(Figure(f"{policy} at {copies:g}x copies over hydra at 1x", "", paper, value, False,
                                _plain(paper, value, reason)))  # fmt: skip
    return found


def _budget_reason(runs: Sequence[Record], policy: str, copies: float) -> str:
    if policy in ("hydra", "pimoe"):
        return "it keeps one copy, so the budget changes nothing"
    bound = summary.binding([r for r in runs if r["budget_copies"] == copies], policy)
    return "" if bound is None else bound.sentence
