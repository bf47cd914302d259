"""``routepack place``: expert placement alone, in the file formats of inference engines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import check_output, plural, print_json, table

if TYPE_CHECKING:
    import argparse

    import numpy as np
    from numpy.typing import NDArray

_FORMATS = ("sglang", "tensorrt-llm", "ascend", "pt", "npz")
_WORST_LAYERS = 5

DESCRIPTION = """\
Put the experts of every MoE layer on EP ranks so that the fullest rank of each layer carries as
little as possible, and say how far that is from a proved lower bound. Reads the load statistics
and writes the tables of SGLang, TensorRT-LLM and Ascend, and windows.
"""

EPILOG = """\
examples:
  routepack place loads.json --ranks 32 -o placement.json
  routepack place loads.json --ranks 32 --slots 288 --nodes 4 --groups 8 -o placement.yaml
  routepack place loads.json --ranks 32 --previous placement.json --within 0.01 -o next.json

Without --previous, moves are counted from slot s holding expert s mod E. With --groups and no
--nodes every routing group keeps a block of slots of its own (for trainers that permute router
rows); with --nodes every group keeps to one node. docs/placement.md explains search and bounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of place."""
    positive = integer(1)
    parser.usage = "routepack place LOADS --ranks P [-o PLACEMENT] [options]"
    parser.add_argument("loads", metavar="LOADS", help=".json, .pt, .safetensors, .npz, .npy, .csv, or a window")
    parser.add_argument("-o", "--output", metavar="PLACEMENT", help="the expert of every slot, written in one go")
    parser.add_argument(
        "--output-format", choices=_FORMATS, help="default by suffix: .json is SGLang's, .yaml TensorRT-LLM's"
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--ranks", type=positive, required=True, metavar="P", help="EP ranks")
    sizes.add_argument(
        "--slots", type=positive, metavar="S", help="slots of a layer over all ranks; more than E: replicas"
    )
    sizes.add_argument("--nodes", type=positive, metavar="N", help="level nodes of P / N ranks first, then their ranks")
    sizes.add_argument("--groups", type=positive, metavar="G", help="routing groups, kept whole")
    moves = parser.add_argument_group("moves")
    moves.add_argument("--previous", metavar="FILE", help="the table in force; what is as good stays where it is")
    limits = moves.add_mutually_exclusive_group()
    share = number(0.0, 1.0, "a share between 0 and 1")
    limits.add_argument(
        "--max-moved", type=share, metavar="SHARE", help="at most this share of a layer's experts moves"
    )
    limits.add_argument(
        "--within",
        type=number(0.0, 1e6, "a share >= 0"),
        metavar="X",
        help="fewest moves to within X of the bound (0.01 is one percent)",
    )
    work = parser.add_argument_group("search and proof")
    work.add_argument(
        "--prove",
        type=number(0.0, 1e8, "a number of seconds >= 0"),
        metavar="SECONDS",
        help="give layers above their bound to CP-SAT for so long in all",
    )
    work.add_argument("--next", metavar="LOADS", help="also measure the table on these loads")
    work.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of all random choices (default 0)")


def run(options: argparse.Namespace) -> int:
    """Read, place, write, print."""
    from routepack_opt.errors import InvalidInput, RoutePackError
    from routepack_opt.integrations.eplb_files import read_loads, read_table
    from routepack_opt.integrations.place import Request, mean_imbalance, place, warmup

    clash = _clash(options)
    if clash is not None:
        print(f"routepack place: {clash}; see 'routepack place --help'", file=sys.stderr)
        return 2
    _check_target(options)
    load = read_loads(options.loads)
    following = None if options.next is None else read_loads(options.next)
    previous = None if options.previous is None else read_table(options.previous)
    request = Request(
        options.ranks,
        options.slots,
        options.nodes,
        options.groups,
        previous,
        options.max_moved,
        options.within,
        options.prove,
        options.seed,
    )
    warmup(replicas=options.slots is not None)
    start = time.perf_counter()
    placed = place(load, request)
    summary: dict[str, Any] = {"seconds": time.perf_counter() - start, **placed.summary}
    if following is not None:
        try:
            summary["next_over_mean"] = mean_imbalance(following, placed.table, options.ranks)
        except RoutePackError as error:
            raise InvalidInput(f"{options.next}: {error}") from None
    if options.prove is not None:
        from routepack_opt.models.placement_exact import solver_version

        summary["solver"] = solver_version("cp-sat")
    if options.output is not None:
        _write(options, load, placed.table)
    if options.json:
        print_json(_in_order(summary))
    else:
        _print(options, load, placed.table, summary)
    return 0


def _clash(options: argparse.Namespace) -> str | None:
    """Options that exclude one another, in words."""
    for name in ("nodes", "groups"):
        for other in ("max_moved", "within", "prove"):
            if getattr(options, name) is not None and getattr(options, other) is not None:
                return f"--{other.replace('_', '-')} does not go with --{name}"
    return None


def _check_target(options: argparse.Namespace) -> None:
    from routepack_opt.errors import InvalidInput
    from routepack_opt.integrations.eplb_files import TABLE_SUFFIXES

    if options.output is None:
        return
    check_output(options.output, options.loads, options.next)
    if options.output_format is None and Path(options.output).suffix.lower() not in TABLE_SUFFIXES:
        known = ", ".join(TABLE_SUFFIXES)
        raise InvalidInput(f"{options.output}: the suffix names no format; expected {known}, or give --output-format")


def _write(options: argparse.Namespace, load: NDArray[np.int64], placed: NDArray[np.int64]) -> None:
    """TensorRT-LLM numbers the MoE layers itself, so dense ones (no load at all) are left out there."""
    import numpy as np

    from routepack_opt.integrations.eplb_files import TABLE_SUFFIXES, read_layer_ids, write_table

    file_format = options.output_format or TABLE_SUFFIXES[Path(options.output).suffix.lower()]
    layer_ids = None
    if file_format == "tensorrt-llm":
        layer_ids = read_layer_ids(options.loads)
        if layer_ids is None:
            kept = np.flatnonzero(load.any(axis=1))
            placed, layer_ids = placed[kept], kept.tolist()
    write_table(options.output, placed, options.ranks, file_format=file_format, layer_ids=layer_ids)


def _in_order(summary: dict[str, Any]) -> dict[str, Any]:
    """The layers, which are many, last."""
    layers = summary.pop("layers")
    return {**summary, "layers": layers}


def _print(
    options: argparse.Namespace, load: NDArray[np.int64], placed: NDArray[np.int64], summary: dict[str, Any]
) -> None:
    num_loaded = int(load.any(axis=1).sum())
    dense = "" if num_loaded == len(load) else f", {len(load) - num_loaded} more without load"
    slots = "" if placed.shape[1] == load.shape[1] else f" in {placed.shape[1]:,} slots"
    ranks = plural(options.ranks, "rank")
    print(f"{plural(num_loaded, 'layer')} of {plural(load.shape[1], 'expert')}{slots} on {ranks}{dense}\n")
    in_force = "slot s holds expert s mod E" if options.previous is None else options.previous
    lines = [
        ["fullest rank / mean, mean over layers", f"{summary['max_over_mean']:.5f}"],
        ["no placement is below", f"{summary['bound_over_mean']:.5f}"],
        ["above that bound", f"{100 * summary['gap']:.3f}%"],
        [f"before ({in_force})", f"{summary['previous_over_mean']:.5f}"],
    ]
    if "next_over_mean" in summary:
        lines.append([f"on the loads of {options.next}", f"{summary['next_over_mean']:.5f}"])
    moved, slots_all = sum(layer["moved"] for layer in summary["layers"]), num_loaded * placed.shape[1]
    lines.append([f"moved: {moved:,} of {slots_all:,} slots", f"{100 * summary['moved']:.1f}%"])
    lines.append(["seconds", f"{summary['seconds']:.3f}"])
    print(table(lines))
    worst = sorted((layer for layer in summary["layers"] if layer["gap"] > 0), key=lambda layer: -layer["gap"])
    met = len(summary["layers"]) - len(worst)
    print(f"\nproved optimal: {met} of {plural(len(summary['layers']), 'layer')}")
    if worst:
        heads = [["farthest from bound", "fullest rank", "bound", "from", "gap"]]
        for layer in worst[:_WORST_LAYERS]:
            reached, bound = f"{layer['reached']:,.1f}", f"{layer['bound']:,.1f}"
            gap = f"{100 * layer['gap']:.3f}%"
            heads.append([f"layer {layer['layer']}", _whole(reached), _whole(bound), layer["kind"], gap])
        print(table(heads))
    if options.output is not None:
        print(f"wrote {options.output}")


def _whole(text: str) -> str:
    return text.removesuffix(".0")
