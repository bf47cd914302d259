"""Row counts proved: synthetic windows, tight bin packing, and BPPLIB instances with known optima.

    python benchmarks/certify.py --quick                     # minutes: a sample of everything
    python benchmarks/certify.py --jobs 8 --keep certs.jsonl # everything; goes on where it was stopped

Parts: ``windows`` (180 windows, D = 4, 8, 16, 32), ``tight`` (D = 1, cap 8192, sigma 0.6), ``bpplib`` (a sample of each
class). Times are of the solver alone, warm, in worker processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.certify import Case, Journal, Settings, certify_all, read_cases

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEEDS = (0, 1, 2, 3)
SIZES = (128, 256, 512, 1024, 2048)
CAPS = (8192, 16384, 32768)
SIGMAS = (0.6, 1.0, 1.4)
RANKS = (4, 8, 16, 32)
MEAN_TOKENS = 3000
TIGHT_LIMITS_S = {512: 5.0, 1024: 15.0, 2048: 60.0}
CLASSES = ("falkenauer_t", "falkenauer_u", "scholl_1", "scholl_2", "hard28")
FAST_S = 0.05


@dataclass(frozen=True)
class Group:
    """Cases that share a line of the table; ``known`` maps names to proved (lower, upper) bounds."""

    part: str
    name: str
    cases: list[Case]
    settings: Settings
    known: dict[str, tuple[int, int]]


def synthetic(num_samples: int, cap: int, sigma: float, seed: int) -> Case:
    """Lognormal lengths of mean 3000 (before clipping), cut at the cap."""
    rng = np.random.default_rng(seed)
    lengths = np.floor(rng.lognormal(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma, num_samples))
    name = f"n{num_samples}-c{cap}-s{sigma}-seed{seed}"
    return Case(name, "synthetic", np.clip(lengths, 1, cap).astype(np.int64), cap)


def windows(quick: bool, limit_s: float) -> Iterator[Group]:
    seeds, sizes = (SEEDS[:1], SIZES[:3]) if quick else (SEEDS, SIZES)
    cases = [synthetic(n, cap, sigma, seed) for seed in seeds for n in sizes for cap in CAPS for sigma in SIGMAS]
    for ranks in RANKS:
        yield Group("windows", f"D = {ranks}", cases, Settings(ranks, limit_s), {})


def tight(quick: bool, limit_s: float) -> Iterator[Group]:
    for num_samples, own_limit_s in TIGHT_LIMITS_S.items():
        if quick and num_samples > 512:
            return
        cases = [synthetic(num_samples, 8192, 0.6, seed) for seed in SEEDS]
        limit = min(own_limit_s, limit_s)
        yield Group("tight", f"N = {num_samples}, {limit:g} s", cases, Settings(1, limit), {})


def bpplib(folder: Path, sample: int, seed: int, limit_s: float) -> Iterator[Group]:
    for name in CLASSES:
        path = folder / f"{name}.jsonl.gz"
        cases = read_cases([path], token_cap=None)
        if name != "hard28" or sample < 28:
            chosen = np.random.default_rng(seed).permutation(len(cases))[:sample]
            cases = [cases[k] for k in sorted(chosen.tolist())]
        with gzip.open(path, "rt") as stream:
            bounds = {row["name"]: (row["best_lb"], row["best_ub"]) for row in map(json.loads, stream)}
        yield Group("bpplib", name, cases, Settings(1, limit_s), bounds)


def measure(group: Group, journal: Journal | None, jobs: int, ray: str | None) -> dict[str, Any]:
    """Certify a group and hold it against what is known."""
    records = certify_all(group.cases, group.settings, journal=journal, jobs=jobs, ray_address=ray)
    count = {status: sum(r["rows_status"] == status for r in records) for status in ("certified", "solver-proved")}
    proved = [r for r in records if r["rows_status"] in count]
    rungs: dict[str, int] = {}
    for r in proved:
        rungs[r["rung"]] = rungs.get(r["rung"], 0) + 1
    known = [(r, *group.known[r["name"]]) for r in records if r["name"] in group.known and r["rows"] is not None]
    return {
        "part": group.part,
        "group": group.name,
        "time_limit_s": group.settings.time_limit_s,
        "cases": len(records),
        "certified": count["certified"],
        "solver_proved": count["solver-proved"],
        "open": sorted(r["name"] for r in records if r["rows_status"] == "best-known"),
        "infeasible": sum(r["rows_status"] == "infeasible" for r in records),
        "failed": sum(r["rows_status"] == "failed" for r in records),
        "within_50_ms": sum(r["seconds"] <= FAST_S for r in proved),
        "median_s": float(np.median([r["seconds"] for r in records])),
        "longest_s": max(r["seconds"] for r in records),
        "rungs": dict(sorted(rungs.items(), key=lambda item: -item[1])),
        "wrong": sorted(r["name"] for r, low, high in known if r["rows"] < low or r["rows_lower_bound"] > high),
        "at_known_optimum": sum(r["rows"] == high for r, low, high in known if low == high),
        "known_optima": sum(low == high for _, low, high in known),
    }


def line(result: dict[str, Any]) -> str:
    fast = result["within_50_ms"] / max(result["cases"], 1)
    optimum = f"{result['at_known_optimum']}/{result['known_optima']}" if result["known_optima"] else "-"
    rungs = ", ".join(f"{rung} {n}" for rung, n in result["rungs"].items())
    return (
        f"{result['part']:8s} {result['group']:14s} {result['cases']:5d} {result['certified']:9d}"
        f" {result['solver_proved']:6d} {len(result['open']):5d} {fast:7.1%} {result['median_s']:9.4f}"
        f" {result['longest_s']:9.3f} {optimum:>9s}  {rungs}"
    )


def groups(args: argparse.Namespace) -> Iterator[Group]:
    data = Path(os.environ.get("ROUTEPACK_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if "windows" in args.parts:
        yield from windows(args.quick, args.time_limit)
    if "tight" in args.parts:
        yield from tight(args.quick, args.time_limit)
    if "bpplib" in args.parts:
        yield from bpplib(data / "binpacking", args.sample, args.seed, args.time_limit)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sample of everything, 5 s a case")
    parser.add_argument(
        "--parts", nargs="+", choices=("windows", "tight", "bpplib"), default=["windows", "tight", "bpplib"]
    )
    parser.add_argument("--time-limit", type=float, help="seconds a case; default 60, or 5 with --quick")
    parser.add_argument("--sample", type=int, help="instances of each BPPLIB class; default 60, or 6 with --quick")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--keep", type=Path, help="results of every case, one a line; resumed")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, default=1)
    where.add_argument("--ray", metavar="ADDR")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    args.time_limit = args.time_limit or (5.0 if args.quick else 60.0)
    args.sample = args.sample or (6 if args.quick else 60)
    return args


def main() -> int:
    args = parse()
    results = []
    out = sys.stderr if args.json else sys.stdout
    with ExitStack() as stack:
        journal = None if args.keep is None else stack.enter_context(Journal(args.keep))
        head = ("part", "group", "cases", "certified", "solver", "open", "<=50ms", "median s", "longest s", "optimum")
        print("{:8s} {:14s} {:>5s} {:>9s} {:>6s} {:>5s} {:>7s} {:>9s} {:>9s} {:>9s}  rungs".format(*head), file=out)
        for group in groups(args):
            result = measure(group, journal, args.jobs, args.ray)
            results.append(result)
            print(line(result), file=out, flush=True)
    wrong = [name for result in results for name in result["wrong"]]
    if args.json:
        print(json.dumps(results))
    if wrong:
        print(f"WRONG, against known bounds: {', '.join(wrong)}", file=out)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
