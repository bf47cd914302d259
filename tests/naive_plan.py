"""A planner too simple to be wrong: samples dealt round robin, experts where they stand. For tests of the checker."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from routepack_opt import Constraints, CostModel, Topology, Window
from routepack_opt.cost import rank_loads, score
from routepack_opt.plan import FORMAT


def small_window(
    seed: int = 0, num_samples: int = 12, num_layers: int = 2, num_experts: int = 8, **extra: Any
) -> Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, num_samples)
    demand = rng.integers(0, 40, (num_samples, num_layers, num_experts))
    return Window(lengths, demand, **extra)


def deal(num_samples: int, num_rows: int, dp: int) -> list[list[list[int]]]:
    cells: list[list[list[int]]] = [[[] for _ in range(dp)] for _ in range(num_rows)]
    for sample in range(num_samples):
        cells[sample // dp % num_rows][sample % dp].append(sample)
    return cells


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def naive_plan(
    window: Window,
    topology: Topology,
    token_cap: int,
    *,
    cells: list[list[list[int]]] | None = None,
    num_rows: int = 1,
    cost: CostModel | None = None,
    constraints: Constraints | None = None,
    units: list[int] | None = None,
) -> dict[str, Any]:
    """The plain plan.json object; ``units`` are the padded tokens of what is packed as a whole (default: samples)."""
    cost = cost or CostModel.default(window.num_layers, token_cap)
    rules = constraints or Constraints()
    cells = cells or deal(window.num_samples, num_rows, topology.dp)
    slots = np.tile(np.arange(window.num_experts), (window.num_layers, 1))
    loads = rank_loads(window, cells, slots, topology).sum(axis=(0, 1))  # [L, P]
    mean = [-(-int(total) // topology.ep) for total in loads.sum(axis=1)]

    if units is None:
        units = [round_up(int(t), rules.pad_multiple) for t in window.lengths]
    fitting = [t for t in units if t <= token_cap]
    num_cells = -(-sum(fitting) // token_cap) + len(units) - len(fitting)
    bound_rows = round_up(max(-(-num_cells // topology.dp), rules.min_rows), rules.row_multiple)

    value = score(window, cells, slots, topology, token_cap, cost)
    tokens, squares = int(window.lengths.sum()), sum(int(t) ** 2 for t in window.lengths)
    attention = sum(s.alpha * tokens / token_cap + s.beta * squares / token_cap**2 for s in cost.stages) / topology.dp
    gammas = cost.expert_weights(window.num_layers)
    smallest = min(map(len, topology.shards))
    experts = math.fsum(gammas * mean) / token_cap * smallest / topology.dp
    bound = attention + experts
    return {
        "format": FORMAT,
        "version": "0",
        "window": {
            "samples": window.num_samples,
            "layers": window.num_layers,
            "experts": window.num_experts,
            "sha256": window.sha256,
        },
        "topology": {"dp": topology.dp, "ep": topology.ep, "shards": [list(s) for s in topology.shards]},
        "token_cap": token_cap,
        "cost": cost.to_json(),
        "constraints": rules.to_json(),
        "rows": len(cells),
        "rows_lower_bound": bound_rows,
        "rows_status": "certified" if bound_rows == len(cells) else "best-known",
        "cells": cells,
        "cell_tokens": [[int(window.lengths[c].sum()) for c in row] for row in cells],
        "total_tokens": tokens,
        "logical_to_slot": slots.tolist(),
        "score": list(value),
        "seed_score": list(value),
        "seed_rows": len(cells),
        "bound": bound,
        "gap": (value.slowest_shard - bound) / bound if bound else value.slowest_shard,
        "moved_experts": [0] * window.num_layers,
        "certificates": {
            "rows": {
                "kind": "volume",
                "cap": token_cap,
                "table": [[t, t] for t in sorted(set(fitting))],
                "max_cell": token_cap,
                "cells": num_cells,
            },
            "placement": [
                {"bound": b, "kind": "mean", "reached": int(r)} for b, r in zip(mean, loads.max(axis=1), strict=True)
            ],
            "layout": {"kind": "averaging", "attention": attention, "experts": experts, "value": bound},
        },
        "notes": [],
        "seed": 0,
        "timings": {},
    }
