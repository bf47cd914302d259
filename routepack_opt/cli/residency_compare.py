"""``routepack residency compare``: policies on the same windows, next to the figures of the HCRMap paper."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import plural, print_json, table

if TYPE_CHECKING:
    from routepack_opt.residency.comparison.run import Comparison
    from routepack_opt.residency.comparison.summary import Line, Record

logger = logging.getLogger(__name__)

LEVELS = {"stage": ("stage",), "event": ("event",), "both": ("stage", "event")}

DESCRIPTION = """\
Run residency policies on the same windows of several models, from the same starting layout and
with the same replica budget, and set the result beside the figures of the HCRMap paper. With -o a
folder gets results.json, results.csv, a page to look at (index.html), and results.jsonl as runs
end: the next run with the same folder goes on where this one was stopped."""

EPILOG = """\
examples:
  routepack residency compare -o report/                     everything, minutes
  routepack residency compare --models deepseek-v2-lite,mixtral-8x7b --no-sweeps --windows 64
  routepack residency compare --policies static,fixed-our-map,look-ahead --package my.toml -o out/
  routepack residency compare --list-policies

The main table is simulated at stage level (the model of the bounds) and at event level; sweeps at
stage level, first seed. docs/residency.md explains tables, policies and defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of compare."""
    parser.usage = "routepack residency compare [-o FOLDER] [options]"
    parser.add_argument("-o", "--output", metavar="FOLDER", help="results and page go here; made when missing")
    parser.add_argument("--list-policies", action="store_true", help="the policies and which can run here")
    parser.add_argument("--package", default="paper", metavar="P", help="preset or TOML file; default paper")
    parser.add_argument("--models", type=_names, default=["all"], metavar="A,B", help="default all: the paper's eight")
    parser.add_argument("--phases", type=_names, default=["prefill", "decode"], metavar="A,B", help="default both")
    parser.add_argument("--policies", type=_names, default=["default"], metavar="A,B", help="names, default or all")
    parser.add_argument("--windows", type=integer(1), default=256, metavar="N", help="measured windows; default 256")
    parser.add_argument("--seeds", type=integer(1), default=1, metavar="N", help="workload seeds; default 1")
    parser.add_argument("--level", choices=tuple(LEVELS), default="both", help="of the main table; default both")
    sweeps = "ablation, copy budgets, capacities, cold start, no middle tier; default on"
    parser.add_argument("--sweeps", action=argparse.BooleanOptionalAction, default=True, help=sweeps)
    parser.add_argument("--bounds", type=integer(0), default=8, metavar="N", help="windows bounded; default 8")
    parser.add_argument("--data", metavar="FOLDER", help="recorded traces; default ROUTEPACK_DATA or ../shared/data")
    parser.add_argument("--jobs", type=integer(1), default=2, metavar="N", help="worker processes; default 2")


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def run(options: argparse.Namespace) -> int:
    """Run, write, print."""
    from routepack_opt.residency.comparison.run import run_comparison

    if options.list_policies:
        return _list(options)
    comparison = _comparison(options)
    folder = None if options.output is None else _output_folder(options.output)
    num_runs = sum(len(comparison.keys(case)) for case in comparison.cases())
    workloads = plural(len(comparison.cases()), "workload")
    logger.info("%s on %s; Ctrl-C keeps what is done", plural(num_runs, "run"), workloads)
    records: list[Record] = []
    started, begun = time.strftime("%Y-%m-%d %H:%M"), time.perf_counter()
    interrupted = False
    try:
        run_comparison(
            comparison,
            journal=None if folder is None else folder / "results.jsonl",
            jobs=options.jobs,
            records=records,
        )
    except KeyboardInterrupt:
        interrupted = True
    if records and all("error" in record for record in records):
        from routepack_opt.errors import InvalidInput

        raise InvalidInput(records[0]["error"])
    _report(options, comparison, records, folder, started, time.perf_counter() - begun)
    if interrupted:
        print(f"interrupted after {plural(len(records), 'run')} of {num_runs}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _list(options: argparse.Namespace) -> int:
    from routepack_opt.residency.control.policy_registry import REGISTRY

    entries = REGISTRY.values()
    if options.json:
        print_json([{"name": e.name, "group": e.group, "about": e.about, "missing": e.missing()} for e in entries])
        return 0
    print(table([["policy", "group", "missing"], *([e.name, e.group, e.missing() or ""] for e in entries)]))
    print("\n" + "\n".join(f"{e.name}: {e.about}" for e in entries))
    return 0


def _comparison(options: argparse.Namespace) -> Comparison:
    from routepack_opt.residency.comparison.case import checked_folder
    from routepack_opt.residency.comparison.run import Comparison
    from routepack_opt.residency.control.policy_registry import REGISTRY, default_policies
    from routepack_opt.residency.machine.moe_models import PAPER_MODELS

    policies: tuple[str, ...] = tuple(options.policies)
    if policies == ("default",):
        policies = default_policies()
    elif policies == ("all",):
        policies = tuple(name for name, entry in REGISTRY.items() if entry.missing() is None)
    return Comparison(
        package=options.package,
        models=PAPER_MODELS if options.models == ["all"] else tuple(options.models),
        phases=tuple(options.phases),
        policies=policies,
        windows=options.windows,
        seeds=options.seeds,
        levels=LEVELS[options.level],  # type: ignore[arg-type]
        sweeps=options.sweeps,
        bounds=options.bounds,
        data=checked_folder(options.data),
    )


def _output_folder(name: str) -> Path:
    from routepack_opt.errors import InvalidInput

    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.jsonl").touch()
    except OSError as error:
        raise InvalidInput(f"{name}: cannot be used as an output folder ({error.strerror or error})") from None
    return folder


def _report(
    options: argparse.Namespace,
    comparison: Comparison,
    records: list[Record],
    folder: Path | None,
    started: str,
    seconds: float,
) -> None:
    if folder is not None and records:
        from routepack_opt.report.residency import write_results

        write_results(folder, comparison, records, started=started, seconds=seconds)
    if options.json:
        print_json(_document(comparison, records, seconds))
        return
    _print_scopes(records)
    for level in comparison.levels:
        for phase in comparison.phases:
            _print_headline(records, phase, level)
    _print_figures(records)
    failed = [
        f"{r['model']} {r['phase']}, {r['table']} ({r['variation']}): {r['error']}" for r in records if "error" in r
    ]
    for line in dict.fromkeys(failed):
        print(f"not run: {line}")
    if folder is not None and records:
        print(f"wrote {folder / 'index.html'}, results.json and results.csv")


def _document(comparison: Comparison, records: list[Record], seconds: float) -> dict[str, Any]:
    from dataclasses import asdict

    from routepack_opt.residency.comparison.paper_figures import figures
    from routepack_opt.residency.comparison.summary import headline

    lines = {
        level: {phase: [asdict(line) for line in headline(records, phase, level)] for phase in comparison.phases}
        for level in comparison.levels
    }
    return {
        "package": comparison.machine.name, "models": list(comparison.models), "phases": list(comparison.phases),
        "policies": list(comparison.policies), "windows": comparison.windows, "seeds": comparison.seeds,
        "seconds": seconds, "headline": lines, "paper": [asdict(figure) for figure in figures(records)],
        "runs": records,
    }  # fmt: skip


def _print_scopes(records: list[Record]) -> None:
    from routepack_opt.residency.comparison.sweeps import MAIN

    for scope in dict.fromkeys(r["scope"] for r in records if r.get("table") == MAIN and "scope" in r):
        print(scope)
    print()


def _print_headline(records: list[Record], phase: str, level: str) -> None:
    from routepack_opt.residency.comparison.summary import headline

    lines = headline(records, phase, level)
    if lines:
        print(f"{phase}, {level} level: latency over that of ..., geometric means\n{table(headline_rows(lines))}\n")


def headline_rows(lines: list[Line]) -> list[list[str]]:
    """Header and one row a policy, as text."""
    bases = list(lines[0].against)
    rows = [["policy", *bases, "end to end", "energy", "EDP", "hits", "streamed GB", "copies", "above bound"]]
    for line in lines:
        rows.append(
            [
                line.policy,
                *(_ratio(line.against[base]) for base in bases),
                _ratio(line.end_to_end),
                _ratio(line.energy),
                _ratio(line.edp),
                f"{line.hit_rate:.1%}",
                f"{line.streamed_bytes / 1e9:.2f}",
                f"{line.copies:.0f}",
                "-" if line.above_bound is None else f"{line.above_bound:.1%}",
            ]
        )
    return rows


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_figures(records: list[Record]) -> None:
    from routepack_opt.residency.comparison.paper_figures import figures

    rows = [["figure of the paper", "phase", "paper", "ours", ""]]
    for figure in figures(records):
        if figure.ours is not None:
            verdict = "agrees" if figure.agrees else "differs"
            rows.append([figure.name, figure.phase, figure.show(figure.paper), figure.show(figure.ours), verdict])
    if len(rows) > 1:
        print(table(rows) + "\n")
