"""Sentences of the residency page: what the comparison found, and every default behind it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.paper_figures import order_sentence
from routepack_opt.residency.control.policy_registry import OURS, REGISTRY, STATIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.residency.comparison.paper_figures import Figure
    from routepack_opt.residency.comparison.run import Comparison

Record = dict[str, Any]
_SHOWN_BASES = (STATIC, "hydra", "moentwine", "pimoe", summary.STRONGEST)


def findings(comparison: Comparison, records: Sequence[Record], shown: Sequence[Figure]) -> list[str]:
    """What to know before reading on; derived from the records."""
    lines = []
    for phase in comparison.phases:
        runs = summary.complete(summary.select(records, level=comparison.levels[0], phase=phase))
        below = [(base, summary.reduction(runs, base)) for base in _SHOWN_BASES]
        text = ", ".join(f"{value:.1%} below {base}" for base, value in below if value is not None)
        if not text:
            continue
        whole = summary.reduction(runs, STATIC, "end_to_end_s")
        total = "" if whole is None else f"; end to end {whole:.1%} below {STATIC}"
        above = summary.above_bound(records, runs, OURS)
        bound = "" if above is None else f"; {above:.1%} above the bound"
        lines.append(f"{phase}: {OURS} is, in routed latency, {text}{total}{bound}.")
        found = summary.binding(runs, OURS)
        if found is not None:
            lines.append(f"{phase}: with {OURS}, {found.sentence}.")
        lines += _worse_than_static(runs, phase)
    order = order_sentence(records)
    lines += [] if order is None else [order]
    counted = [figure for figure in shown if figure.ours is not None]
    agree = sum(figure.agrees for figure in counted)
    lines.append(f"{agree} of the paper's {len(counted)} figures that were run agree within five points or 0.05.")
    real = sorted({r["model"] for r in records if r.get("workload") == "real"})
    lines.append(f"Recorded routes: {', '.join(real) or 'none'}; all other workloads are synthetic.")
    return lines


def _worse_than_static(runs: Sequence[Record], phase: str) -> list[str]:
    base = summary.values(runs, STATIC)
    ratios = [(name, summary.geometric(summary.values(runs, name), base)) for name in summary.names(runs)]
    worse = [f"{name} ({ratio:.3f})" for name, ratio in ratios if ratio is not None and ratio > 1.0005]
    return [f"{phase}: slower than {STATIC} on average: {', '.join(worse)}."] if worse else []


def defaults_of(comparison: Comparison) -> list[tuple[str, str]]:
    """(name, text) of every setting: the comparison's, the generator's, the policies' parameters."""
    from routepack_opt.residency.control.hotness import KEEP
    from routepack_opt.residency.traces.generator import CALIBRATIONS, DEFAULT_CONFIG
    from routepack_opt.residency.traces.windows import PROFILE_SHARE, WINDOW_TOKENS

    tokens = ", ".join(f"{phase} {count}" for phase, count in WINDOW_TOKENS.items())
    rows = [
        (
            "windows",
            f"{comparison.windows} measured; tokens of a window: {tokens}; profile: the first {PROFILE_SHARE:.0%}",
        ),
        ("running means", f"new = {KEEP:g} old + {1 - KEEP:g} now"),
        ("bounds", f"{comparison.bounds} windows of each workload, spread evenly"),
        ("generator", _fields(DEFAULT_CONFIG)),
    ]
    for model in comparison.models:
        if model in CALIBRATIONS:
            rows.append((f"calibration of {model}", _fields(CALIBRATIONS[model])))
    for name in comparison.policies:
        entry = REGISTRY[name]
        if entry.missing() is None:
            rows.append((f"policy {name}", f"{entry.about}; {_fields(entry.make())}"))
    return rows


def _fields(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return ""
    listed = (f for f in dataclasses.fields(value) if f.repr and not f.name.startswith("_"))
    return ", ".join(f"{f.name} {_short(getattr(value, f.name))}" for f in listed if f.name not in ("name", "windows"))


def _short(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"({_fields(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
