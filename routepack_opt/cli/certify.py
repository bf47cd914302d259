"""``routepack certify``: proved row counts of many windows, offline and resumable."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import check_output, plural, print_json, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from routepack_opt.certify.one import Record

logger = logging.getLogger(__name__)

_DEFAULT_LIMIT_S = 10.0
_LINE_EVERY_S = 30.0  # progress where stderr is no terminal

DESCRIPTION = """\
Find the least number of rows of many windows and prove it. Every result is one line of the output
file, written as soon as it is known and re-checked in integers before: the packing, and the
certificate that no packing has fewer rows. A second run on the same file goes on where the first was
stopped, and gives open cases another try when it has more time.
"""

EPILOG = """\
examples:
  routepack certify windows/ --dp 16 --token-cap 8192 --time-limit 60 --jobs 8 -o certs.jsonl
  routepack certify windows/ --dp 16 --token-cap 8192 --ep 8 --ray auto -o certs.jsonl
  routepack certify hard28.jsonl.gz --dp 1 --time-limit 60 -o hard28.certs.jsonl

PATHS are windows (.npz), bin-packing instances (.jsonl, .jsonl.gz; one {"name", "capacity",
"weights"} a line, with a capacity of their own), or folders of them.
exit codes beyond the usual: 1 when the checker refuted a claim or a case failed, 3 when a case
is infeasible; the other cases are kept either way. docs/certify.md describes the lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of certify."""
    positive = integer(1)
    parser.usage = "routepack certify PATHS... --dp D [--token-cap C] [--time-limit S] -o CERTS.jsonl [options]"
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="windows, instance files, or folders of them")
    parser.add_argument("-o", "--output", required=True, metavar="CERTS.jsonl", help="appended to; see above")
    parser.add_argument("--dp", type=positive, required=True, metavar="D", help="DP ranks, the cells of a row; 1: bins")
    parser.add_argument("--token-cap", type=positive, metavar="C", help="most tokens of a cell; required for windows")
    parser.add_argument("--ep", type=positive, metavar="P", help="also the placement of windows on P EP ranks")
    parser.add_argument(
        "--time-limit",
        type=number(0.0, 1e8, "a number of seconds >= 0"),
        default=_DEFAULT_LIMIT_S,
        metavar="S",
        help=f"seconds for each case (default {_DEFAULT_LIMIT_S:g})",
    )
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of all random choices (default 0)")
    where = parser.add_argument_group("where it runs").add_mutually_exclusive_group()
    where.add_argument("--jobs", type=positive, default=1, metavar="N", help="worker processes (default 1)")
    where.add_argument("--ray", metavar="ADDR", help="on a Ray cluster that is up: auto, host:port or ray://host:port")


def run(options: argparse.Namespace) -> int:
    """Read, certify, keep, sum up."""
    from routepack_opt.certify import Journal, Settings, certify_all, read_cases

    check_output(options.output, *options.paths)
    cases = read_cases(options.paths, token_cap=options.token_cap, ep=options.ep, skip=options.output)
    settings = Settings(options.dp, options.time_limit, options.ep, options.seed)
    records: list[Record] = []
    interrupted = False
    with Journal(Path(options.output)) as journal:
        known = [case for case in cases if journal.find(case, settings) is not None]
        if known:
            logger.info("%s: %d of %s already done", options.output, len(known), plural(len(cases), "case"))
        with _Progress(len(cases) - len(known), options.quiet) as progress:
            try:
                certify_all(
                    cases,
                    settings,
                    journal=journal,
                    jobs=options.jobs,
                    ray_address=options.ray,
                    on_record=progress.step,
                    records=records,
                )
            except KeyboardInterrupt:
                interrupted = True
    _report(options, records)
    if interrupted:
        print(f"interrupted after {len(records)} of {plural(len(cases), 'case')}", file=sys.stderr)
        return INTERRUPTED
    return _exit_code(records)


def _exit_code(records: Sequence[Record]) -> int:
    statuses = {record["rows_status"] for record in records}
    if "failed" in statuses or any("refuted" in record.get("error", "") for record in records):
        return 1
    return 3 if "infeasible" in statuses else 0


class _Progress:
    """Counts of proved and open cases: a bar on a terminal, else a line now and then."""

    def __init__(self, num_cases: int, quiet: bool) -> None:
        self.num_cases, self.quiet = num_cases, quiet
        self.done = self.proved = 0
        self.bar: Any = None
        self.last_s = time.monotonic()
        if not quiet and num_cases and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=num_cases, unit="case", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, record: Record) -> None:
        self.done += 1
        self.proved += record["rows_status"] in ("certified", "solver-proved")
        if record.get("error"):
            logger.warning("%s: %s: %s", record["name"], record["rows_status"], record["error"])
        if self.bar is not None:
            self.bar.set_postfix(proved=self.proved, open=self.done - self.proved, refresh=False)
            self.bar.update()
        elif time.monotonic() - self.last_s > _LINE_EVERY_S:
            self.last_s = time.monotonic()
            counts = f"{self.proved} proved, {self.done - self.proved} open"
            logger.info("%d of %s: %s", self.done, plural(self.num_cases, "case"), counts)


def _report(options: argparse.Namespace, records: Sequence[Record]) -> None:
    from routepack_opt.certify.summary import by_rung, totals

    total = totals(records)
    rungs = by_rung(records)
    if options.json:
        print_json({**total, "rungs": [vars(rung) for rung in rungs], "output": options.output})
        return
    lines = [["closed by", "rows are", "cases", "median s", "longest s"]]
    for r in rungs:
        lines.append([r.rung or "-", r.status, f"{r.num_cases:,}", f"{r.median_s:.3f}", f"{r.max_s:.3f}"])
    if rungs:
        print(table(lines) + "\n")
    proved = f"{total['certified']} certified, {total['solver_proved']} solver-proved, {total['best_known']} open"
    above = f" ({plural(total['open_rows_above_bound'], 'row')} above their bounds)" if total["best_known"] else ""
    rest = "".join(f", {total[name]} {name}" for name in ("infeasible", "failed") if total[name])
    print(f"{plural(total['cases'], 'case')}: {proved}{above}{rest}")
    if "placement_gap" in total:
        print(f"placement: {100 * total['placement_gap']:.3f}% above its lower bound, mean over windows and layers")
    print(f"kept in {options.output}")
