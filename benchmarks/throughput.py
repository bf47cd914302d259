"""Proposals per second of one thread of the CPU engine, on the windows of the registry, from a settled layout."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from routepack_opt.compare.builtin import lpt_task
from routepack_opt.compare.heuristics import cell_numbers
from routepack_opt.planner import warmup
from routepack_opt.solvers.annealing.chain import Chain
from routepack_opt.solvers.annealing.schedule import Schedule

if TYPE_CHECKING:
    from routepack_opt.compare.case import Case


def cpu_throughput(case: Case, seconds: float = 0.3, repeats: int = 3) -> dict[str, Any]:
    """Sample proposals (all, and those whose score was computed) and expert swap proposals, per second, best repeat."""
    warmup()
    task = lpt_task(case, 0.2, 0)
    chain = Chain(task.chain_problem(), cell_numbers(task.cells, task.atoms.num_atoms), task.rank_of, seed=0, stream=0)
    schedule = Schedule()
    unit = chain.score().total / task.atoms.num_atoms
    temperature = unit * (schedule.hot * schedule.cold) ** 0.5
    chain.anneal(unit * schedule.hot, 20_000)
    best = {"proposals_per_s": 0.0, "scored_per_s": 0.0, "swaps_per_s": 0.0}
    for _ in range(repeats):
        proposals = scored = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            scored += chain.anneal(temperature, 2_000)
            proposals += 2_000
        spent = time.perf_counter() - start
        best["proposals_per_s"] = max(best["proposals_per_s"], proposals / spent)
        best["scored_per_s"] = max(best["scored_per_s"], scored / spent)
        per_layer = schedule.refine_depth * case.window.num_experts
        start = time.perf_counter()
        chain.refine(temperature, per_layer)
        swaps = per_layer * case.window.num_layers / (time.perf_counter() - start)
        best["swaps_per_s"] = max(best["swaps_per_s"], swaps)
    return {"window": case.name, "engine": "cpu, one thread", **best}
