"""Figures of a comparison, one window each. Every function draws into ``ax`` (new ones when None) and returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.compare.summary import longest_budget, without_repeats
from routepack_opt.report.figures import INK, colours, finish, markers, new_axes, plain_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from routepack_opt.compare.summary import Entry


def _found(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.found]


def _by_method(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.method, []).append(entry)
    return groups


def plot_gap_over_time(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """Gap against seconds, one line a method, one point a budget; the band is least to largest over seeds."""
    ax = ax or new_axes()
    groups = _by_method(without_repeats(entries))
    colour, marker = colours(groups), markers(groups)
    for name, group in groups.items():
        points = sorted(_found(group), key=lambda e: e.budget_s)
        if not points:
            continue
        seconds = [max(e.seconds, 1e-4) for e in points]
        ax.plot(
            seconds, [100 * e.gap for e in points], marker=marker[name], color=colour[name], label=name, ms=4.5, lw=1.4
        )
        if len(points) > 1 and any(e.high_gap > e.low_gap for e in points):
            low, high = [100 * e.low_gap for e in points], [100 * e.high_gap for e in points]
            ax.fill_between(seconds, low, high, color=colour[name], alpha=0.15, lw=0)
    ax.set_xscale("log")
    plain_numbers(ax.xaxis)
    ax.set_ylim(bottom=0)
    finish(ax, "Gap over time", "seconds the method took", "above the best bound, %")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_gap_by_method(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """Gap of each method with its largest budget, least to largest over seeds; more rows than needed are named."""
    shown = _found(longest_budget(entries))
    fewest = min((e.rows for e in shown), default=0)

    def label(e: Entry) -> str:
        return f"{100 * e.gap:.2f}%" + (f"  ({e.rows} rows, {fewest} do)" if e.rows > fewest else "")

    colour = colours(e.method for e in entries)
    ax = _dots(shown, lambda e: 100 * e.gap, label, colour, ax, lambda e: (100 * e.low_gap, 100 * e.high_gap))
    ax.set_xlim(left=0)
    return finish(ax, "Gap by method", "above the best bound, %", grid="x")


def plot_eta(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """EP efficiency of each method with its largest budget; 1 is perfect balance."""
    colour = colours(e.method for e in entries)
    ax = _dots(_found(longest_budget(entries)), lambda e: e.eta_ep, lambda e: f"{e.eta_ep:.3f}", colour, ax)
    ax.set_xlim(right=1.0)
    return finish(ax, "EP efficiency eta_EP", "mean rank load over fullest rank load (1 is perfect)", grid="x")


def _dots(
    shown: Sequence[Entry],
    value: Callable[[Entry], float],
    label: Callable[[Entry], str],
    colour: dict[str, str],
    ax: Axes | None,
    spread: Callable[[Entry], tuple[float, float]] | None = None,
) -> Axes:
    """One line a method, a dot at its value, named by ``label``."""
    ax = ax or new_axes(height=0.9 + 0.27 * max(len(shown), 4))
    for y, entry in enumerate(shown):
        if spread is not None:
            ax.plot(spread(entry), (y, y), color=colour[entry.method], lw=2.2, alpha=0.4, solid_capstyle="round")
        ax.plot(value(entry), y, "o", color=colour[entry.method], ms=6)
        at = value(entry) if spread is None else spread(entry)[1]
        ax.annotate(label(entry), (at, y), (7, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(shown)), [e.method for e in shown])
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.margins(x=0.28)
    return ax


def plot_score_parts(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """Slowest shard = mean attention of a shard + mean experts of a shard + what the slowest is behind the mean."""
    shown = _found(longest_budget(entries))
    ax = ax or new_axes(height=1.2 + 0.27 * max(len(shown), 4))
    for y, e in enumerate(shown):
        attention, experts = e.attention / e.num_shards, e.experts / e.num_shards
        parts = (
            (attention, "#56b4e9", "attention"),
            (experts, "#e69f00", "experts"),
            (max(e.score - attention - experts, 0.0), "#b2182b", "uneven shards"),
        )
        left = 0.0
        for width, colour, name in parts:
            ax.barh(y, width, left=left, height=0.62, color=colour, label=name if y == 0 else None)
            left += width
        ax.annotate(
            f"{e.score:,.0f}", (e.score, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    if shown:
        bound = max(e.bound for e in shown)
        ax.axvline(bound, color=INK, lw=1, ls="--", label=f"best bound {bound:,.0f}")
        ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.22))
        ax.set_xlim(0, 1.12 * max(e.score for e in shown))
    ax.set_yticks(range(len(shown)), [e.method for e in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    return finish(ax, "Score parts", "cost, in units of the score", grid="x")


def plot_row_peaks(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """Assignments of the fullest EP rank summed over layers, row by row, heaviest row first."""
    shown = _found(longest_budget(entries))
    ax = ax or new_axes()
    colour, marker = colours(e.method for e in entries), markers(e.method for e in entries)
    for e in shown:
        peaks = sorted((peak / 1e3 for peak in e.row_peaks), reverse=True)
        size = 4.5 if len(peaks) <= 40 else 0
        x = range(1, len(peaks) + 1)
        ax.plot(x, peaks, marker=marker[e.method], ms=size, lw=1.3, color=colour[e.method], label=e.method)
    ax.locator_params(axis="x", integer=True)
    finish(ax, "Row peaks", "row, heaviest first", "thousand assignments", grid="y")
    if shown:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
