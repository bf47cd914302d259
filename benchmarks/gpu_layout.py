"""The layout engine on a CUDA device: proposals per second and layout quality, beside the CPU engine and plain numpy.

    python benchmarks/gpu_layout.py -o gpu_layout.json            under eight minutes on one GPU
    python benchmarks/gpu_layout.py --device cpu --quick          to see that it runs

Quality is the gap above the averaging bound after 0.1, 1 and 10 seconds from the same start (level packing, LPT).
Kernels, graphs and windows are made before the clock starts. The CPU engine and numpy run on one core.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy_chain import NumpyChain

from routepack_opt import __version__
from routepack_opt.compare.builtin import lpt_task
from routepack_opt.compare.case import Case
from routepack_opt.models.seeds import level_packing
from routepack_opt.planner import warmup
from routepack_opt.solvers.annealing.chain import Chain, ChainProblem
from routepack_opt.solvers.annealing.population import resampling_weights, run_population, systematic_resample
from routepack_opt.solvers.annealing.schedule import Schedule
from routepack_opt.solvers.annealing.torch_population import TorchPopulation
from routepack_opt.synth import PRESETS, synth

PRESET_NAMES = ("flash", "v3", "qwen3-30b-long", "tiny")
CONFIGURATIONS = ((64, 32), (256, 16), (1024, 8))  # members, tries
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Start:
    """One window, ready to search."""

    name: str
    problem: ChainProblem
    cell_of: np.ndarray
    rank_of: np.ndarray
    bound: float
    unit: float
    schedule: Schedule

    def chain(self, seed: int = 0) -> Chain:
        return Chain(self.problem, self.cell_of, self.rank_of, seed=seed, stream=0)

    def gap(self, slowest_shard: float) -> float:
        return slowest_shard / self.bound - 1.0


def make_start(preset: str, num_samples: int | None) -> Start:
    p = PRESETS[preset]
    case = Case(preset, synth(p, num_samples, seed=0), p.topology, p.token_cap, p.cost)
    task = lpt_task(case, 0.2, 0)
    cells = level_packing(task.atoms, len(task.cells), task.token_cap, task.cost, task.constraints) or task.cells
    cell_of = np.empty(task.atoms.num_atoms, dtype=np.int64)
    for k, members in enumerate(cells):
        cell_of[members] = k
    problem = task.chain_problem()
    score = Chain(problem, cell_of, task.rank_of, seed=0, stream=0).score()
    schedule = Schedule.for_size(task.atoms.num_atoms, len(task.cells))
    return Start(preset, problem, cell_of, task.rank_of, task.bound, score.total / task.atoms.num_atoms, schedule)


def cpu_engine(start: Start, budgets_s: list[float], rate_s: float) -> dict[str, Any]:
    chain = start.chain()
    chain.anneal(start.unit * start.schedule.hot, 20_000)
    scored, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < rate_s:
        scored += chain.anneal(middle_temperature(start), 2_000)
    result: dict[str, Any] = {"scored_per_s": scored / (time.perf_counter() - begin), "gap": {}}
    for budget_s in budgets_s:
        chain = start.chain()
        found = run_population(
            [chain],
            deadline=time.perf_counter() + budget_s,
            steps=None,
            unit=start.unit,
            schedule=start.schedule,
            max_threads=1,
        )
        result["gap"][str(budget_s)] = start.gap(found.incumbents[0].score.slowest_shard)
    return result


def numpy_engine(start: Start, budgets_s: list[float], rate_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {"gap": {}}
    for budget_s in [rate_s, *budgets_s]:
        chain = NumpyChain(start.problem, start.cell_of, start.rank_of, seed=0)
        best, begin = math.inf, time.perf_counter()
        while (spent := time.perf_counter() - begin) < budget_s:
            chain.anneal(start.schedule.temperature(spent / budget_s, 1, start.unit), 100)
            best = min(best, chain.slowest_shard)
        if "scored_per_s" not in result:
            result["scored_per_s"] = chain.num_scored / (time.perf_counter() - begin)
        else:
            result["gap"][str(budget_s)] = start.gap(best)
    return result


def middle_temperature(start: Start) -> float:
    return start.unit * (start.schedule.hot * start.schedule.cold) ** 0.5


def make_population(start: Start, device: str, members: int, tries: int, compiled: bool) -> TorchPopulation:
    """A population whose kernels and graphs are ready."""
    population = TorchPopulation(
        start.problem,
        np.tile(start.cell_of, (members, 1)),
        start.rank_of,
        device=device,
        seed=0,
        num_tries=tries,
        compiled=compiled,
    )
    for smooth in (False, True):
        population.anneal(start.unit * start.schedule.hot, 32)
        population.refine(start.unit * start.schedule.hot, 32 * tries, smooth=smooth)
    population.synchronize()
    population.restart(np.tile(start.cell_of, (members, 1)), start.rank_of)
    return population


def torch_rate(start: Start, population: TorchPopulation, rate_s: float) -> dict[str, float]:
    """Scored proposals and expert swap proposals per second, all members together."""
    population.anneal(start.unit * start.schedule.hot, 64)
    population.synchronize()
    population.statistics()
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < rate_s:
        population.anneal(middle_temperature(start), 32)
        population.synchronize()
        rounds += 32
    spent = time.perf_counter() - begin
    counts = population.statistics()
    begin, swaps = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.5 * rate_s:
        swaps += population.refine(middle_temperature(start), 64 * population.sizes.tries)
        population.synchronize()
    return {
        "scored_per_s": float(counts.num_scored.sum()) / spent,
        "scored_per_member_per_s": float(counts.num_scored.mean()) / spent,
        "accepted_per_s": float(counts.num_accepted.sum()) / spent,
        "round_us": 1e6 * spent / rounds,
        "swaps_per_s": swaps / (time.perf_counter() - begin),
    }


def torch_search(start: Start, population: TorchPopulation, budget_s: float, swap_s: float) -> dict[str, Any]:
    """Anneal by the clock with resampling between levels; ``swap_s`` is the time of one round of expert swaps."""
    schedule, members = start.schedule, population.num_members
    rng = np.random.default_rng(0)
    population.restart(np.tile(start.cell_of, (members, 1)), start.rank_of)
    swap_rounds = int(min(schedule.refine_depth * population.sizes.experts, max(16, 0.01 * budget_s / swap_s)))
    anneal_s = refine_s = 0.0
    level = num_resampled = 0
    begin = now = time.perf_counter()
    while now - begin < budget_s:
        fraction = (now - begin) / budget_s
        temperature = schedule.temperature(fraction, 1, start.unit)
        if refine_s < schedule.refine_share * (anneal_s + refine_s):
            smooth = schedule.smooth(fraction, 1)
            warmth = schedule.smooth_temperature if smooth else 1.0
            population.refine(warmth * temperature, swap_rounds * population.sizes.tries, smooth=smooth)
            population.synchronize()
            refine_s += time.perf_counter() - now
        else:
            population.anneal(temperature, 16)
            population.synchronize()
            anneal_s += time.perf_counter() - now
        now = time.perf_counter()
        if members > 1 and int((now - begin) / budget_s * schedule.num_levels) > level:
            level = int((now - begin) / budget_s * schedule.num_levels)
            following = schedule.temperature(min(1.0, (now - begin) / budget_s), 1, start.unit)
            weights = resampling_weights(population.energies().cpu().numpy(), temperature, following)
            parents = systematic_resample(weights, rng.random())
            population.resample(parents)
            num_resampled += members - np.unique(parents).size
    score = population.best()[2]
    counts = population.statistics()
    return {
        "gap": start.gap(score.slowest_shard),
        "seconds": time.perf_counter() - begin,
        "scored": int(counts.num_scored.sum()),
        "swapped": int(counts.num_swaps.sum()),
        "replaced_members": int(num_resampled),
    }


def torch_engine(start: Start, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates of every configuration; quality at all budgets of the one that is best at the middle budget."""
    results = []
    for members, tries in options.configurations:
        if options.device == "cuda":
            free, _ = torch.cuda.mem_get_info()
            members = min(members, int(MEMORY_SHARE * free / TorchPopulation.member_bytes(start.problem, tries)))
        population = make_population(start, options.device, members, tries, options.compiled)
        rate = torch_rate(start, population, options.rate_s)
        swap_s = members * start.problem.demand.shape[1] * tries / rate["swaps_per_s"]
        middle = options.budgets[len(options.budgets) // 2]
        found = {str(middle): torch_search(start, population, middle, swap_s)}
        results.append({"members": members, "tries": tries, **rate, "swap_round_s": swap_s, "search": found})
        del population
        if options.device == "cuda":
            torch.cuda.empty_cache()
    best = min(results, key=lambda r: min(found["gap"] for found in r["search"].values()))
    population = make_population(start, options.device, best["members"], best["tries"], options.compiled)
    for budget_s in options.budgets:
        if str(budget_s) not in best["search"]:
            found = torch_search(start, population, budget_s, best["swap_round_s"])
            best["search"][str(budget_s)] = found
    return results


def versions(device: str) -> dict[str, Any]:
    names = ("numpy", "numba", "torch")
    result: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    result |= {"python": platform.python_version(), "routepack": __version__, "cuda": torch.version.cuda}
    result["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result["cpu"] = platform.processor() or platform.machine()
    result["cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    result["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--presets", type=lambda text: text.split(","), default=list(PRESET_NAMES))
    parser.add_argument("--samples", type=int, help="samples of a window, default the preset's")
    parser.add_argument("--budgets", type=lambda text: [float(b) for b in text.split(",")], default=[0.1, 1.0, 10.0])
    parser.add_argument(
        "--compiled", action="store_true", help="fuse kernels; a minute or two a window, one configuration"
    )
    parser.add_argument("--quick", action="store_true", help="one small window, few members, short budgets")
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu_layout.json"))
    options = parser.parse_args(arguments)
    options.configurations, options.rate_s = CONFIGURATIONS, 1.0
    if options.compiled:
        options.configurations = CONFIGURATIONS[1:2]
    if options.quick:
        options.presets, options.samples = ["tiny"], 64
        options.budgets, options.configurations, options.rate_s = [0.05, 0.2], ((4, 4), (8, 8)), 0.1
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    begin = time.perf_counter()
    warmup()
    report: dict[str, Any] = {"machine": versions(options.device), "compiled": options.compiled, "windows": []}
    for preset in options.presets:
        start = make_start(preset, options.samples)
        n, num_layers, num_experts = start.problem.demand.shape
        window = {
            "window": preset,
            "samples": n,
            "layers": num_layers,
            "experts": num_experts,
            "ep": start.problem.num_expert_ranks,
            "dp": start.problem.num_ranks,
            "shards": len(start.problem.shards),
            "rows": start.problem.num_rows,
            "start_gap": start.gap(start.chain().score().slowest_shard),
            "torch": torch_engine(start, options),
            "cpu_engine": cpu_engine(start, options.budgets, options.rate_s),
            "numpy": numpy_engine(start, options.budgets, options.rate_s),
        }
        report["windows"].append(window)
        report["seconds"] = time.perf_counter() - begin
        options.out.write_text(
            json.dumps(report, indent=1) + "\n", encoding="utf-8"
        )  # after each: a cut run keeps some
        show(window)


def show(window: dict[str, Any]) -> None:
    print(f"{window['window']}: start {100 * window['start_gap']:.2f}% above the averaging bound")
    for name in ("numpy", "cpu_engine"):
        gaps = ", ".join(f"{b} s {100 * gap:.2f}%" for b, gap in window[name]["gap"].items())
        print(f"  {name:24} {window[name]['scored_per_s'] / 1e6:9.4f} M scored/s   {gaps}")
    for entry in window["torch"]:
        name = f"torch {entry['members']} x {entry['tries']}"
        gaps = ", ".join(f"{b} s {100 * s['gap']:.2f}%" for b, s in sorted(entry["search"].items()))
        rate = f"{entry['scored_per_s'] / 1e6:9.4f} M scored/s ({entry['round_us']:.0f} us a round)"
        print(f"  {name:24} {rate}   {gaps}", flush=True)


if __name__ == "__main__":
    main()
