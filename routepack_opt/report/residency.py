"""The page, JSON and CSV of ``routepack residency compare``."""

from __future__ import annotations

import csv
import logging
import os
import platform
from typing import TYPE_CHECKING, Any

from routepack_opt import __version__
from routepack_opt.errors import MissingDependency
from routepack_opt.files import atomic_writer, write_json
from routepack_opt.report import html
from routepack_opt.report.residency_text import defaults_of, findings
from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.paper_figures import Figure, figures
from routepack_opt.residency.comparison.sweeps import ABLATION, BUDGET, CAPACITY, COLD, MAIN
from routepack_opt.residency.control.policy_registry import OURS, STATIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from routepack_opt.residency.comparison.run import Comparison

logger = logging.getLogger(__name__)

Record = dict[str, Any]
_LISTS = ("stages", "streamed_bytes", "reads", "pressures", "tier_use")
_SKIPPED = ("key", "routed_by_window", "chiplet_use", "link_use", "region_use", "region_tier", "tiers", "token_reads")


def write_results(
    folder: Path, comparison: Comparison, records: list[Record], *, started: str = "", seconds: float = 0.0
) -> None:
    """results.json, results.csv and index.html; without matplotlib the page has tables only, and says so."""
    write_json(folder / "results.json", records, indent=None)
    with atomic_writer(folder / "results.csv", "w") as stream:
        _write_csv(stream, records)
    with atomic_writer(folder / "index.html", "w") as stream:
        stream.write(residency_page(comparison, records, started=started, seconds=seconds))


def _write_csv(stream: Any, records: Sequence[Record]) -> None:
    rows = []
    for record in (r for r in records if r.get("table") != "bound"):
        row = {k: v for k, v in record.items() if k not in _SKIPPED and not isinstance(v, list)}
        for name in _LISTS:
            labels: Sequence[Any] = range(len(record.get(name, ())))
            if name == "stages":
                labels = summary.STAGE_NAMES
            elif name != "pressures" and name in record:
                labels = record["tiers"]
            row |= {f"{name}_{label}": value for label, value in zip(labels, record.get(name, ()), strict=False)}
        rows.append(row)
    header = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(stream, header)
    writer.writeheader()
    writer.writerows(rows)


def residency_page(comparison: Comparison, records: list[Record], *, started: str = "", seconds: float = 0.0) -> str:
    """The page as text; one file, nothing is loaded from elsewhere."""
    shown = figures(records)
    body = [
        _intro(comparison, started, seconds),
        _list("In short", findings(comparison, records, shown)),
        _scopes(records),
        _headlines(comparison, records),
        _paper(shown, comparison.machine.name),
        _drawings(comparison, records),
        _sweeps(comparison, records),
        _workloads(comparison, records),
        _failures(records),
        _defaults(comparison),
    ]
    data = {"headline": _data(comparison, records), "paper": [vars(figure) for figure in shown]}
    return html.page("Hot-expert residency: comparison", "\n".join(body), data)


def _intro(comparison: Comparison, started: str, seconds: float) -> str:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = f"routepack-opt {__version__}, {platform.machine()}, {cpus} CPUs"
    facts += f", {started}" if started else ""
    facts += f", {seconds:.0f} s" if seconds else ""
    seeds = "1 seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds"
    return (
        f'<p class="soft">{html.text(facts)}.</p><p>Package {html.text(comparison.machine.name)}; '
        f"{len(comparison.models)} models, {html.text(' and '.join(comparison.phases))}, {seeds}, {comparison.windows} "
        "measured windows each after the profile, a ninth as many. All policies start from the same popularity layout "
        "(single-copy ones from its primaries), see the same after every window, and copy under the same throttle. "
        "Every figure is simulated. Routed: the routed experts alone; end to end: with attention, shared experts and "
        "dense layers, the same for every policy.</p>"
    )


def _list(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{html.text(title)}</h2><ul>{''.join(f'<li>{html.text(line)}</li>' for line in lines)}</ul>"


def _scopes(records: Sequence[Record]) -> str:
    found: dict[str, None] = {}
    for r in records:
        if r.get("table") == MAIN and "scope" in r:
            kind = "Recorded routes" if r["workload"] == "real" else "Synthetic routes"
            found[f"{r['scope']} {kind} ({r['phase']}): {r['note']}."] = None
    return _list("Scope and traces", list(found))


def _headlines(comparison: Comparison, records: Sequence[Record]) -> str:
    parts = ["<h2>Policies</h2>"]
    for level in comparison.levels:
        for phase in comparison.phases:
            lines = summary.headline(records, phase, level)
            if lines:
                parts.append(f"<h3>{phase}, {level} level</h3>{_headline(lines)}")
    parts.append(
        '<p class="soft">Routed latency over that of the policy in the column head, then totals over static: '
        "geometric means over workloads. strongest fixed: the best fixed-replica policy of each workload. Hits: "
        "replica reads (and token assignments) that a tier faster than the slowest served. Above bound: routed time "
        "over a proved lower bound for every layout and assignment, on the windows that have one.</p>"
    )
    return "".join(parts)


def _headline(lines: Sequence[summary.Line]) -> str:
    bases = list(lines[0].against)
    header = ["policy", *(f"/ {base}" for base in bases), "end to end", "energy", "EDP", "hits", "token hits",
              "streamed, GB", "copied, GB", "copies", "above bound"]  # fmt: skip
    rows = [
        [
            line.policy,
            *(_ratio(line.against[base]) for base in bases),
            *(_ratio(value) for value in (line.end_to_end, line.energy, line.edp)),
            f"{line.hit_rate:.1%}",
            f"{line.token_hit_rate:.1%}",
            f"{line.streamed_bytes / 1e9:.3f}",
            f"{line.migrated_bytes / 1e9:.4f}",
            f"{line.copies:.0f}",
            "-" if line.above_bound is None else f"{line.above_bound:.1%}",
        ]
        for line in lines
    ]
    ours = next((k for k, line in enumerate(lines) if line.policy == OURS), None)
    return html.table(header, rows, ours)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _paper(shown: Sequence[Figure], package: str) -> str:
    rows = "".join(
        f"<tr><td>{html.text(f.name)}</td><td>{html.text(f.phase)}</td><td>{f.show(f.paper)}</td>"
        f'<td>{f.show(f.ours)}</td><td class="note">{html.text(f.sentence)}</td></tr>'
        for f in shown
    )
    other = "" if package == "paper" else f"This is another machine ({html.text(package)}) than the paper's. "
    head = "".join(f"<th>{name}</th>" for name in ("figure", "phase", "paper", "ours", ""))
    return (
        "<h2>Figures of the paper (arXiv 2607.11586) and ours</h2>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="soft">{other}The paper simulated its own traces on its own simulator, with settings it does '
        "not give; ablation and budget figures are read off plots, to 0.01.</p>"
    )


def _drawings(comparison: Comparison, records: Sequence[Record]) -> str:
    try:
        from routepack_opt.report import residency_plots as plots
        from routepack_opt.report.figures import to_svg

        drawn: list[tuple[Axes, str, str]] = [
            (plots.plot_latency(records, level), f"latency-{level}", "Dashed: no layout is below it.")
            for level in comparison.levels
        ]
        drawn += [
            (
                plots.plot_stages(records, phase),
                f"stages-{phase}",
                "Of memory and compute, the longer one of each layer.",
            )
            for phase in comparison.phases
        ]
        if comparison.sweeps:
            drawn += [
                (plots.plot_budgets(records), "budgets", "Both phases, all models."),
                (plots.plot_ablation(records), "ablation", "Above 1: the signal helps."),
                (plots.plot_capacities(records), "capacities", "All tiers but the slowest grow by the factor."),
                (plots.plot_cold_start(records), "cold", "From one copy of each expert, placed without a profile."),
            ]
        drawn += _heat_maps(comparison, records)
    except MissingDependency as error:
        logger.warning("the page has tables only: %s", error)
        return f'<p class="soft">Without figures: {html.text(error)}.</p>'
    pictures = "".join(html.figure(to_svg(ax, name, name), caption) for ax, name, caption in drawn)
    return f'<h2>Figures</h2><div class="figures">{pictures}</div>'


def _heat_maps(comparison: Comparison, records: Sequence[Record]) -> list[tuple[Axes, str, str]]:
    from routepack_opt.report import residency_plots as plots
    from routepack_opt.residency.machine.hardware import Hardware

    hardware = Hardware.from_package(comparison.machine)
    regions = [
        f"{hardware.tier_names[tier]} {node if node < hardware.num_chiplets else hardware.node_names[node]}"
        for tier, node in zip(hardware.region_tier, hardware.region_node, strict=True)
    ]
    kinds: list[tuple[str, list[str], str]] = [
        ("chiplet_use", [f"c{k}" for k in range(hardware.num_chiplets)], "Chiplet load"),
        ("region_use", regions, "Bank use"),
        ("link_use", [hardware.link_name(k) for k in range(hardware.num_links)], "Link use"),
    ]
    caption = "Service time as a share of the window, last quarter of the windows; before: static, after: ours."
    return [
        (plots.plot_use(records, phase, field, labels, what), f"{field}-{phase}", caption)
        for phase in comparison.phases
        for field, labels, what in kinds
    ]


def _sweeps(comparison: Comparison, records: Sequence[Record]) -> str:
    parts = []
    for table, field, title, base in (
        (BUDGET, "budget_copies", "Copy budget: routed latency over hydra with one copy", "hydra"),
        (CAPACITY, "fast_capacity", "Fast tiers' capacity: routed latency over static at 1x", STATIC),
    ):
        for phase in comparison.phases:
            runs = summary.select(records, table, phase=phase)
            if runs:
                parts.append(f"<h3>{title}, {phase}</h3>{_sweep(runs, field, base)}")
    for table, title, base in ((ABLATION, "Ablation: routed latency over full", OURS),
                               (COLD, "Cold start: routed latency over static", STATIC)):  # fmt: skip
        for phase in comparison.phases:
            runs = summary.select(records, table, phase=phase)
            if runs:
                under = summary.values(runs, base)
                rows = [
                    [n, _ratio(summary.geometric(summary.values(runs, n), under)),
                     _ratio(summary.geometric(summary.values(runs, n, "end_to_end_s"),
                                              summary.values(runs, base, "end_to_end_s")))]
                    for n in summary.names(runs)
                ]  # fmt: skip
                parts.append(f"<h3>{title}, {phase}</h3>{html.table(['policy', 'routed', 'end to end'], rows)}")
    return f"<h2>Sweeps</h2>{''.join(parts)}" if parts else ""


def _sweep(runs: Sequence[Record], field: str, base: str) -> str:
    at = sorted({r[field] for r in runs})
    under = summary.values([r for r in runs if r[field] == (1.0 if 1.0 in at else at[0])], base)
    rows = []
    for name in summary.names(runs):
        found = summary.sweep(runs, name, field, under)
        rows.append([name, *(_ratio(found[value]) for value in at)])
    return html.table(["policy", *(f"{value:g}x" for value in at)], rows)


def _workloads(comparison: Comparison, records: Sequence[Record]) -> str:
    header = ["policy", "routed, ms", "end to end, ms", *(f"{name}, ms" for name in summary.STAGE_NAMES), "energy, J",
              "EDP, mJ s", "hits", "token hits", "streamed, GB", "copied, GB", "copies", "evicted", "deferred",
              "decision, ms"]  # fmt: skip
    parts = ["<h2>Every workload, stage level</h2>", '<p class="soft">Means a window; copies, evictions and deferred '
             "copies in all. Memory and compute overlap: the longer one of each layer counts.</p>"]  # fmt: skip
    for model in comparison.models:
        for phase in comparison.phases:
            for seed in range(comparison.seeds):
                runs = summary.select(records, level=comparison.levels[0], model=model, phase=phase, seed=seed)
                if runs:
                    name = f"{model}, {phase}" + (f", seed {seed}" if comparison.seeds > 1 else "")
                    rows = [_cells(r) for r in runs]
                    parts.append(f"<details><summary>{name}</summary>{html.table(header, rows)}</details>")
    return "".join(parts)


def _cells(r: Record) -> list[str]:
    return [
        r["policy"],
        f"{1e3 * r['routed_s']:.3f}",
        f"{1e3 * r['end_to_end_s']:.3f}",
        *(f"{1e3 * seconds:.3f}" for seconds in r["stages"]),
        f"{r['energy_j']:.4g}",
        f"{1e3 * r['edp']:.4g}",
        f"{r['read_hit_rate']:.1%}",
        f"{r['token_hit_rate']:.1%}",
        f"{sum(r['streamed_bytes']) / 1e9:.3f}",
        f"{r['migrated_bytes'] / 1e9:.4f}",
        str(r["copies"]),
        str(r["evictions"]),
        str(r["deferred"]),
        f"{1e3 * r['decide_s'][0]:.3f}",
    ]


def _failures(records: Sequence[Record]) -> str:
    lines = dict.fromkeys(
        f"{r['model']} {r['phase']}, {r['table']} ({r['variation']}): {r['error']}" for r in records if "error" in r
    )
    return _list("Not run", list(lines)) if lines else ""


def _defaults(comparison: Comparison) -> str:
    rows = "".join(
        f'<tr><td>{html.text(name)}</td><td class="note">{html.text(text)}</td></tr>'
        for name, text in defaults_of(comparison)
    )
    machine = html.text(comparison.machine.describe())
    return (
        f"<h2>Settings and defaults</h2><table>{rows}</table>"
        f'<h3>Machine</h3><pre class="soft" style="white-space: pre-wrap">{machine}</pre>'
    )


def _data(comparison: Comparison, records: Sequence[Record]) -> dict[str, Any]:
    drawn: Callable[[str, str], list[Any]] = lambda phase, level: [  # noqa: E731
        vars(line) for line in summary.headline(records, phase, level)
    ]
    return {level: {phase: drawn(phase, level) for phase in comparison.phases} for level in comparison.levels}
