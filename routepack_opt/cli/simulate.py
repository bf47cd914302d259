"""``routepack simulate``: step time on a cluster that is not here; everything it prints is called simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import print_json, table
from routepack_opt.cli.replay import PAPER, add_shape_arguments, resolve_shape
from routepack_opt.cli.step_table import step_lines

if TYPE_CHECKING:
    import argparse

    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.plan import Plan
    from routepack_opt.simulation.cluster import Cluster
    from routepack_opt.simulation.kernel_shape import KernelShape
    from routepack_opt.simulation.simulate import Assumptions, Simulated
    from routepack_opt.simulation.step_model import StepModel
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

DESCRIPTION = """\
Predict the step time of a plan on a cluster: attention and experts from measured times
('routepack calibrate') or from a sheet's flops and memory rate, token all-to-all inside and
between nodes, pipeline bubble, and the exposed part of moving experts. A model, not a
measurement.
"""

EPILOG = """\
examples:
  routepack simulate plan.json window.npz --gpu h200_sxm --model qwen3-30b-a3b --baseline
  routepack simulate plan.json window.npz --gpu sheet.yaml --step-time step_time.json --against other.json

A sheet is YAML with the fields gpu (bfloat16_tc_flops, mem_bw) and node (num_gpus_per_node,
intra_node_bw, inter_node_bw, p2p_latency); docs/step-time.md has the formulas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of simulate."""
    positive = integer(1)
    share = number(0.0, 1.0, "a share between 0 and 1")
    parser.usage = "routepack simulate PLAN.json WINDOW.npz --gpu SHEET [options]"
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("window", metavar="WINDOW.npz", help="the window the plan was made for")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpu", required=True, metavar="SHEET", help="a YAML file, or the name of a known sheet")
    cluster.add_argument("--nodes", type=positive, metavar="N", help="spread the job's GPUs over N nodes")
    cluster.add_argument("--pipeline", type=positive, default=1, metavar="N", help="pipeline stages (default 1)")
    add_shape_arguments(parser)
    model = parser.add_argument_group("model of the step")
    model.add_argument("--step-time", metavar="FILE", help="measured kernels, from 'routepack calibrate'")
    model.add_argument(
        "--efficiency", type=number(1e-6, 1.0, "a share in (0, 1]"), default=0.5, metavar="X",
        help="share of peak flops reached, where nothing is measured (default 0.5)",
    )  # fmt: skip
    model.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    model.add_argument("--previous", metavar="PLAN.json", help="the placement in force; default: experts at home")
    model.add_argument(
        "--overlap", type=share, default=0.0, metavar="X", help="share of expert moves hidden (default 0)"
    )
    model.add_argument("--gradients", action="store_true", help="add the gradient reduction, not overlapped")
    others = parser.add_argument_group("compared with")
    others.add_argument("--against", metavar="OTHER.json", help="another plan of the same window")
    others.add_argument("--baseline", action="store_true", help="experts at home: first-fit rows, and RoutePack's rows")
    others.add_argument(
        "--budget", type=number(0.0, 1e6, "a number of seconds >= 0"), default=1.0, metavar="S",
        help="planning seconds of 'reorder' (default 1)",
    )  # fmt: skip
    others.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of 'reorder' (default 0)")


def run(options: argparse.Namespace) -> int:
    """Read, predict, print."""
    from routepack_opt.plan import Plan
    from routepack_opt.simulation.cluster import load_cluster
    from routepack_opt.simulation.layouts import comparison_layouts, plan_layout
    from routepack_opt.simulation.simulate import Assumptions, simulate
    from routepack_opt.window import Window

    cluster = load_cluster(options.gpu)
    plan, window = Plan.load(options.plan), Window.load(options.window)
    layout = plan_layout(plan, window, "full" if options.baseline else "plan", options.plan)
    shape, notes = resolve_shape(options, window)
    notes += shape.layer_notes(window.num_layers)
    measured = _step_model(options, shape, notes)
    cluster = _on_nodes(options, cluster, plan.topology)
    assumptions = Assumptions(
        efficiency=options.efficiency,
        backward=0.0 if options.forward_only else 2.0,
        pipeline=options.pipeline,
        overlap=options.overlap,
        reduce_gradients=options.gradients,
    )
    standing = _standing(options, plan, window, notes)
    layouts = [layout]
    if options.against is not None:
        layouts.insert(0, plan_layout(Plan.load(options.against), window, "against", options.against))
    if options.baseline:
        layouts[:0] = comparison_layouts(plan, window, budget_s=options.budget, seed=options.seed)
    results = []
    for one in layouts:
        # who stays at home moves nothing; a plan on other EP ranks starts from nowhere known
        known = standing if one.topology.ep == plan.topology.ep and one.name not in ("baseline", "reorder") else None
        results.append(
            simulate(
                window, one, shape, cluster, assumptions, measured=measured, sync=plan.cost.sync, standing_slots=known
            )
        )
    if options.json:
        print_json(_as_json(results, shape, cluster, assumptions, window, notes))
    else:
        _print(options, results, shape, cluster, window, notes)
    return 0


def _step_model(options: argparse.Namespace, shape: KernelShape, notes: list[str]) -> StepModel | None:
    from routepack_opt.simulation.step_model import StepModel

    if options.step_time is None:
        notes.append(f"compute: from the sheet's rates at {100 * options.efficiency:g}% of peak, not from measurements")
        return None
    measured = StepModel.load(options.step_time)
    measured.check_sizes(shape.hidden, shape.expert_width, options.step_time)
    missing = [block.name for block in shape.blocks if block.name not in measured.blocks]
    if measured.experts is None:
        missing.append("experts")
    if missing:
        notes.append(f"compute: {', '.join(missing)} not measured, taken from the sheet's rates")
    notes.append(f"compute: measured times of {measured.source}")
    return measured


def _on_nodes(options: argparse.Namespace, cluster: Cluster, topology: Topology) -> Cluster:
    """The same rates, with the job's GPUs spread over the nodes asked for."""
    import math
    from dataclasses import replace

    from routepack_opt.errors import InvalidInput

    if options.nodes is None:
        return cluster
    gpus = options.pipeline * sum(math.lcm(len(ranks), topology.ep) for ranks in topology.shards)
    if gpus % options.nodes:
        raise InvalidInput(f"nodes: {gpus} GPUs do not divide over {options.nodes} nodes")
    return replace(cluster, gpus_per_node=gpus // options.nodes)


def _standing(options: argparse.Namespace, plan: Plan, window: Window, notes: list[str]) -> NDArray[np.int64] | None:
    """The placement experts leave; None where it is not known, and a note says so."""
    import numpy as np

    from routepack_opt.plan import Plan
    from routepack_opt.simulation.layouts import plan_slots

    if options.previous is not None:
        return plan_slots(Plan.load(options.previous), window, options.previous)
    home = np.tile(np.arange(window.num_experts, dtype=np.int64), (window.num_layers, 1))
    per_rank = plan.topology.experts_per_rank(window.num_experts)
    from_home = (plan.logical_to_slot // per_rank != home // per_rank).sum(axis=1)
    if plan.moved_experts.size and not np.array_equal(from_home, plan.moved_experts):
        notes.append("moves: left out, the plan started from a placement that was not given (--previous)")
        return None
    return home


def _as_json(
    results: list[Simulated],
    shape: KernelShape,
    cluster: Cluster,
    assumptions: Assumptions,
    window: Window,
    notes: list[str],
) -> dict[str, Any]:
    from dataclasses import asdict

    from routepack_opt.simulation.simulate import simulated_json

    tokens = int(window.lengths.sum())
    entries = [simulated_json(result, tokens) for result in results]
    for entry, result in zip(entries, results, strict=True):
        entry["throughput_change"] = results[0].step_s / result.step_s - 1 if result.step_s > 0 else None
    return {
        "simulated": True,
        "cluster": asdict(cluster),
        "assumptions": asdict(assumptions),
        "shape": shape.to_json(),
        "layouts": entries,
        "notes": notes,
    }


def _print(
    options: argparse.Namespace,
    results: list[Simulated],
    shape: KernelShape,
    cluster: Cluster,
    window: Window,
    notes: list[str],
) -> None:
    print(
        f"simulated: {cluster.name}, {cluster.gpus_per_node} GPUs a node; hidden {shape.hidden},"
        f" expert width {shape.expert_width} ({shape.name})\n"
    )
    tokens = int(window.lengths.sum())
    lines = step_lines(
        "simulated",
        [r.name for r in results],
        [len(r.attention_s) for r in results],
        [r.step_s for r in results],
        tokens,
    )
    for shard in range(max(r.attention_s.shape[1] for r in results)):
        for title, name in (("attention", "attention_s"), ("experts", "experts_s"), ("all-to-all", "exchange_s")):
            parts = [getattr(r, name) for r in results]
            values = [f"{part[:, shard].sum():.4f}" if shard < part.shape[1] else "" for part in parts]
            lines.append([f"shard {shard}: {title}", *values])
    for title, name in (
        ("pipeline bubble", "bubble_s"),
        ("expert moves, exposed", "moves_s"),
        ("gradients", "gradients_s"),
    ):
        if any(getattr(r, name) for r in results):
            lines.append([title, *(f"{getattr(r, name):.4f}" for r in results)])
    print(table(lines))
    if options.baseline:
        quoted = "; ".join(f"{name} {reorder}, {full}" for name, (reorder, full) in PAPER.items())
        print(f"\nthe paper's runs, measured on its cluster (reorder, full): {quoted}")
    print()
    for note in notes:
        print(f"note      {note}")
