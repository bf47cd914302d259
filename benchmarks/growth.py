"""How planning time grows with samples N, layers L, experts E, EP ranks P and shards G, one at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from routepack_opt.planner import plan_window, warmup
from routepack_opt.synth import PRESETS, synth
from routepack_opt.topology import Topology

STEPS = 20_000  # proposals per chain of the second figure; two chains
BASE = {"N": 512, "L": 24, "E": 128, "P": 8, "G": 1}
VALUES = {
    "N": (128, 256, 512, 1024, 2048),
    "L": (6, 12, 24, 48, 96),
    "E": (32, 64, 128, 256, 512),
    "P": (2, 4, 8, 16, 32),
    "G": (1, 2, 4, 8),
}


def measure(values: dict[str, int], repeats: int) -> dict[str, Any]:
    """Best of ``repeats``: seconds to the first plan, and to one after ``STEPS`` proposals a chain."""
    dp = values["P"] * values["G"]
    cap = 8192
    # four rows' worth of tokens, so that N and not the row count is what grows
    mean = min(0.97 * 4 * dp * cap / values["N"], 0.5 * cap)
    preset = replace(
        PRESETS["tiny"],
        num_samples=values["N"],
        num_layers=values["L"],
        num_experts=values["E"],
        mean_length=mean,
        prompt_tokens=0.1 * mean,
        token_cap=cap,
    )
    window = synth(preset)
    window.sha256
    topology = Topology(ep=values["P"], shards=values["G"])
    result: dict[str, Any] = {**values, "D": dp}
    for name, steps in (("first_plan_s", 0), ("steps_s", STEPS)):
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            plan = plan_window(window, topology, token_cap=cap, budget_steps=steps)
            best = min(best, time.perf_counter() - start)
        result[name] = best
        result["rows"] = plan.rows
    return result


def growth(repeats: int = 2, values: dict[str, tuple[int, ...]] | None = None) -> list[dict[str, Any]]:
    """One measurement per value of each size, the others at :data:`BASE`; ``varied`` names the size."""
    warmup()
    done: dict[tuple[int, ...], dict[str, Any]] = {}
    results = []
    for name, list_of_values in (values or VALUES).items():
        for value in list_of_values:
            sizes = {**BASE, name: value}
            key = tuple(sizes.values())
            if key not in done:
                done[key] = measure(sizes, repeats)
            results.append({"varied": name, **done[key]})
    return results
