"""``routepack compare``: the same windows under different methods, budgets and seeds."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import plural, print_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.compare.case import Case
    from routepack_opt.compare.experiment import Experiment, Record
    from routepack_opt.compare.summary import Entry

logger = logging.getLogger(__name__)

_DEFAULT_METHODS = "lpt+ffd,lpt+kk,paper,plan-fixed,plan"
_LONG_S = 20.0  # experiments longer than this are announced

DESCRIPTION = """\
Run several methods on the same windows with the same budgets and seeds. Every layout is scored
by the exact evaluator and checked by the independent verifier; gaps are to the best bound that
any method proved. With -o a folder gets the results (results.json, and results.jsonl as they
come: a second run goes on where the first was stopped) and a page to look at (index.html)."""

EPILOG = """\
examples:
  routepack compare --list-methods
  routepack compare window.npz --ep 8 --token-cap 8192
  routepack compare windows/ --ep 8 --dp 16 --shards 2 --token-cap 8192 \\
      --methods lpt+ffd,paper,plan --budgets 0.3,1,3 --seeds 0,1,2 -o report/

PATHS are windows, or folders of them. A method that finds no layout is listed with the reason.
exit code 1: a layout broke a rule. docs/compare.md describes methods and columns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of compare."""
    parser.usage = "routepack compare PATHS... --ep P --token-cap C [--methods a,b,c] [-o FOLDER] [options]"
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="windows, or folders of windows")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="results and page go here; made when missing")
    parser.add_argument("--list-methods", action="store_true", help="the methods and which can run here")
    sizes = parser.add_argument_group("topology")
    sizes.add_argument("--ep", type=integer(1), metavar="P", help="EP ranks of an EDP shard")
    sizes.add_argument("--dp", type=integer(1), metavar="D", help="DP ranks; default ep x shards")
    sizes.add_argument(
        "--shards", type=integer(1), metavar="G", help="EDP shards; default 1, or dp // ep when --dp is given"
    )
    parser.add_argument("--token-cap", type=integer(1), metavar="C", help="most tokens of a cell")
    costs = parser.add_argument_group("cost").add_mutually_exclusive_group()
    costs.add_argument("--cost", metavar="cost.json", help="stages and expert weight; see docs/cost-model.md")
    costs.add_argument("--model", metavar="NAME", help="a model preset, or a Hugging Face config.json")
    search = parser.add_argument_group("experiment")
    methods = f"default {_DEFAULT_METHODS}; or all"
    search.add_argument("--methods", type=_names, default=_names(_DEFAULT_METHODS), metavar="A,B", help=methods)
    budgets = _list_of(number(0, 1e9, "a number of seconds >= 0"))
    search.add_argument("--budgets", type=budgets, default=[1.0], metavar="S,T", help="seconds a run; default 1")
    search.add_argument("--seeds", type=_list_of(integer(0)), default=[0], metavar="A,B", help="default 0")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no method")
    return names


def _list_of(parse: Any) -> Any:
    """An argparse type: values with commas between them, each once."""

    def parse_list(text: str) -> list[Any]:
        values = list(dict.fromkeys(parse(part.strip()) for part in text.split(",") if part.strip()))
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r} is empty")
        return values

    return parse_list


def run(options: argparse.Namespace) -> int:
    """Run, write, print."""
    from routepack_opt.compare.experiment import Experiment, run_experiment
    from routepack_opt.compare.methods import available, find_methods

    if options.list_methods:
        return _list(options)
    methods = list(available().values()) if options.methods == ["all"] else find_methods(options.methods)
    folder = None if options.output is None else _output_folder(options.output)
    experiment = Experiment(_cases(options), methods, options.budgets, options.seeds)
    if experiment.search_s > _LONG_S:
        runs = plural(experiment.num_runs, "run")
        logger.info("%s, about %.0f s of search; Ctrl-C keeps what is done", runs, experiment.search_s)
    records: list[Record] = []
    started = time.strftime("%Y-%m-%d %H:%M")
    interrupted = False
    progress = _Progress(experiment, options.quiet)
    try:
        run_experiment(
            experiment,
            journal=None if folder is None else folder / "results.jsonl",
            on_record=progress.step,
            records=records,
        )
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.close()
    _report(options, experiment, records, folder, started)
    if interrupted:
        print(f"interrupted after {plural(len(records), 'run')} of {experiment.num_runs}", file=sys.stderr)
        return INTERRUPTED
    return 1 if any(record.get("broken") for record in records) else 0


def _list(options: argparse.Namespace) -> int:
    from routepack_opt.compare.methods import all_methods

    methods = all_methods().values()
    if options.json:
        print_json(
            [{"name": m.name, "about": m.about, "searches": m.searches, "missing": m.missing()} for m in methods]
        )
        return 0
    width = max(len(m.name) for m in methods)
    for m in methods:
        reason = m.missing()
        print(f"{m.name:<{width}}  {m.about}{'' if reason is None else f' (not here: {reason})'}")
    return 0


def _output_folder(name: str) -> Path:
    from routepack_opt.errors import InvalidInput

    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "results.jsonl"
        probe.touch()
    except OSError as error:
        raise InvalidInput(f"{name}: cannot be used as an output folder ({error.strerror or error})") from None
    return folder


def _cases(options: argparse.Namespace) -> list[Case]:
    from routepack_opt.compare.case import Case
    from routepack_opt.cost import CostModel
    from routepack_opt.errors import InvalidInput
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

    for name, value in (("PATHS", options.paths), ("--ep", options.ep), ("--token-cap", options.token_cap)):
        if not value:
            print(f"routepack compare: {name} is required; see 'routepack compare --help'", file=sys.stderr)
            raise SystemExit(2)
    topology = Topology(dp=options.dp, ep=options.ep, shards=options.shards)
    files: list[Path] = []
    for name in options.paths:
        path = Path(name)
        inside = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not inside:
            raise InvalidInput(f"{name}: the folder holds no window (*.npz)")
        files += inside
    stems = [path.stem for path in files]
    cases = []
    for path in files:
        window = Window.load(path)
        topology.experts_per_rank(window.num_experts)
        if options.cost is not None:
            cost = CostModel.load(options.cost)
        elif options.model is not None:
            cost = CostModel.for_model(options.model, token_cap=options.token_cap)
        else:
            cost = CostModel.default(window.num_layers, options.token_cap)
        cost.expert_weights(window.num_layers)
        name = path.stem if stems.count(path.stem) == 1 else str(path)
        cases.append(Case(name, window, topology, options.token_cap, cost))
    return cases


class _Progress:
    """A bar on a terminal."""

    def __init__(self, experiment: Experiment, quiet: bool) -> None:
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=experiment.num_runs, unit="run", leave=False, file=sys.stderr)

    def step(self, record: Record) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"{record['method']} on {record['window']}", refresh=False)
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _report(
    options: argparse.Namespace, experiment: Experiment, records: list[Record], folder: Path | None, started: str
) -> None:
    from routepack_opt.compare.experiment import share_bounds
    from routepack_opt.compare.summary import failures, summarise, windows_of, without_repeats
    from routepack_opt.files import write_json

    share_bounds(records)
    entries = summarise(records)
    if folder is not None and records:
        from routepack_opt.report.comparison import write_page

        write_json(folder / "results.json", records, indent=1)
        write_page(folder / "index.html", experiment, records, started=started)
    if options.json:
        print_json(records)
        return
    for window in windows_of(entries):
        inside = [e for e in entries if e.window == window]
        print(f"{window}\n{table(_lines([e for e in without_repeats(inside) if e.found]))}")
        for method, runs, reason in failures(inside):
            print(f"{method}: {runs} without a layout: {reason}")
        print()
    if folder is not None and records:
        print(f"wrote {folder / 'results.json'} and {folder / 'index.html'}")


def _lines(entries: Sequence[Entry]) -> list[list[str]]:
    from routepack_opt.compare.summary import figure_text

    lines = [["method", "budget", "seconds", "rows", "slowest shard", "gap", "over seeds", "eta_EP", "rows status"]]
    for e in entries:
        spread = f"{100 * e.low_gap:.2f}-{100 * e.high_gap:.2f}%" if not e.steady else ""
        lines.append(
            [
                e.method,
                f"{e.budget_s:g}",
                f"{e.seconds:.3f}",
                str(e.rows),
                figure_text(e.score),
                f"{100 * e.gap:.2f}%",
                spread,
                f"{e.eta_ep:.3f}",
                e.rows_status,
            ]
        )
    return lines
