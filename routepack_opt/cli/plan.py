"""``routepack plan``: the main job, and the table of what was gained and what is proved."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.output import plural, print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.constraints import Constraints
    from routepack_opt.cost import CostModel
    from routepack_opt.plan import Plan
    from routepack_opt.report.gains import LayoutFigures
    from routepack_opt.window import Window

_BYTES_PER_PARAMETER = 14  # bf16 weight + fp32 master + two fp32 Adam moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of plan."""
    parser.add_argument("window", metavar="WINDOW.npz")
    parser.add_argument("-o", "--output", required=True, metavar="PLAN.json")
    sizes = parser.add_argument_group("topology")
    sizes.add_argument("--ep", type=int, required=True, metavar="P", help="EP ranks of a shard")
    sizes.add_argument("--dp", type=int, metavar="D", help="DP ranks; default ep x shards")
    sizes.add_argument("--shards", type=int, metavar="G", help="EDP shards; default 1, or dp // ep when --dp is given")
    parser.add_argument("--token-cap", type=int, required=True, metavar="C", help="most tokens of a cell")
    costs = parser.add_argument_group("cost").add_mutually_exclusive_group()
    costs.add_argument("--cost", metavar="cost.json", help="stages and expert weight; see docs/cost-model.md")
    costs.add_argument("--model", metavar="NAME", help="a model preset, or a Hugging Face config.json")
    search = parser.add_argument_group("search")
    search.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds (default 1)")
    search.add_argument("--budget-steps", type=int, metavar="K", help="proposals per chain instead of seconds: reproducible")
    search.add_argument("--seed", type=int, default=0, metavar="S")
    search.add_argument("--device", default="auto", metavar="D", help="auto or cpu")
    search.add_argument("--previous", metavar="plan.json", help="the placement in force; default: slot e holds expert e")
    limits = parser.add_argument_group("constraints")
    limits.add_argument("--min-rows", type=int, default=1, metavar="R")
    limits.add_argument("--row-multiple", type=int, default=1, metavar="M")
    limits.add_argument("--pad-multiple", type=int, default=1, metavar="M", help="the cap counts lengths rounded up to this")
    limits.add_argument("--max-samples", type=int, metavar="K", help="most samples of a cell")
    limits.add_argument("--equal-samples", action="store_true", help="the same number of samples on every DP rank")
    limits.add_argument(
        "--keep-groups",
        nargs="?",
        const="cell",
        choices=("cell", "rank"),
        help="samples of one group_id stay in one cell (default) or on one DP rank",
    )
    limits.add_argument("--oversize", choices=("error", "alone"), default="error", help="samples longer than the cap")
    limits.add_argument("--max-moved", type=float, metavar="SHARE", help="largest share of experts that change EP rank")
    parser.add_argument("--expert-bytes", type=int, metavar="B", help="bytes moved with one expert; default from --model")


def run(options: argparse.Namespace) -> int:
    """Plan, write, print."""
    from routepack_opt.constraints import Constraints
    from routepack_opt.plan import Plan
    from routepack_opt.planner import plan_window
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

    _check_output(options.output)
    topology = Topology(dp=options.dp, ep=options.ep, shards=options.shards)
    constraints = Constraints(
        min_rows=options.min_rows,
        row_multiple=options.row_multiple,
        pad_multiple=options.pad_multiple,
        max_samples_per_cell=options.max_samples,
        equal_samples_per_rank=options.equal_samples,
        groups=options.keep_groups,
        oversize=options.oversize,
        max_moved=options.max_moved,
    )
    cost, expert_bytes = _cost(options)
    previous = None if options.previous is None else Plan.load(options.previous)
    window = Window.load(options.window)
    stop = threading.Event()
    old = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        plan = plan_window(
            window,
            topology,
            token_cap=options.token_cap,
            cost=cost,
            budget_s=options.budget,
            budget_steps=options.budget_steps,
            seed=options.seed,
            device=options.device,
            previous=previous,
            constraints=constraints,
            stop=stop,
        )
        plan.save(options.output)
    finally:
        signal.signal(signal.SIGINT, old)
    _print_result(options, plan, window, expert_bytes, previous)
    if stop.is_set():
        print(f"interrupted: wrote the incumbent to {options.output}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _check_output(path: str) -> None:
    """Find out before the work, not after it."""
    from routepack_opt.errors import InvalidInput

    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise InvalidInput(f"{path}: cannot be written (no folder {folder})")
    if Path(path).is_dir():
        raise InvalidInput(f"{path}: cannot be written (it is a folder)")


def _cost(options: argparse.Namespace) -> tuple[CostModel | None, int | None]:
    from routepack_opt.cost import CostModel

    expert_bytes = options.expert_bytes
    if options.cost is not None:
        return CostModel.load(options.cost), expert_bytes
    if options.model is not None:
        from routepack_opt.model_shapes import model_shape

        if expert_bytes is None:
            expert_bytes = model_shape(options.model).expert_madds * _BYTES_PER_PARAMETER
        return CostModel.for_model(options.model, token_cap=options.token_cap), expert_bytes
    return None, expert_bytes


def _print_result(
    options: argparse.Namespace, plan: Plan, window: Window, expert_bytes: int | None, previous: Plan | None
) -> None:
    from routepack_opt.models.layout import simple_averaging_bound
    from routepack_opt.report.gains import baseline_figures, plan_figures

    averaging = simple_averaging_bound(window.lengths, window.total_load, plan.topology, plan.token_cap, plan.cost)
    figures = {
        **baseline_figures(plan, window, None if previous is None else previous.logical_to_slot),
        "plan": plan_figures(plan, window),
    }
    moved = int(plan.moved_experts.sum())
    if options.json:
        print_json(
            {
                "plan": options.output,
                "rows": plan.rows,
                "rows_lower_bound": plan.rows_lower_bound,
                "rows_status": plan.rows_status,
                "score": list(plan.score),
                "bound": plan.bound,
                "gap": plan.gap,
                "averaging_bound": averaging,
                "above_averaging": plan.score.slowest_shard / averaging - 1.0 if averaging > 0 else None,
                "moved_experts": moved,
                "moved_bytes": None if expert_bytes is None else moved * expert_bytes,
                "figures": {name: value.to_json() for name, value in figures.items()},
                "timings": plan.timings,
                "notes": list(plan.notes),
            }
        )
        return
    print(_describe(plan, window))
    print()
    print(table(_gain_rows(figures, averaging)))
    print()
    for line in _proof_lines(plan):
        print(line)
    total = plan.moved_experts.size * window.num_experts
    size = "bytes unknown: give --model or --expert-bytes" if expert_bytes is None else _bytes(moved * expert_bytes)
    print(f"moved     {moved:,} of {total:,} experts change EP rank ({100 * moved / total:.1f}%; {size})")
    for note in plan.notes:
        print(f"note      {note}")
    print(f"wrote     {options.output} in {plan.timings['total_s']:.2f} s")


def _describe(plan: Plan, window: Window) -> str:
    topology = plan.topology
    return (
        f"window    {plural(window.num_samples, 'sample')}, {int(window.lengths.sum()):,} tokens,"
        f" {plural(window.num_layers, 'MoE layer')} x {window.num_experts} experts\n"
        f"grid      {plural(plan.rows, 'row')} x {plural(topology.dp, 'DP rank')}, {plural(topology.num_shards, 'EDP shard')}"
        f" of {topology.ep} EP ranks, token cap {plan.token_cap:,}"
    )


def _gain_rows(figures: dict[str, LayoutFigures], averaging: float) -> list[list[str]]:
    plan = figures["plan"]
    names = list(figures)
    base_name = names[0]
    base = figures[base_name]
    has_base = base is not plan

    def change(new: float, old: float) -> str:
        return f"{100 * (new / old - 1):+.2f}%" if has_base and old > 0 else ""

    rows = [["", *names, f"plan vs {base_name}" if has_base else ""]]
    rows.append(["rows", *(str(f.rows) for f in figures.values()), f"{plan.rows - base.rows:+d}" if has_base else ""])
    parts: list[tuple[str, str]] = [
        ("slowest shard", "slowest_shard"),
        ("worst row", "worst_row"),
        ("attention, all rows", "attention"),
        ("experts, all rows", "experts"),
        ("largest rank load", "peak"),
    ]
    for title, attribute in parts:
        values = [float(getattr(f, attribute)) for f in figures.values()]
        rows.append([title, *(f"{v:,.1f}" for v in values), change(values[-1], values[0])])
    if averaging > 0:
        above = [100 * (f.slowest_shard / averaging - 1) for f in figures.values()]
        rows.append(["above averaging bound", *(f"{v:.2f}%" for v in above), ""])
    rows.append(["EP efficiency eta", *(f"{f.eta_ep:.3f}" for f in figures.values()), ""])
    return rows


def _proof_lines(plan: Plan) -> list[str]:
    kind = plan.certificates["rows"].get("kind", "")
    if plan.rows_status == "certified":
        rows = f"{plan.rows} is the minimum: certified by an integer certificate ({kind})"
    elif plan.rows_status == "solver-proved":
        rows = f"{plan.rows} is the minimum: proved by a solver ({plan.certificates['rows'].get('solver', '?')})"
    else:
        rows = f"{plan.rows} best known, at least {plan.rows_lower_bound} needed"
    layers: list[dict[str, Any]] = plan.certificates["placement"]
    gaps = [layer["reached"] / layer["bound"] - 1 for layer in layers if layer["bound"]]
    mean = 100 * sum(gaps) / len(gaps) if gaps else 0.0
    return [
        f"rows      {rows}",
        f"layout    slowest shard {plan.score.slowest_shard:,.2f}, no plan with {plural(plan.rows, 'row')} is below"
        f" {plan.bound:,.2f}: at most {100 * plan.gap:.2f}% from the optimum",
        f"placement window load of the fullest EP rank on average {mean:.2f}% above its lower bound",
    ]


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
