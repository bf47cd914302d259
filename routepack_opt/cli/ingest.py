"""``routepack ingest``: routing-replay dumps -> window.npz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.cli.output import print_json

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ingest."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="dumps; samples keep the order of files, then of samples")
    parser.add_argument("-o", "--output", required=True, metavar="WINDOW.npz")
    parser.add_argument("--num-experts", type=int, required=True, metavar="E", help="logical experts of a layer")
    parser.add_argument(
        "--format",
        metavar="F",
        help="npz, npy, jsonl, parquet, pt, megatron, or a framework: vllm, sglang, verl, nemo-rl, slime, trtllm;"
        " default: by extension and content",
    )
    parser.add_argument(
        "--moe-layers",
        metavar="3-60",
        help="the MoE layers among the dump's layers, such as 3-60 or 1,3,5; default: layers that are not zero everywhere",
    )
    parser.add_argument("--num-layers", type=int, metavar="N", help="layers of flat dumps that do not tell (SGLang)")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts a token uses, for flat dumps that do not tell")
    parser.add_argument(
        "--counts",
        choices=("recorded", "predicted"),
        default="recorded",
        help="predicted marks routes of an older policy than the one trained",
    )


def run(options: argparse.Namespace) -> int:
    """Read, report, write."""
    from routepack_opt.routes import IngestReport, parse_layer_ranges, read_routes

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
    print(f"wrote {options.output}: {window.num_samples} x {window.num_layers} x {window.num_experts}")
    return 0
