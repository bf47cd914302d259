"""Figures of the residency comparison, drawn from its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.report.figures import INK, SOFT, colours, finish, markers, new_axes
from routepack_opt.residency.comparison import paper_figures as paper
from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.sweeps import ABLATION, BUDGET, CAPACITY, COLD
from routepack_opt.residency.control.policy_registry import OURS, SIGNALS, STATIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

Record = dict[str, Any]
_PHASE_COLOURS = {"prefill": "#0072b2", "decode": "#e69f00"}
_STAGE_COLOURS = ("#7f7f7f", "#56b4e9", "#cc79a7", "#e69f00", "#0072b2", "#009e73", "#bcbd22")


def plot_latency(records: Sequence[Record], level: str) -> Axes:
    """Routed latency over static single copy, geometric mean over workloads, and the bound."""
    runs = summary.select(records, level=level)
    names, phases = summary.names(runs), _phases(runs)
    ax = new_axes(height=1.1 + 0.36 * max(len(names), 3))
    for k, phase in enumerate(phases):
        inside = [r for r in runs if r["phase"] == phase]
        base = summary.values(inside, STATIC)
        over = [summary.geometric(summary.values(inside, name), base) or 0.0 for name in names]
        y = np.arange(len(names)) + 0.4 * (k - 0.5 * (len(phases) - 1))
        ax.barh(y, over, height=0.36, color=_PHASE_COLOURS[phase], label=phase)
        for at, value in zip(y, over, strict=True):
            ax.annotate(f"{value:.3f}", (value, at), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        static, bound = summary.bound_values(records, inside, STATIC)
        limit = summary.geometric(bound, static)
        if limit is not None:
            ax.axvline(limit, color=_PHASE_COLOURS[phase], lw=1.2, ls="--", label=f"bound, {phase}")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.12 * max(1.0, ax.get_xlim()[1] / 1.05))
    if names:
        ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.12))
    return finish(ax, f"Routed latency over static, {level} level", "", grid="x")


def plot_stages(records: Sequence[Record], phase: str) -> Axes:
    """Where the routed time goes, static and ours, by model; memory and compute count where they bind."""
    runs = [r for r in summary.select(records, phase=phase, seed=0) if r["policy"] in (STATIC, OURS)]
    models = list(dict.fromkeys(r["model"] for r in runs))
    ax = new_axes(height=1.2 + 0.42 * max(len(models), 2))
    for r in runs:
        y = models.index(r["model"]) + (0.2 if r["policy"] == OURS else -0.2)
        stages = dict(zip(summary.STAGE_NAMES, r["stages"], strict=True))
        stages["memory"], stages["compute"] = r["binding_s"]
        base = next(s["routed_s"] for s in runs if s["model"] == r["model"])
        left = 0.0
        for (name, seconds), colour in zip(stages.items(), _STAGE_COLOURS, strict=True):
            ax.barh(y, seconds / base, left=left, height=0.36, color=colour, label=name if r is runs[0] else None)
            left += seconds / base
    ax.set_yticks(range(len(models)), models)
    ax.set_ylim(len(models) - 0.4, -0.6)
    if runs:
        ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.12))
    return finish(ax, f"Stages over static's total, {phase}: static above, ours below", "", grid="x")


def plot_budgets(records: Sequence[Record]) -> Axes:
    """Copy-budget sweep next to the paper's."""
    runs = summary.select(records, BUDGET)
    base = summary.values([r for r in runs if r["budget_copies"] == paper.COPIES[0]], "hydra")
    ax = new_axes(height=3.8)
    names = [*paper.COPY_BUDGETS, *(n for n in summary.names(runs) if n not in paper.COPY_BUDGETS)]
    colour, marker = colours(names), markers(names)
    for name in names:
        ours = summary.sweep(runs, name, "budget_copies", base)
        points = [(x, y) for x, y in ours.items() if y is not None]
        if points:
            ax.plot(*zip(*points, strict=True), color=colour[name], marker=marker[name], ms=4, lw=1.4, label=name)
        if name in paper.COPY_BUDGETS:
            ax.plot(paper.COPIES, paper.COPY_BUDGETS[name], color=colour[name], marker=marker[name], ms=3, lw=1, ls=":")
    if runs:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(ax, "Copy budget (dotted: paper)", "copies", "latency over hydra with one copy")


def plot_ablation(records: Sequence[Record]) -> Axes:
    """A pressure signal removed: latency over full, ours and the paper's."""
    ax = new_axes(height=3.4)
    for number, phase in enumerate(("prefill", "decode")):
        runs = summary.select(records, ABLATION, phase=phase)
        full = summary.values(runs, OURS)
        ours = [summary.geometric(summary.values(runs, f"{OURS}-no-{name}"), full) or 0.0 for name in SIGNALS]
        x = np.arange(len(SIGNALS)) + 0.42 * (number - 0.5)
        ax.bar(x - 0.1, ours, width=0.19, color=_PHASE_COLOURS[phase], label=f"{phase}, ours")
        papers = [paper.ABLATIONS[name][number] for name in SIGNALS]
        ax.bar(x + 0.1, papers, width=0.19, color=_PHASE_COLOURS[phase], alpha=0.35, label=f"{phase}, paper")
    ax.axhline(1.0, color=INK, lw=0.8)
    ax.set_xticks(range(len(SIGNALS)), [f"no {name}" for name in SIGNALS])
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(ax, "A pressure signal removed", "", "latency over full", grid="y")


def plot_capacities(records: Sequence[Record]) -> Axes:
    """Fast tiers of other sizes."""
    runs = summary.select(records, CAPACITY)
    base = summary.values([r for r in runs if r["fast_capacity"] == 1.0], STATIC)
    names = summary.names(runs)
    ax, colour, marker = new_axes(height=3.4), colours(names), markers(names)
    for name in names:
        points = [(x, y) for x, y in summary.sweep(runs, name, "fast_capacity", base).items() if y is not None]
        if points:
            ax.plot(*zip(*points, strict=True), color=colour[name], marker=marker[name], ms=4, lw=1.4, label=name)
    ax.set_xscale("log", base=2)
    values = sorted({r["fast_capacity"] for r in runs})
    ax.set_xticks(values, [f"{value:g}x" for value in values])
    ax.minorticks_off()
    if names:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(ax, "Capacity of the fast tiers", "times the package's", "latency over static at 1x")


def plot_cold_start(records: Sequence[Record]) -> Axes:
    """Windows after a cold start: routed latency over static, geometric mean over workloads, blocks of windows."""
    runs = summary.select(records, COLD)
    names = [name for name in summary.names(runs) if name != STATIC]
    base = {summary.workload_key(r): np.asarray(r["routed_by_window"]) for r in runs if r["policy"] == STATIC}
    ax, colour = new_axes(height=3.4), colours(names)
    for name in names:
        own = [r for r in runs if r["policy"] == name and summary.workload_key(r) in base]
        if not own:
            continue
        over = np.mean([np.log(np.asarray(r["routed_by_window"]) / base[summary.workload_key(r)]) for r in own], axis=0)
        width = max(1, len(over) // 32)
        blocks = over[: len(over) // width * width].reshape(-1, width).mean(axis=1)
        ax.plot((np.arange(len(blocks)) + 0.5) * width, np.exp(blocks), lw=1.4, color=colour[name], label=name)
    if names:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(ax, "Cold start", "window", "latency over static")


def plot_use(records: Sequence[Record], phase: str, field: str, labels: Sequence[str], what: str) -> Axes:
    """Heat map: utilisation of every chiplet, link or region, by model, static (before) above ours (after)."""
    runs = [r for r in summary.select(records, phase=phase, seed=0) if r["policy"] in (STATIC, OURS)]
    models = list(dict.fromkeys(r["model"] for r in runs))
    rows, names = [], []
    for model in models:
        for policy, word in ((STATIC, "before"), (OURS, "after")):
            found = [r[field] for r in runs if r["model"] == model and r["policy"] == policy]
            if found and len(found[0]) == len(labels):
                rows.append(found[0])
                names.append(f"{model} {word}")
    ax = new_axes(width=max(6.2, 1.6 + 0.13 * len(labels)), height=1.2 + 0.22 * max(len(rows), 4))
    if rows:
        edges = np.arange(len(labels) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
        mesh = ax.pcolormesh(*edges, np.asarray(rows), cmap="viridis", vmin=0.0, vmax=1.0)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.03, pad=0.01)
        if bar.solids is not None:
            bar.solids.set_rasterized(False)  # a page without bitmaps
        bar.ax.tick_params(labelsize=7.5, colors=SOFT, length=0)
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks(range(len(labels)), labels, rotation=90)
    finish(ax, f"{what}, {phase}", "", grid="y")
    ax.grid(False)
    ax.tick_params(axis="both", labelsize=6.5)
    return ax


def _phases(runs: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r["phase"] for r in sorted(runs, key=lambda r: r["phase"] != "prefill")))
