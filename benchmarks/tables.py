"""Markdown tables of the results, and their places in docs/benchmarks.md."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from routepack_opt.compare.summary import failures, figure_text, summarise, windows_of, without_repeats

if TYPE_CHECKING:
    from pathlib import Path

Facts = dict[str, Any]
Record = dict[str, Any]

# routepack.md section 8: what the paper reports, (tiny, flash)
PAPER = {
    "cv_identity": ("0.47", "0.29"),
    "cv_lpt": ("0.0019", "< 0.0001"),
    "peak_sum": ("-3.13%", "-3.24%"),
    "peak": ("-11.04%", "-11.62%"),
    "eta": ("0.891 -> 0.920", "0.844 -> 0.869"),
    "attention": ("+0.09%", "+0.77%"),
    "joint": ("-1.53%", "-1.35%"),
}


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of section ``name``; the rest of the page is kept."""
    begin, end = f"<!-- {name}: written by benchmarks/run.py -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    block = f"{begin}\n{text.strip()}\n{end}"
    if begin in page and end in page:
        head, rest = page.split(begin, 1)
        page = head + block + rest.split(end, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    path.write_text(page, encoding="utf-8")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def measured(facts: Facts) -> str:
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs, Python {facts['python']}, routepack-opt {facts['routepack']},"
        f" {facts['date']}: `{facts['command']}`"
    )


def compare_table(records: list[Record], facts: Facts) -> str:
    """One table a window: medians over seeds."""
    parts = [
        "## Methods compared",
        measured(facts) + ".",
        "Gap: slowest shard above the best lower bound known for any placement and layout with that many rows; median"
        " over seeds. Every layout was checked by the independent verifier. `lpt+anneal` is the paper's question"
        " (LPT placement kept) with our engine.",
    ]
    entries = summarise(records)
    for window in windows_of(entries):
        inside = [e for e in entries if e.window == window]
        rows = [
            [
                f"`{e.method}`", f"{e.budget_s:g}" if e.searches else "", f"{e.seconds:.2f}", str(e.rows),
                figure_text(e.score), f"{100 * e.gap:.2f}%", f"{e.eta_ep:.4f}", f"{e.peak:,.0f}", e.rows_status,
            ]
            for e in without_repeats(inside) if e.found
        ]  # fmt: skip
        header = ["method", "budget, s", "seconds", "rows", "slowest shard", "gap", "eta_EP", "peak", "rows status"]
        parts += [f"### {window}", markdown(header, rows)]
        parts += [f"`{method}`: {runs} without a layout ({reason})." for method, runs, reason in failures(inside)]
    return "\n\n".join(parts)


def paper_table(records: list[Record], facts: Facts) -> str:
    """The paper's figures beside ours, on presets of the same shape."""
    budget = records[0]["budget_s"]
    parts = [
        "## The paper's figures",
        measured(facts) + ".",
        f"Synthetic windows calibrated to the paper's published statistics (docs/synth.md), budget {budget:g} s, mean"
        " over the window seeds; changes are against LPT + FFD with as many rows. *Placement kept*: LPT, only samples"
        " move, as in the paper. *Co-refined*: `plan`. The paper does not publish layers, D, R or cost weights: only"
        " the shape of the comparison is the same.",
    ]
    for column, preset in enumerate(("tiny", "flash")):
        rows = _paper_rows([r for r in records if r["window"].split("/")[0] == preset], column)
        has_pipeline = any(r["method"] == "paper" for r in records)
        header = ["", "paper", *(["its pipeline, our code"] if has_pipeline else []), "placement kept", "co-refined"]
        parts += [f"### {preset.capitalize()}-shaped", markdown(header, rows)]
    return "\n\n".join(parts)


def _paper_rows(records: list[Record], column: int) -> list[list[str]]:
    by_method: dict[str, dict[str, Record]] = {}
    for record in records:
        if record["score"] is not None:
            by_method.setdefault(record["method"], {})[record["window"]] = record
    base = by_method["lpt+ffd"]
    shown = [name for name in ("paper", "lpt+anneal", "plan") if name in by_method]

    def pairs(name: str) -> list[tuple[Record, Record]]:
        return [(r, base[w]) for w, r in by_method[name].items() if w in base and r["rows"] == base[w]["rows"]]

    def change(name: str, figure: str) -> str:
        shares = [r["figures"][figure] / b["figures"][figure] - 1 for r, b in pairs(name) if b["figures"][figure]]
        return f"{100 * mean(shares):+.2f}%" if shares else "n/a"

    def eta(name: str) -> str:
        found = pairs(name)
        return (
            f"{mean(b['eta_ep'] for _, b in found):.3f} -> {mean(r['eta_ep'] for r, _ in found):.3f}"
            if found
            else "n/a"
        )

    def cv(name: str) -> str:
        return f"{mean(r['figures']['rank_cv'] for r in by_method[name].values()):.4f}"

    rows = [
        ["window rank CV, identity", PAPER["cv_identity"][column], *([cv("identity+ffd")] * len(shown))],
        ["window rank CV, placed", PAPER["cv_lpt"][column], *(cv(name) for name in shown)],
        ["eta_EP", PAPER["eta"][column], *(eta(name) for name in shown)],
    ]
    for title, key, figure in (
        ("sum of peaks", "peak_sum", "peak_sum"),
        ("largest peak", "peak", "peak"),
        ("sum of attention", "attention", "attention"),
        ("slowest shard (joint)", "joint", "slowest_shard"),
    ):
        rows.append([title, PAPER[key][column], *(change(name, figure) for name in shown)])
    gaps = [f"{100 * mean(r['best_gap'] for r in by_method[name].values()):.2f}%" for name in shown]
    rows.append(["above the best bound", "not published", *gaps])
    seconds = [f"{mean(r['seconds'] for r in by_method[name].values()):.2f} s" for name in shown]
    rows.append(["planning time", "not published", *seconds])
    return rows


def throughput_table(results: list[Record], facts: Facts) -> str:
    rows = [
        [r["window"], r["engine"], *(f"{r[k] / 1e6:.2f}" for k in ("proposals_per_s", "scored_per_s", "swaps_per_s"))]
        for r in results
    ]
    header = ["window", "engine", "proposals", "of them scored", "expert swaps"]
    return "\n\n".join(
        [
            "## Proposals per second",
            measured(facts) + ".",
            "Millions a second, best of 3 repeats, at the middle of the temperature range. A proposal that cannot be"
            " accepted even with perfect expert balance, or breaks the cap, is dropped before it is scored.",
            markdown(header, rows),
        ]
    )


def growth_table(results: list[Record], facts: Facts) -> str:
    from growth import BASE, STEPS

    base = ", ".join(f"{name} = {value}" for name, value in BASE.items())
    rows = [
        [
            f"{r['varied']} = {r[r['varied']]:,}", str(r["D"]), str(r["rows"]),
            f"{r['first_plan_s']:.3f}", f"{r['steps_s']:.3f}",
        ]
        for r in results
    ]  # fmt: skip
    header = ["size", "D", "rows", "first plan, s", f"after {STEPS:,} proposals a chain, s"]
    return "\n\n".join(
        [
            "## Growth of planning time",
            measured(facts) + ".",
            f"One size varied, the others {base}; synthetic windows of about four rows, cap 8192, D = P x G. Best of 2."
            " First plan: rows, placement, seeds, scoring and certificates, no search. Two chains run side by side.",
            markdown(header, rows),
            "![planning time against sizes](figures/growth.svg)",
        ]
    )


def growth_figure(results: list[Record]) -> str:
    """SVG: planning time against each size, relative to its smallest value."""
    from routepack_opt.report.figures import colours, finish, markers, new_axes, plain_numbers, to_svg

    names = list(dict.fromkeys(r["varied"] for r in results))
    colour, marker = colours(names), markers(names)
    ax = new_axes()
    for name in names:
        points = [r for r in results if r["varied"] == name]
        x = [r[name] / points[0][name] for r in points]
        ax.plot(x, [r["first_plan_s"] for r in points], marker=marker[name], color=colour[name], label=name)
        ax.plot(x, [r["steps_s"] for r in points], marker=marker[name], color=colour[name], ls=":", lw=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    plain_numbers(ax.xaxis, (1.0,), base=2)
    plain_numbers(ax.yaxis, (1.0, 2.0, 5.0))
    ax.legend(fontsize=8, frameon=False)
    finish(ax, "Planning time (dotted: with proposals)", "size, times its smallest value", "seconds")
    svg = to_svg(ax, "growth", "planning time against sizes")
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
