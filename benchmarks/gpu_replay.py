"""Step time from real kernels, baseline -> reorder -> full, on Tiny- and Flash-shaped windows: one markdown table.

    python benchmarks/gpu_replay.py -o gpu_replay.json            under ten minutes on one GPU of 80 GB or more
    python benchmarks/gpu_replay.py --small --layers 2            minutes on a CPU: narrow kernels, short samples

Baseline: experts at home, first-fit-decreasing rows. Reorder: experts at home, RoutePack's rows. Full: the plan. The
paper's figures beside them are whole steps on its cluster, with communication; these are kernels only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import routepack_opt as rp
from routepack_opt.simulation.kernel_shape import KernelShape, scaled, synth_shape
from routepack_opt.simulation.layouts import comparison_layouts, plan_layout
from routepack_opt.simulation.measurements import measurements_json, sweep_kernels
from routepack_opt.simulation.replay import replay
from routepack_opt.simulation.timing import spread_layers
from routepack_opt.simulation.torch_kernels import TorchTimer, device_name
from routepack_opt.synth import PRESETS, synth

PAPER = {"tiny": ("+3.80%", "+8.85%"), "flash": ("+10.50%", "+14.89%")}  # routepack.md section 8
SMALL = {"tiny": 8, "flash": 16}  # widths, lengths and cap divided: the parts of a step keep their proportions


def one_window(preset_name: str, options: argparse.Namespace, timer_options: dict[str, Any]) -> dict[str, Any]:
    """Plan, measure and add up one window."""
    preset = PRESETS[preset_name]
    scale = options.scale
    if options.small:
        divisor = SMALL[preset_name]
        scale = 1.0 / divisor
        preset = replace(
            preset,
            mean_length=preset.mean_length / divisor,
            prompt_tokens=preset.prompt_tokens / divisor,
            token_cap=preset.token_cap // divisor,
        )
    shape = scaled(synth_shape(preset), scale)
    window = synth(preset, options.samples, seed=options.seed)
    plan = rp.plan_window(
        window, preset.topology, token_cap=preset.token_cap, cost=shape.cost(preset.token_cap),
        budget_s=options.plan_budget, seed=options.seed,
    )  # fmt: skip
    layouts = comparison_layouts(plan, window, budget_s=options.plan_budget, seed=options.seed)
    layouts.append(plan_layout(plan, window, "full"))
    timer = TorchTimer(shape, **timer_options)
    extra = []
    if options.folder is not None:
        slots = plan.topology.experts_per_rank(window.num_experts)
        most = int(window.total_load.sum(axis=1).max()) // (plan.rows * plan.topology.num_shards * plan.topology.ep)
        extra = sweep_kernels(len(shape.blocks), plan.token_cap, slots, most)
    result = replay(
        window, layouts, shape, timer, repeats=options.repeats, statistic=options.statistic,
        budget_s=None if options.layers else options.budget,
        layers=spread_layers(window.num_layers, options.layers) if options.layers else None,
        extra=extra, seed=options.seed,
    )  # fmt: skip
    about = {
        "device": device_name(timer.device),
        "dtype": str(timer.dtype).removeprefix("torch."),
        "backward": True,
        "date": datetime.date.today().isoformat(),
    }
    if options.folder is not None:
        value = measurements_json(
            result.measured, shape, num_moe_layers=window.num_layers, token_cap=plan.token_cap,
            statistic=options.statistic, about=about,
        )  # fmt: skip
        path = options.folder / f"{preset_name}.measurements.json"
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")
    return record(preset_name, window, shape, result, about)


def record(preset: str, window: rp.Window, shape: KernelShape, result: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Plain values of one window."""
    first = result.step_times[0]
    return {
        **about,
        "window": preset,
        "samples": window.num_samples,
        "tokens": int(window.lengths.sum()),
        "hidden": shape.hidden,
        "expert_width": shape.expert_width,
        "kernels": len(result.measured),
        "seconds": result.seconds,
        "notes": list(result.notes),
        "layouts": [
            {
                "name": t.name,
                "rows": len(t.attention_s),
                "step_s": t.step_s,
                "gain": first.step_s / t.step_s - 1,
                "attention_s": float(t.attention_s.sum()),
                "experts_s": float(t.experts_s.sum()),
            }
            for t in result.step_times
        ],
    }


def table(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = records[0]
    lines = [
        f"{head['device']}, torch {torch.__version__}, {head['dtype']}, forward and backward, {head['date']}",
        "",
        "| window | layout | rows | step, s | attention, s | experts, s | throughput | the paper |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in records:
        name = f"{entry['window']}, {entry['samples']} samples, hidden {entry['hidden']}, {entry['expert_width']} wide"
        for layout, paper in zip(entry["layouts"], ("", *PAPER[entry["window"]]), strict=True):
            gain = "" if layout["name"] == "baseline" else f"{100 * layout['gain']:+.2f}%"
            numbers = [f"{layout[key]:.4g}" for key in ("step_s", "attention_s", "experts_s")]
            lines.append(f"| {name} | {layout['name']} | {layout['rows']} | {' | '.join(numbers)} | {gain} | {paper} |")
    notes = [f"- {entry['window']}: {note}" for entry in records for note in entry["notes"]]
    return "\n".join([*lines, "", *notes])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="results as JSON")
    parser.add_argument("--folder", type=Path, help="kernel times for 'routepack calibrate', one file a window")
    parser.add_argument("--presets", nargs="+", default=["tiny", "flash"], choices=sorted(PAPER))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--statistic", choices=("median", "min"), default="median")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds of measuring a window")
    parser.add_argument("--plan-budget", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="measure so many MoE layers, whatever the time")
    parser.add_argument("--small", action="store_true", help="CPU, one thread, narrow kernels, short samples")
    options = parser.parse_args(arguments)
    if options.small:
        options.device = "cpu"
        torch.set_num_threads(1)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    records = []
    for preset in options.presets:
        records.append(one_window(preset, options, {"device": options.device, "seed": options.seed}))
        if options.out is not None:  # after each: a cut run keeps some
            options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(table(records))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
