"""How often annealing reaches the proved optimum of a small window, placement fixed.

Random windows of 16 samples, L <= 4, P <= 4, R*D <= 6, one or two EDP shards, up to three rows. The optimum comes from
CP-SAT and, as a second opinion that shares no code with it, from dynamic programming over all sets of samples.

    python benchmarks/annealing_vs_exact.py [--instances 100] [--budget 0.2] [--time-limit 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from routepack_opt import Constraints, CostModel, Stage, Topology, Window
from routepack_opt.errors import RoutePackError
from routepack_opt.models.atoms import build_atoms
from routepack_opt.models.layout import averaging_bound
from routepack_opt.models.layout_exact import ExactLayoutProblem, solve_layout_exact
from routepack_opt.models.layout_search import LayoutTask, search_layout
from routepack_opt.models.placement import solve_placement
from routepack_opt.models.rows import solve_rows
from routepack_opt.planner import rows_problem, warmup

EQUAL = 1e-6  # relative


def random_task(seed: int, num_samples: int) -> LayoutTask:
    """A window whose rows are decided and whose experts are placed; redrawn until it has the rows it should have."""
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        num_shards, num_rows = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        per_shard = int(rng.integers(1, 6 // (num_rows * num_shards) + 1))
        topology = Topology(num_shards * per_shard, int(rng.integers(2, 5)), num_shards)
        num_layers, num_experts = int(rng.integers(1, 5)), topology.ep * int(rng.integers(1, 5))
        lengths = np.clip(rng.lognormal(6.0, rng.uniform(0.3, 0.9), num_samples), 16, 4096).astype(np.int64)
        popularity = rng.gamma(1.5, size=(num_layers, num_experts))
        own = rng.gamma(2.0, size=(num_samples, num_layers, num_experts)) * popularity
        share = own / own.sum(axis=2, keepdims=True)
        demand = np.array([[rng.multinomial(8 * t, p) for p in rows] for t, rows in zip(lengths, share, strict=True)])
        room = lengths.sum() * rng.uniform(1.05, 1.6) / (num_rows * topology.dp)
        token_cap = max(int(lengths.max()), int(room))
        stages = (Stage("full", 4.0 * num_layers, 7e-4 * token_cap * num_layers),)
        if per_shard <= 2 and rng.random() < 0.3:
            stages = (*stages, Stage("linear", 2.0 * num_layers, 0.0))
        cost = CostModel(stages, sync="row" if rng.random() < 0.25 else "shard")
        try:
            task = make_task(Window(lengths, demand), topology, token_cap, cost, num_rows)
        except RoutePackError:
            continue
        if task.num_rows == num_rows:
            return task
    raise RuntimeError(f"seed {seed}: no feasible window in 100 draws")


def make_task(window: Window, topology: Topology, token_cap: int, cost: CostModel, num_rows: int) -> LayoutTask:
    constraints = Constraints(min_rows=num_rows)
    atoms = build_atoms(window, constraints, token_cap)
    problem = rows_problem(atoms, topology, token_cap, constraints)
    rows = solve_rows(problem, time_limit_s=1.0)
    standing = np.tile(
        np.arange(window.num_experts) // topology.experts_per_rank(window.num_experts), (window.num_layers, 1)
    )
    placed = solve_placement(window.total_load, topology.ep, standing=standing, time_limit_s=0.05)
    bound = averaging_bound(window.lengths, placed.bound, topology, token_cap, cost)
    return LayoutTask(
        window=window,
        topology=topology,
        token_cap=token_cap,
        cost=cost,
        constraints=constraints,
        atoms=atoms,
        rows_problem=problem,
        cells=rows.cells,
        rank_of=placed.rank_of,
        lpt_ranks=placed.rank_of,  # so that no seed comes with another placement
        standing=standing,
        bound=bound.value,
    )


def compare(task: LayoutTask, name: str, budget_s: float, time_limit_s: float, engines: list[str]) -> dict[str, Any]:
    """Annealing first, so that the exact engines start from its incumbent."""
    start = time.perf_counter()
    found = search_layout(task, deadline=start + budget_s, steps=None, seed=0, refine=False)
    problem = ExactLayoutProblem.from_task(task)
    record: dict[str, Any] = {
        "name": name,
        "rows": task.num_rows,
        "shards": [len(ranks) for ranks in task.topology.shards],
        "ep": task.topology.ep,
        "layers": task.window.num_layers,
        "stages": len(task.cost.stages),
        "sync": task.cost.sync,
        "annealing": problem.score(found.best.cell_of).slowest_shard,
        "annealing_s": time.perf_counter() - start,
        "over_averaging": found.best.score.slowest_shard / task.bound - 1.0,
    }
    for engine in engines:
        exact = solve_layout_exact(
            problem,
            engine=engine,
            time_limit_s=time_limit_s,
            hint=found.best.cell_of,  # type: ignore[arg-type]
        )
        record[engine] = {
            "status": exact.status,
            "objective": exact.objective,
            "bound": exact.bound,
            "seconds": exact.runtime_s,
        }
    proved = [record[e]["objective"] for e in engines if record[e]["status"] == "optimal"]
    record["optimum"] = min(proved) if proved else None
    record["gap"] = record["annealing"] / min(proved) - 1.0 if proved else None
    record["agree"] = not proved or max(proved) <= min(proved) * (1.0 + EQUAL)
    return record


def describe(record: dict[str, Any]) -> str:
    """One line on an instance where annealing missed, a proof is missing or the engines differ."""
    gap = "no proof" if record["gap"] is None else f"{record['gap']:.1e} above the optimum"
    text = (
        f"{record['name']}: rows {record['rows']}, shards {record['shards']}, layers {record['layers']},"
        f" EP {record['ep']}, stages {record['stages']}, sync {record['sync']}: {gap}"
    )
    return text if record["agree"] else f"{text}; ENGINES DIFFER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--engines", default="cp-sat,subsets")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warmup()
    records = []
    for seed in range(arguments.first, arguments.first + arguments.instances):
        task = random_task(seed, arguments.samples)
        record = compare(task, f"random-{seed}", arguments.budget, arguments.time_limit, arguments.engines.split(","))
        records.append(record)
        if not arguments.json and (record["gap"] is None or record["gap"] > EQUAL or not record["agree"]):
            print(describe(record), flush=True)
    if arguments.json:
        print(json.dumps(records, indent=1))
        return
    proved = [r for r in records if r["gap"] is not None]
    equal = sum(r["gap"] <= EQUAL for r in proved)
    print(f"{len(proved)} of {len(records)} proved; annealing equals the optimum in {equal} of them")
    if proved:
        print(f"largest gap {max(r['gap'] for r in proved):.2e}; engines agree in {sum(r['agree'] for r in proved)}")
    for engine in arguments.engines.split(","):
        seconds = [r[engine]["seconds"] for r in records]
        done = sum(r[engine]["status"] == "optimal" for r in records)
        print(f"{engine}: {done} proved, median {np.median(seconds):.2f} s, largest {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
