"""All benchmarks in one command: results under a folder, tables into docs/benchmarks.md.

    python benchmarks/run.py                       everything, about ten minutes on two cores
    python benchmarks/run.py --quick               a small part of it, to see that it runs (docs are left alone)
    python benchmarks/run.py --sections compare --workloads flash,real-grpo --budgets 0.3,1,3

An interrupted run goes on where it stopped (OUT/results.jsonl); remove OUT to measure anew.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import tables
from growth import growth
from registry import WORKLOADS, make_cases, synthetic
from throughput import cpu_throughput

from routepack_opt import __version__
from routepack_opt.compare.experiment import Experiment, run_experiment
from routepack_opt.compare.external import TABLE
from routepack_opt.compare.methods import available
from routepack_opt.errors import MissingDependency
from routepack_opt.files import write_json

SECTIONS = ("compare", "paper", "throughput", "growth")
METHODS = ("identity+ffd", "lpt+ffd", "lpt+kk", "paper", "lpt+anneal", "plan-fixed", "plan", "plan-cuda")
PAPER_METHODS = ("identity+ffd", "lpt+ffd", "paper", "lpt+anneal", "plan")
DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
QUICK_GROWTH = {"N": (128, 512), "P": (4, 8)}


def machine() -> dict[str, Any]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cpus": cpus,
        "python": platform.python_version(),
        "routepack": __version__,
        "date": datetime.date.today().isoformat(),
    }


def methods(names: tuple[str, ...]) -> list[Any]:
    """Those that can run here, and whatever other packages offer here."""
    known = available()
    wanted = [*names, *(external.name for external in TABLE)]
    return [known[name] for name in wanted if name in known]


def compare_section(options: argparse.Namespace) -> list[dict[str, Any]]:
    from routepack_opt.report.comparison import write_page

    cases = make_cases(options.workloads)
    experiment = Experiment(cases, methods(METHODS), options.budgets, options.seeds)
    print(f"compare: {experiment.num_runs} runs, about {experiment.search_s:.0f} s of search", flush=True)
    records = run_experiment(experiment, journal=options.out / "results.jsonl")
    write_json(options.out / "compare.json", records)
    write_page(options.out / "index.html", experiment, records, started=machine()["date"])
    return records


def paper_section(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [synthetic(name, seed) for name in ("tiny", "flash") for seed in options.window_seeds]
    experiment = Experiment(cases, methods(PAPER_METHODS), [options.paper_budget], [0])
    print(f"paper: {experiment.num_runs} runs, about {experiment.search_s:.0f} s of search", flush=True)
    records = run_experiment(experiment, journal=options.out / "paper.jsonl")
    write_json(options.out / "paper.json", records)
    return records


def throughput_section(options: argparse.Namespace) -> list[dict[str, Any]]:
    print("throughput", flush=True)
    results = [cpu_throughput(case) for case in make_cases(options.workloads)]
    write_json(options.out / "throughput.json", results)
    return results


def growth_section(options: argparse.Namespace) -> list[dict[str, Any]]:
    print("growth", flush=True)
    results = growth(1, QUICK_GROWTH) if options.quick else growth(2)
    write_json(options.out / "growth.json", results)
    figure = options.docs.parent / "figures" / "growth.svg"
    try:
        svg = tables.growth_figure(results)
    except MissingDependency as error:
        print(f"no figure: {error}", flush=True)
    else:
        figure.parent.mkdir(exist_ok=True)
        figure.write_text(svg, encoding="utf-8")
    return results


def parse(arguments: list[str]) -> argparse.Namespace:
    def split(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def numbers(text: str) -> list[float]:
        return [float(part) for part in split(text)]

    def integers(text: str) -> list[int]:
        return [int(part) for part in split(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of results; default bench-out")
    parser.add_argument("--docs", type=Path, default=DOCS, help="page to write the tables into")
    parser.add_argument("--sections", type=split, default=list(SECTIONS), help=f"default {','.join(SECTIONS)}")
    parser.add_argument("--workloads", type=split, default=list(WORKLOADS), help=f"default {','.join(WORKLOADS)}")
    parser.add_argument("--budgets", type=numbers, default=[0.3, 1.0, 3.0], help="seconds; default 0.3,1,3")
    parser.add_argument("--seeds", type=integers, default=[0, 1], help="of the methods; default 0,1")
    parser.add_argument("--window-seeds", type=integers, default=[0, 1, 2, 3], help="of section paper; default 0,1,2,3")
    parser.add_argument("--paper-budget", type=float, default=1.0, help="seconds a run of section paper; default 1")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.workloads, options.budgets, options.seeds = ["tiny"], [0.1], [0]
        options.window_seeds, options.paper_budget = [0], 0.2
        options.docs = options.out / "benchmarks.md" if options.docs == DOCS else options.docs
    return options


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {**machine(), "command": shlex.join(["python", "benchmarks/run.py", *arguments])}
    write_json(options.out / "machine.json", facts)
    makers = {
        "compare": (compare_section, tables.compare_table),
        "paper": (paper_section, tables.paper_table),
        "throughput": (throughput_section, tables.throughput_table),
        "growth": (growth_section, tables.growth_table),
    }
    for name in options.sections:
        measure, render = makers[name]
        text = render(measure(options), facts)
        tables.replace_section(options.docs, name, text)
        print(text, flush=True)
    print(f"wrote {options.docs}; results and page in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
