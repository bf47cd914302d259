"""Placement of real expert counts: balance, proof, moved experts and time of every method on every load file.

    python benchmarks/placement.py [--ranks 32] [--slots 288] [--repeats 5] [--json]

Needs the load files of the data folder (ROUTEPACK_DATA, default ../shared/data). Every repeat runs all methods in
turn, so that a busy machine disturbs them alike; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.integrations.eplb_files import read_loads
from routepack_opt.models import placement, replication
from routepack_opt.models.moves import contiguous_ranks, num_moved
from routepack_opt.models.placement import fewest_moves, lpt, placement_bounds, rank_loads, solve_placement
from routepack_opt.models.replication import solve_replication

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def methods(num_ranks: int, standing: NDArray[np.int64]) -> dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]]:
    """Name -> function from loads to ranks."""
    return {
        "contiguous": lambda load: standing,
        "lpt": lambda load: lpt(load, num_ranks),
        "solve": lambda load: solve_placement(load, num_ranks).rank_of,
        "solve, standing": lambda load: solve_placement(load, num_ranks, standing=standing).rank_of,
        "max_moved 20%": lambda load: solve_placement(load, num_ranks, standing=standing, max_moved=0.2).rank_of,
        "within 1%": lambda load: fewest_moves(load, num_ranks, standing, within=0.01).rank_of,
    }


def bench_file(path: Path, num_ranks: int, num_slots: int, repeats: int) -> list[dict[str, Any]]:
    """One result a method."""
    load = read_loads(path)
    load = np.ascontiguousarray(load[load.sum(axis=1) > 0])
    standing = contiguous_ranks(*load.shape, num_ranks)
    bound = placement_bounds(load, num_ranks)[0]
    mean = load.sum(axis=1) / num_ranks
    runs = methods(num_ranks, standing)
    best = dict.fromkeys([*runs, "replicas"], np.inf)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            rank_of = run(load)
            best[name] = min(best[name], time.perf_counter() - start)
            reached = rank_loads(load, rank_of, num_ranks).max(axis=1)
            rows[name] = {
                "max_over_mean": float((reached / mean).mean()),
                "gap": float(((reached - bound) / bound).mean()),
                "moved": float(num_moved(rank_of, standing).mean() / load.shape[1]),
            }
        start = time.perf_counter()
        copies = solve_replication(load, num_ranks, num_slots)
        best["replicas"] = min(best["replicas"], time.perf_counter() - start)
        rows["replicas"] = {
            "max_over_mean": float((copies.reached / mean).mean()),
            "gap": float((copies.reached / copies.bound - 1).mean()),
            "moved": None,
        }
    return [{"file": path.name, "method": name, "seconds": best[name], **row} for name, row in rows.items()]


def next_step(files: list[Path], num_ranks: int) -> list[dict[str, Any]]:
    """Plan on one file, run another: what in-sample balance is worth when the mix changes."""
    loads = {path.stem: read_loads(path) for path in files}
    results = []
    for planned, load in loads.items():
        rank_of = solve_placement(load, num_ranks).rank_of
        for run, other in loads.items():
            mean = other.sum(axis=1) / num_ranks
            loaded = mean > 0
            ratio = rank_loads(other, rank_of, num_ranks).max(axis=1)[loaded] / mean[loaded]
            results.append({"planned_on": planned, "run": run, "max_over_mean": float(ratio.mean())})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--slots", type=int, default=288)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = Path(os.environ.get("ROUTEPACK_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    files = sorted((data / "loads").glob("*.json"))
    placement.warmup()
    replication.warmup()
    rows = [row for path in files for row in bench_file(path, args.ranks, args.slots, args.repeats)]
    across = next_step(files, args.ranks)
    if args.json:
        print(json.dumps({"methods": rows, "next_step": across}))
        return
    print(f"{'file':28s} {'method':16s} {'max/mean':>9s} {'gap':>9s} {'moved':>6s} {'ms':>7s}")
    for row in rows:
        moved = "-" if row["moved"] is None else f"{row['moved']:.0%}"
        print(
            f"{row['file']:28s} {row['method']:16s} {row['max_over_mean']:9.5f} {row['gap']:9.4%} {moved:>6s}"
            f" {row['seconds'] * 1e3:7.1f}"
        )
    print(f"\n{'planned on':24s} {'run':24s} max/mean")
    for row in across:
        print(f"{row['planned_on']:24s} {row['run']:24s} {row['max_over_mean']:.4f}")


if __name__ == "__main__":
    main()
