"""``routepack replay``: step time of a plan from the kernels it runs, on the one device that is here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import check_output, plural, print_json, table
from routepack_opt.cli.step_table import step_lines

if TYPE_CHECKING:
    import argparse

    from routepack_opt.plan import Plan
    from routepack_opt.simulation.kernel_shape import KernelShape
    from routepack_opt.simulation.layouts import Layout
    from routepack_opt.simulation.replay import Replay
    from routepack_opt.window import Window

# routepack.md section 8: throughput gains the paper reports over its baseline
PAPER = {"Tiny": ("+3.80%", "+8.85%"), "Flash": ("+10.50%", "+14.89%")}

DESCRIPTION = """\
Run the kernels of a plan on one device - attention of every cell, experts of every row, shard,
EP rank and MoE layer - and add their times up as the job would wait for them. Step time of one
plan against another, without a cluster. Communication is not in it: see 'routepack simulate'.
"""

EPILOG = """\
examples:
  routepack replay plan.json window.npz --baseline --scale 0.1
  routepack replay plan.json window.npz --against other.json --device cuda --model qwen3-30b-a3b
  routepack replay plan.json window.npz --save measurements.json     (then: routepack calibrate)

Each distinct kernel is run once a round, in shuffled rounds; docs/step-time.md says what is timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of replay."""
    positive = integer(1)
    parser.usage = "routepack replay PLAN.json WINDOW.npz [options]"
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("window", metavar="WINDOW.npz", help="the window the plan was made for")
    others = parser.add_argument_group("compared with")
    others.add_argument("--against", metavar="OTHER.json", help="another plan of the same window")
    others.add_argument(
        "--baseline",
        action="store_true",
        help="experts at home with first-fit rows, and with RoutePack's rows ('reorder'); both are made here",
    )
    others.add_argument(
        "--budget", type=number(0.0, 1e6, "a number of seconds >= 0"), default=1.0, metavar="S",
        help="planning seconds of 'reorder' (default 1)",
    )  # fmt: skip
    add_shape_arguments(parser)
    timing = parser.add_argument_group("timing")
    timing.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default cpu)")
    timing.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    timing.add_argument("--repeats", type=positive, default=5, metavar="N", help="rounds after a warm-up (default 5)")
    timing.add_argument(
        "--statistic", choices=("median", "min"), default="median", help="what stands for a kernel's runs"
    )
    timing.add_argument(
        "--time-budget", type=number(0.0, 1e6, "a number of seconds >= 0"), metavar="S",
        help="measure about so long: MoE layers are sampled to fit, and the result says so",
    )  # fmt: skip
    timing.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of data and order (default 0)")
    timing.add_argument("--save", metavar="FILE", help="kernel times, with a sweep of sizes, for 'routepack calibrate'")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Tensor sizes of the kernels."""
    positive = integer(1)
    sizes = parser.add_argument_group("sizes of the kernels (default: those of the window's synthetic preset)")
    sizes.add_argument("--model", metavar="NAME", help="preset, or a Hugging Face config.json")
    sizes.add_argument(
        "--scale", type=number(1e-6, 1.0, "a share in (0, 1]"), default=1.0, metavar="X", help="all widths times X"
    )
    sizes.add_argument("--hidden", type=positive, metavar="N", help="model dimension")
    sizes.add_argument("--expert-width", type=positive, metavar="N", help="intermediate size of a routed expert")
    sizes.add_argument("--heads", type=positive, metavar="N", help="attention heads")
    sizes.add_argument("--head-dim", type=positive, metavar="N", help="size of a head")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    from routepack_opt.plan import Plan
    from routepack_opt.simulation.layouts import comparison_layouts, plan_layout
    from routepack_opt.window import Window

    if options.save is not None:
        check_output(options.save, options.plan, options.window, options.against)
    plan, window = Plan.load(options.plan), Window.load(options.window)
    layouts = [plan_layout(plan, window, "full" if options.baseline else "plan", options.plan)]
    if options.against is not None:
        other = plan_layout(Plan.load(options.against), window, "against", options.against)
        layouts.insert(0, other)
    if options.baseline:
        layouts[:0] = comparison_layouts(plan, window, budget_s=options.budget, seed=options.seed)
    shape, notes = resolve_shape(options, window)
    result, about = _measure(options, plan, window, layouts, shape)
    if window.counts == "predicted":
        notes.append("counts: predicted (the demand comes from an older policy)")
    notes += result.notes
    if options.save is not None:
        _save(options, plan, window, result, shape, about)
    if options.json:
        print_json(_as_json(result, shape, window, about, notes))
    else:
        _print(options, result, shape, window, about, notes)
    return 0


def resolve_shape(options: argparse.Namespace, window: Window) -> tuple[KernelShape, list[str]]:
    """The sizes asked for, and what to note about them."""
    from routepack_opt.errors import InvalidInput
    from routepack_opt.simulation.kernel_shape import gqa_shape, model_kernel_shape, scaled, synth_shape
    from routepack_opt.synth import PRESETS

    given = {name: getattr(options, name) for name in ("hidden", "expert_width", "heads", "head_dim")}
    notes = []
    if options.model is not None:
        if any(value is not None for value in given.values()):
            raise InvalidInput("--hidden, --expert-width, --heads and --head-dim do not go with --model")
        shape = synth_shape(PRESETS[options.model]) if options.model in PRESETS else model_kernel_shape(options.model)
    elif any(value is not None for value in given.values()):
        missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
        if missing:
            raise InvalidInput(f"sizes: {', '.join(missing)} missing; give all four, or --model")
        shape = gqa_shape("given sizes", num_layers=window.num_layers, **given)
    else:
        synth = window.meta.get("synth")
        preset = synth.get("preset") if isinstance(synth, dict) else None
        if not isinstance(preset, str) or preset not in PRESETS:
            raise InvalidInput("sizes: the window names no preset; give --model, or --hidden and the other sizes")
        shape = synth_shape(PRESETS[preset])
        notes.append(f"sizes: {shape.name} (hidden {shape.hidden}, expert width {shape.expert_width}), our choice")
    return scaled(shape, options.scale), notes


def _measure(
    options: argparse.Namespace, plan: Plan, window: Window, layouts: list[Layout], shape: KernelShape
) -> tuple[Replay, dict[str, Any]]:
    import datetime

    from routepack_opt.errors import InvalidInput, MissingDependency
    from routepack_opt.simulation.measurements import sweep_kernels
    from routepack_opt.simulation.replay import replay

    try:
        from routepack_opt.simulation.torch_kernels import TorchTimer, device_name
    except ImportError:
        raise MissingDependency("replay needs torch; install it with: pip install routepack-opt[train]") from None
    extra = []
    if options.save is not None:
        slots = plan.topology.experts_per_rank(window.num_experts)
        most = int(window.total_load.sum(axis=1).max()) // (plan.rows * plan.topology.num_shards * plan.topology.ep)
        extra = sweep_kernels(len(shape.blocks), plan.token_cap, slots, max(1, most))
    try:
        timer = TorchTimer(shape, device=options.device, backward=not options.forward_only, seed=options.seed)
        result = replay(
            window,
            layouts,
            shape,
            timer,
            sync=plan.cost.sync,
            repeats=options.repeats,
            budget_s=options.time_budget,
            statistic=options.statistic,
            extra=extra,
            seed=options.seed,
        )
    except RuntimeError as error:  # torch says "out of memory" this way, on CPUs and GPUs
        if not any(word in str(error).lower() for word in ("memory", "overflow")):
            raise
        raise InvalidInput("the kernels do not fit in the memory of this device; lower the sizes or --scale") from None
    about = {
        "device": device_name(timer.device),
        "dtype": str(timer.dtype).removeprefix("torch."),
        "backward": timer.backward,
        "date": datetime.date.today().isoformat(),
    }
    return result, about


def _save(
    options: argparse.Namespace, plan: Plan, window: Window, result: Replay, shape: KernelShape, about: dict[str, Any]
) -> None:
    from routepack_opt.files import write_json
    from routepack_opt.simulation.measurements import measurements_json

    value = measurements_json(
        result.measured,
        shape,
        num_moe_layers=window.num_layers,
        token_cap=plan.token_cap,
        statistic=result.statistic,
        about=about,
    )
    write_json(options.save, value, indent=1)


def _as_json(
    result: Replay, shape: KernelShape, window: Window, about: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    first, tokens = result.step_times[0], int(window.lengths.sum())
    return {
        **about,
        "shape": shape.to_json(),
        "layouts": [
            {
                "name": t.name,
                "rows": len(t.attention_s),
                "step_s": t.step_s,
                "tokens_per_s": tokens / t.step_s if t.step_s > 0 else None,
                "throughput_change": first.step_s / t.step_s - 1 if t.step_s > 0 else None,
                "attention_s": float(t.attention_s.sum()),
                "experts_s": float(t.experts_s.sum()),
                "shards": [
                    {"attention_s": float(a), "experts_s": float(e)}
                    for a, e in zip(t.attention_s.sum(axis=0), t.experts_s.sum(axis=0), strict=True)
                ],
                "measured_layers": t.num_measured_layers,
                "layers": t.num_layers,
            }
            for t in result.step_times
        ],
        "kernels": len(result.measured),
        "statistic": result.statistic,
        "measured_in_s": result.seconds,
        "notes": notes,
    }


def _print(
    options: argparse.Namespace,
    result: Replay,
    shape: KernelShape,
    window: Window,
    about: dict[str, Any],
    notes: list[str],
) -> None:
    passes = "forward and backward" if about["backward"] else "forward"
    print(
        f"{about['device']}, {about['dtype']}, {passes}; hidden {shape.hidden}, expert width {shape.expert_width}"
        f" ({shape.name})\n"
    )
    times, tokens = result.step_times, int(window.lengths.sum())
    lines = step_lines(
        "", [t.name for t in times], [len(t.attention_s) for t in times], [t.step_s for t in times], tokens
    )  # fmt: skip
    for shard in range(max(t.attention_s.shape[1] for t in times)):
        for name in ("attention", "experts"):
            parts = [getattr(t, f"{name}_s") for t in times]
            values = [f"{part[:, shard].sum():.4f}" if shard < part.shape[1] else "" for part in parts]
            lines.append([f"shard {shard}: {name}", *values])
    print(table(lines))
    if options.baseline:
        quoted = "; ".join(f"{name} {reorder}, {full}" for name, (reorder, full) in PAPER.items())
        print(f"\nthe paper's runs, whole steps on a cluster (reorder, full): {quoted}")
    print()
    for note in notes:
        print(f"note      {note}")
    print(f"measured  {plural(len(result.measured), 'distinct kernel')} in {result.seconds:.1f} s")
    if options.save is not None:
        print(f"wrote     {options.save}")
    sys.stdout.flush()
