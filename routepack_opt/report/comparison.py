"""The page of ``routepack compare``: settings, tables, figures, and the records themselves."""

from __future__ import annotations

import logging
import os
import platform
from typing import TYPE_CHECKING, Any

from routepack_opt import __version__
from routepack_opt.compare.summary import failures, figure_text, summarise, windows_of, without_repeats
from routepack_opt.errors import MissingDependency
from routepack_opt.files import atomic_writer
from routepack_opt.report import html

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from routepack_opt.compare.experiment import Experiment, Record
    from routepack_opt.compare.summary import Entry

logger = logging.getLogger(__name__)

_KEPT = "placement kept"
_HEADER = ("method", "budget, s", "seconds", "rows", "slowest shard", "gap, %", "over seeds", _KEPT,
           "eta_EP", "attention", "experts", "peak sum", "peak", "rank CV", "rows status")  # fmt: skip
_LEGEND = (
    "gap: above the best bound for any placement; placement kept, where an exact solver proved one: above the best"
    " bound for the method's own placement; attention, experts: summed over rows and shards; peak sum: assignments of"
    " the fullest rank summed over rows and layers; peak: the largest rank load of one row and layer; rank CV: of the"
    " window's rank loads."
)


def write_page(path: Path, experiment: Experiment, records: list[Record], *, started: str = "") -> None:
    """Write the page atomically. Without matplotlib (extra ``report``) it has the tables only, and says so."""
    with atomic_writer(path, "w") as stream:
        stream.write(comparison_page(experiment, records, started=started))


def comparison_page(experiment: Experiment, records: list[Record], *, started: str = "") -> str:
    """The page as text; one file, nothing is loaded from elsewhere."""
    entries = summarise(records)
    body = [_intro(experiment, started), _methods(experiment)]
    with_figures = True
    for number, window in enumerate(windows_of(entries)):
        inside = [entry for entry in entries if entry.window == window]
        body.append(f"<h2>{html.text(window)}</h2>{_facts(experiment, window)}{_table(inside)}{_failures(inside)}")
        if with_figures:
            try:
                body.append(_figures(inside, f"w{number}"))
            except MissingDependency as error:
                logger.warning("the page has tables only: %s", error)
                body.append(f'<p class="soft">Without figures: {html.text(error)}.</p>')
                with_figures = False
    return html.page("RoutePack comparison", "\n".join(body), records)


def _intro(experiment: Experiment, started: str) -> str:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    budgets = ", ".join(f"{b:g} s" for b in experiment.budgets)
    seeds = ", ".join(map(str, experiment.seeds))
    facts = f"routepack-opt {__version__}, {platform.machine()}, {cpus} CPUs" + (f", {started}" if started else "")
    return (
        f'<p class="soft">{html.text(facts)}. Budgets {html.text(budgets)}; seeds {html.text(seeds)}.</p>'
        "<p>Every layout was scored by the exact evaluator and checked by the independent verifier. The gap is the"
        " slowest shard above the best lower bound that any method proved for the same window and number of rows;"
        " medians over seeds.</p>"
    )


def _methods(experiment: Experiment) -> str:
    rows = [[m.name, m.about] for m in experiment.methods]
    lines = "".join(f'<tr><td>{html.text(n)}</td><td class="note">{html.text(a)}</td></tr>' for n, a in rows)
    return f"<details><summary>Methods</summary><table>{lines}</table></details>"


def _facts(experiment: Experiment, window: str) -> str:
    case = next(c for c in experiment.cases if c.name == window)
    shape, topology = case.window, case.topology
    shards = "1 EDP shard" if topology.num_shards == 1 else f"{topology.num_shards} EDP shards"
    stages = ", ".join(f"{s.name} alpha {s.alpha:g} beta {s.beta:g}" for s in case.cost.stages)
    return (
        f'<p class="soft">{shape.num_samples:,} samples, {int(shape.lengths.sum()):,} tokens, {shape.num_layers} MoE'
        f" layers x {shape.num_experts} experts; {topology.dp} DP ranks, {shards} of"
        f" {topology.ep} EP ranks, token cap {case.token_cap:,}; cost {html.text(stages)}.</p>"
    )


def _table(entries: Sequence[Entry]) -> str:
    done = [e for e in without_repeats(entries) if e.found]
    kept = any(e.fixed_gap != e.gap for e in done)
    rows = [_cells(e, kept) for e in done]
    best = min(range(len(done)), key=lambda k: (done[k].rows, done[k].score), default=None)
    header = [name for name in _HEADER if kept or name != _KEPT]
    return html.table(header, rows, best) + f'<p class="soft">{html.text(_LEGEND)}</p>'


def _cells(e: Entry, kept: bool) -> list[str]:
    spread = "" if e.steady else f"{100 * e.low_gap:.2f}-{100 * e.high_gap:.2f}"
    return [
        e.method,
        f"{e.budget_s:g}",
        f"{e.seconds:.3f}",
        str(e.rows),
        figure_text(e.score),
        f"{100 * e.gap:.2f}",
        spread,
        *((f"{100 * e.fixed_gap:.2f}",) if kept else ()),
        f"{e.eta_ep:.4f}",
        figure_text(e.attention),
        figure_text(e.experts),
        f"{e.peak_sum:,.0f}",
        f"{e.peak:,.0f}",
        f"{e.rank_cv:.5f}",
        e.rows_status,
    ]


def _failures(entries: Sequence[Entry]) -> str:
    lines = [
        f"<li><b>{html.text(method)}</b>: {runs} without a layout: {html.text(reason)}</li>"
        for method, runs, reason in failures(entries)
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _figures(entries: Sequence[Entry], name: str) -> str:
    from routepack_opt.report import comparison_plots as plots
    from routepack_opt.report.figures import to_svg

    drawings: tuple[tuple[Callable[[Sequence[Entry]], Axes], str], ...] = (
        (plots.plot_gap_over_time, "One point a budget, joined for each method; the band spans the seeds."),
        (plots.plot_gap_by_method, "With the largest budget; the bar behind a dot spans the seeds."),
        (plots.plot_score_parts, "Mean shard, split; red is how far the slowest shard is behind the mean one."),
        (plots.plot_eta, "sum over rows and layers of the mean rank load, over that of the fullest."),
        (plots.plot_row_peaks, "Fullest EP rank of each row, summed over layers; first seed, largest budget."),
    )
    parts: list[Any] = []
    for draw, caption in drawings:
        label = draw.__name__.removeprefix("plot_").replace("_", " ")
        parts.append(html.figure(to_svg(draw(entries), f"{name}-{draw.__name__}", label), caption))
    return f'<div class="figures">{"".join(parts)}</div>'
