"""Medians over seeds of every window, method and budget: what tables and figures show."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Entry:
    """Results of one method with one budget on one window.

    Attributes
    ----------
    method, budget_s, num_runs, num_failed
        What was run, over how many seeds, and how many of them gave no sound layout.
    rows
        Most rows over the seeds.
    score, gap, low_gap, high_gap
        Median slowest shard; gap to the best bound known: median, least and largest.
    fixed_gap
        Median gap to the best bound known for the method's own placement.
    eta_ep, seconds, attention, experts, peak_sum, peak, rank_cv
        Medians, see :class:`routepack_opt.report.gains.LayoutFigures`.
    rows_status
        Of the first seed.
    row_peaks
        Of the first seed, see :mod:`.judge`.
    error
        The first error, empty without one.
    """

    window: str
    method: str
    budget_s: float
    num_runs: int
    num_failed: int
    rows: int
    rows_status: str
    score: float
    bound: float
    gap: float
    low_gap: float
    high_gap: float
    fixed_gap: float
    eta_ep: float
    seconds: float
    attention: float
    experts: float
    peak_sum: float
    peak: float
    rank_cv: float
    proposals_per_s: float
    row_peaks: tuple[int, ...]
    num_shards: int
    searches: bool
    error: str

    @property
    def steady(self) -> bool:
        """Whether all seeds gave equally good layouts."""
        return self.found and self.num_failed == 0 and self.low_gap == self.high_gap

    @property
    def found(self) -> bool:
        """Whether any seed gave a layout."""
        return self.num_failed < self.num_runs


def summarise(records: Sequence[dict[str, Any]]) -> list[Entry]:
    """One entry per window, method and budget, in the order of the records."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["window"], record["method"], record["budget_s"]), []).append(record)
    return [_entry(*key, group) for key, group in groups.items()]


def without_repeats(entries: Iterable[Entry]) -> list[Entry]:
    """Methods that do not search once, where budgets and seeds change nothing."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.window, entry.method), []).append(entry)
    kept = []
    for group in groups.values():
        same = len({(e.score, e.rows, e.low_gap, e.high_gap) for e in group}) == 1
        kept += group[:1] if same and not group[0].searches else group
    return kept


def failures(entries: Iterable[Entry]) -> list[tuple[str, str, str]]:
    """(method, such as "2 of 6 runs", first reason) of every method that failed, budgets together; of one window."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.method, []).append(entry)
    result = []
    for method, group in groups.items():
        failed = sum(e.num_failed for e in group)
        if failed:
            reason = next(e.error for e in group if e.error)
            result.append((method, f"{failed} of {sum(e.num_runs for e in group)} runs", reason))
    return result


def windows_of(entries: Iterable[Entry]) -> list[str]:
    """Window names in order."""
    return list(dict.fromkeys(entry.window for entry in entries))


def longest_budget(entries: Iterable[Entry]) -> list[Entry]:
    """The entry of each method with its largest budget, in order; of one window."""
    last: dict[str, Entry] = {}
    for entry in entries:
        if entry.method not in last or entry.budget_s >= last[entry.method].budget_s:
            last[entry.method] = entry
    return list(last.values())


def figure_text(value: float) -> str:
    """A figure of the score for a table: five digits at least, thousands set apart."""
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"


def _entry(window: str, method: str, budget_s: float, group: list[dict[str, Any]]) -> Entry:
    done = [record for record in group if record["score"] is not None]
    errors = [record["error"] for record in group if record["score"] is None]

    def middle(values: Iterable[float]) -> float:
        listed = list(values)
        return float(median(listed)) if listed else 0.0

    def figure(name: str) -> float:
        return middle(record["figures"][name] for record in done)

    gaps = [record["best_gap"] for record in done] or [0.0]
    return Entry(
        window=window,
        method=method,
        budget_s=budget_s,
        num_runs=len(group),
        num_failed=len(errors),
        rows=max((record["rows"] for record in done), default=0),
        rows_status=done[0]["rows_status"] if done else "",
        score=middle(record["score"][0] for record in done),
        bound=max((record["best_bound"] for record in done), default=0.0),
        gap=middle(gaps),
        low_gap=min(gaps),
        high_gap=max(gaps),
        fixed_gap=middle(record["fixed_gap"] for record in done),
        eta_ep=middle(record["eta_ep"] for record in done),
        seconds=middle(record["seconds"] for record in group),
        attention=figure("attention"),
        experts=figure("experts"),
        peak_sum=figure("peak_sum"),
        peak=figure("peak"),
        rank_cv=figure("rank_cv"),
        proposals_per_s=middle(r["proposals"] / r["seconds"] for r in done if r["seconds"] > 0),
        row_peaks=tuple(done[0]["row_peaks"]) if done else (),
        num_shards=done[0]["num_shards"] if done else 1,
        searches=group[0]["searches"],
        error=errors[0] if errors else "",
    )
