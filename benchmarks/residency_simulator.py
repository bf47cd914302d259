"""Speed of the residency simulator on one core: python benchmarks/residency_simulator.py [--rounds 5]

Token-group events a second (one event: one (block, layer, expert, source) record through its seven stages), windows a
second of the stage-level model and of the fast map, and single-expert edits scored a second. Best of the rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.machine.scene import Scene, build_scene
from routepack_opt.residency.mapping.mapping import FAST, assign
from routepack_opt.residency.simulator.event import EventModel
from routepack_opt.residency.simulator.layout import Layout
from routepack_opt.residency.simulator.simulate_window import warmup
from routepack_opt.residency.simulator.stage import StageModel

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = (("deepseek-v3", 2048), ("deepseek-v3", 512), ("deepseek-v2-lite", 2048), ("mixtral-8x7b", 512))


def spread_layout(scene: Scene, rng: np.random.Generator) -> Layout:
    """One copy of every expert and 0.3 more of random ones, in random legal places."""
    layout = Layout(scene)
    num_primaries = scene.num_layers * scene.num_experts
    wanted = [divmod(k, scene.num_experts) for k in range(num_primaries)]
    wanted += [divmod(int(k), scene.num_experts) for k in rng.choice(num_primaries, int(0.3 * num_primaries))]
    for layer, expert in wanted:
        legal = np.argwhere(layout.may_add(layer, expert))
        if len(legal):
            layout.add(layer, expert, *legal[rng.integers(len(legal))].tolist())
    return layout


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Best of ``rounds``, each of at least 50 ms."""
    repeat, best = 1, float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        elapsed = (time.perf_counter() - start) / repeat
        best = min(best, elapsed)
        repeat = max(1, round(0.05 / elapsed))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1, help="token blocks a source chiplet")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warmup()
    rows = []
    for name, tokens in CASES:
        rng, scene = np.random.default_rng(0), build_scene("paper", name)
        layout, stage, event = spread_layout(scene, rng), StageModel(scene), EventModel(scene, args.blocks)
        share = rng.dirichlet(np.full(scene.num_experts, 0.3), size=scene.num_layers)
        mean = tokens * scene.top_k * share[:, :, None] / scene.num_chiplets
        demand = rng.poisson(np.broadcast_to(mean, (*share.shape, scene.num_chiplets))).astype(np.int32)
        slots = assign(stage.tables, layout, demand, FAST)
        base = stage.evaluate(layout, demand, slots)
        layers, experts = rng.integers(0, scene.num_layers, 100), rng.integers(0, scene.num_experts, 100)
        edits = layout.tier[layers, experts], layout.chiplet[layers, experts]
        groups = event.num_groups(demand)
        event_s = seconds(lambda: event.simulate(layout, demand, slots), args.rounds)
        stage_s = seconds(lambda: stage.evaluate(layout, demand, slots), args.rounds)
        map_s = seconds(lambda: assign(stage.tables, layout, demand, FAST), args.rounds)
        edit_s = seconds(lambda: stage.score_edits(layout, demand, base, layers, experts, *edits), args.rounds)
        rows.append(
            {
                "model": name,
                "tokens": tokens,
                "layers": scene.num_layers,
                "groups": groups,
                "events_per_s": groups / event_s,
                "event_ms": event_s * 1e3,
                "stage_ms": stage_s * 1e3,
                "map_ms": map_s * 1e3,
                "ms_per_100_edits": edit_s * 1e3,
            }
        )
    if args.json:
        print(json.dumps(rows))
        return
    print("model               tokens  layers  groups  M events/s  event ms  stage ms  fast map ms  100 edits ms")
    for row in rows:
        head = f"{row['model']:18s} {row['tokens']:7d} {row['layers']:7d} {row['groups']:7d}"
        times = f"{row['event_ms']:9.3f} {row['stage_ms']:9.3f} {row['map_ms']:12.3f} {row['ms_per_100_edits']:13.3f}"
        print(f"{head} {row['events_per_s'] / 1e6:11.2f} {times}")


if __name__ == "__main__":
    main()
