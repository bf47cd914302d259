"""``routepack plan``: the main job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import check_output
from routepack_opt.cli.progress import search_progress, stop_on_interrupt

if TYPE_CHECKING:
    import argparse

    from routepack_opt.constraints import Constraints
    from routepack_opt.cost import CostModel
    from routepack_opt.solvers.annealing.population import LevelStatistics
    from routepack_opt.window import Window

DESCRIPTION = """\
Plan one optimizer step: put each expert of each MoE layer on an EP rank, put each sample
in a cell (one row of one DP rank), and print what that gains and what is proved of it.

The plan has as few rows as can be found, then the fastest slowest EDP shard. It is never
worse than LPT placement with first-fit-decreasing rows, and it is made inside the budget.
"""

EPILOG = """\
examples:
  routepack plan window.npz --ep 8 --token-cap 8192 -o plan.json
  routepack plan window.npz --dp 16 --ep 8 --shards 2 --token-cap 8192 \\
      --model qwen3-30b-a3b --previous last.json --max-moved 0.25 --budget 2 -o plan.json

Each column of the table is one plan. "standing + FFD" keeps the experts where they are now
and fills rows first-fit decreasing, "LPT + FFD" places the experts anew first. Times are in
cost units: one unit is one token cap of token-expert assignments (docs/cost-model.md).
The lines below the table say what is proved; 'routepack verify' checks them again.

Ctrl-C ends the search, writes the best plan found so far and exits with 130.
Exit code 3 says how many dummy samples, or which token cap, would make a plan possible."""

_BYTES_PER_PARAMETER = 14  # bf16 weight + fp32 master + two fp32 Adam moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of plan."""
    positive = integer(1)
    parser.usage = "routepack plan WINDOW.npz --ep P --token-cap C -o PLAN.json [options]"
    parser.add_argument("window", metavar="WINDOW.npz", help="lengths and expert demand of one step")
    parser.add_argument("-o", "--output", required=True, metavar="PLAN.json", help="written in one go at the end")
    sizes = parser.add_argument_group("topology")
    sizes.add_argument("--ep", type=positive, required=True, metavar="P", help="EP ranks of a shard; P divides E")
    sizes.add_argument("--dp", type=positive, metavar="D", help="DP ranks (default P x shards)")
    sizes.add_argument(
        "--shards", type=positive, metavar="G", help="EDP shards (default 1; with --dp: D // P, at least 1)"
    )
    sizes.add_argument("--token-cap", type=positive, required=True, metavar="C", help="most tokens of a cell")
    group = parser.add_argument_group("cost (default: alpha 4 L, beta 7e-4 C L, expert weight 1)")
    costs = group.add_mutually_exclusive_group()
    costs.add_argument("--cost", metavar="COST.json", help="stages and expert weight")
    costs.add_argument("--model", metavar="NAME", help="from model dimensions: a preset, or a Hugging Face config.json")
    _add_search(parser)
    _add_constraints(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--budget",
        type=number(0.0, 1e8, "a number of seconds >= 0"),
        default=1.0,
        metavar="S",
        help="seconds the planning may take (default 1); compiling, once, is not counted",
    )
    search.add_argument(
        "--budget-steps",
        type=integer(0),
        metavar="K",
        help="proposals per chain instead of seconds: the same plan on every machine",
    )
    search.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of all random choices (default 0)")
    search.add_argument("--device", default="auto", metavar="D", help="auto (default), cpu, torch, cuda or cuda:N")
    search.add_argument("--stats", metavar="FILE", help="write what happened at every temperature, as .csv or .jsonl")


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    positive = integer(1)
    moves = parser.add_argument_group("expert moves")
    moves.add_argument("--previous", metavar="PLAN.json", help="the plan in force (default: slot e holds expert e)")
    moves.add_argument(
        "--max-moved",
        type=number(0.0, 1.0, "a share between 0 and 1"),
        metavar="SHARE",
        help="largest share of the experts that may change EP rank, 0 to 1",
    )
    moves.add_argument(
        "--expert-bytes", type=positive, metavar="B", help="bytes moved with one expert (default from --model)"
    )
    limits = parser.add_argument_group("constraints on the layout")
    limits.add_argument(
        "--min-rows", type=positive, default=1, metavar="R", help="at least R rows, such as the pipeline depth"
    )
    limits.add_argument("--row-multiple", type=positive, default=1, metavar="M", help="rows are a multiple of M")
    limits.add_argument(
        "--pad-multiple",
        type=positive,
        default=1,
        metavar="M",
        help="the cap counts lengths rounded up to a multiple of M",
    )
    limits.add_argument("--max-samples", type=positive, metavar="K", help="at most K samples in a cell")
    limits.add_argument("--equal-samples", action="store_true", help="the same number of samples on every DP rank")
    limits.add_argument(
        "--keep-groups",
        nargs="?",
        const="cell",
        choices=("cell", "rank"),
        metavar="cell|rank",
        help="samples with one group_id stay in one cell (default), or on one DP rank",
    )
    limits.add_argument(
        "--oversize",
        choices=("error", "alone"),
        default="error",
        metavar="error|alone",
        help="a sample above the cap is refused (default) or gets a cell of its own",
    )


def prepare(arguments: list[str]) -> list[str]:
    """A bare ``--keep-groups`` must not swallow the argument after it."""
    result = list(arguments)
    for index, word in enumerate(result):
        if word == "--keep-groups" and result[index + 1 : index + 2] not in (["cell"], ["rank"]):
            result[index] = "--keep-groups=cell"
    return result


def run(options: argparse.Namespace) -> int:
    """Plan, write, print."""
    from routepack_opt.cli.plan_table import print_result
    from routepack_opt.plan import Plan
    from routepack_opt.planner import plan_window
    from routepack_opt.report.annealing import statistics_format, write_statistics
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

    check_output(options.output, options.window, options.cost, options.model)
    if options.stats is not None:
        check_output(options.stats, options.window, options.output)
        statistics_format(options.stats)
    levels: list[LevelStatistics] = []
    topology = Topology(dp=options.dp, ep=options.ep, shards=options.shards)
    previous = None if options.previous is None else Plan.load(options.previous)
    window = Window.load(options.window)
    cost, expert_bytes, notes = _cost(options, window)
    steps = options.budget_steps
    with stop_on_interrupt() as stop, search_progress(None if steps is not None else options.budget, options.quiet):
        plan = plan_window(
            window,
            topology,
            token_cap=options.token_cap,
            cost=cost,
            budget_s=options.budget,
            budget_steps=steps,
            seed=options.seed,
            device=options.device,
            previous=previous,
            constraints=_constraints(options),
            stop=stop,
            statistics=levels,
        )
        interrupted = stop.is_set()
        if interrupted:
            notes.append("interrupted: the best plan found until then")
        plan = replace(plan, notes=(*plan.notes, *notes))
        plan.save(options.output)
        if options.stats is not None:
            write_statistics(levels, options.stats)
    print_result(options, plan, window, expert_bytes, previous)
    return INTERRUPTED if interrupted else 0


def _constraints(options: argparse.Namespace) -> Constraints:
    from routepack_opt.constraints import Constraints

    return Constraints(
        min_rows=options.min_rows,
        row_multiple=options.row_multiple,
        pad_multiple=options.pad_multiple,
        max_samples_per_cell=options.max_samples,
        equal_samples_per_rank=options.equal_samples,
        groups=options.keep_groups,
        oversize=options.oversize,
        max_moved=options.max_moved,
    )


def _cost(options: argparse.Namespace, window: Window) -> tuple[CostModel | None, int | None, list[str]]:
    """The cost model (None: default), bytes of one expert (None: unknown), and what to note about them."""
    from routepack_opt.cost import CostModel

    if options.cost is not None:
        return CostModel.load(options.cost), options.expert_bytes, []
    if options.model is None:
        return None, options.expert_bytes, []
    from routepack_opt.model_shapes import model_shape

    shape = model_shape(options.model)
    expert_bytes = options.expert_bytes or shape.expert_madds * _BYTES_PER_PARAMETER
    notes = []
    if (shape.num_moe_layers, shape.num_experts) != (window.num_layers, window.num_experts):
        notes.append(
            f"cost: {options.model} has {shape.num_moe_layers} MoE layers x {shape.num_experts} experts,"
            f" the window {window.num_layers} x {window.num_experts}; attention is weighed for the model's layers"
        )
    return CostModel.for_model(options.model, token_cap=options.token_cap), expert_bytes, notes
