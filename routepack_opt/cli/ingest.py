"""``routepack ingest``: routing-replay dumps -> window.npz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import check_output, print_json

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Count the token-to-expert routes that a rollout engine recorded into one window: the length
of each sample, and how many of its tokens chose each expert of each MoE layer.

Samples keep the order of the files, then their order inside each file. Routes are never
guessed: what is unusual is reported, what is wrong is refused with file, sample and token.
"""

EPILOG = """\
examples:
  routepack ingest rollout-*.npz --num-experts 64 -o window.npz
  routepack ingest dump.jsonl --format sglang --num-experts 128 --num-layers 48 --top-k 8 -o window.npz
  routepack ingest step.pt --num-experts 256 --moe-layers 3-60 -o window.npz

docs/routes.md describes each format and the rules for padding rows and missing routes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ingest."""
    positive = integer(1)
    parser.usage = "routepack ingest FILE [FILE ...] --num-experts E -o WINDOW.npz [options]"
    parser.add_argument("files", nargs="+", metavar="FILE", help="the dumps of one optimizer step")
    parser.add_argument("-o", "--output", required=True, metavar="WINDOW.npz", help="the window, written in one go")
    parser.add_argument("--num-experts", type=positive, required=True, metavar="E", help="logical experts of a layer")
    parser.add_argument(
        "--format",
        metavar="F",
        help="npz, npy, jsonl, parquet, pt, megatron, or a framework: vllm, sglang, verl, nemo-rl, slime, trtllm"
        " (default: told by extension and content)",
    )
    parser.add_argument(
        "--moe-layers",
        metavar="LAYERS",
        help="the MoE layers among the dump's layers, such as 3-60 or 1,3,5 (default: those not zero in every sample)",
    )
    parser.add_argument(
        "--num-layers", type=positive, metavar="N", help="layers, for flat dumps that do not tell (SGLang)"
    )
    parser.add_argument(
        "--top-k", type=positive, metavar="K", help="experts a token uses, for flat dumps that do not tell"
    )
    parser.add_argument(
        "--counts",
        choices=("recorded", "predicted"),
        default="recorded",
        metavar="recorded|predicted",
        help="predicted marks routes of an older policy than the one trained",
    )


def run(options: argparse.Namespace) -> int:
    """Read, report, write."""
    from routepack_opt.routes import IngestReport, parse_layer_ranges, read_routes

    check_output(options.output, *options.files)
    report = IngestReport()
    window = read_routes(
        options.files,
        options.num_experts,
        None if options.moe_layers is None else parse_layer_ranges(options.moe_layers),
        format=options.format,
        report=report,
        counts=options.counts,
        num_layers=options.num_layers,
        top_k=options.top_k,
    )
    window.save(options.output)
    if options.json:
        print_json({"window": options.output, **report.to_json()})
        return 0
    print(*report.lines(), sep="\n")
    print(
        f"wrote {options.output}: {window.num_samples} samples x {window.num_layers} MoE layers"
        f" x {window.num_experts} experts"
    )
    return 0
