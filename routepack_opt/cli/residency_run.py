"""``routepack residency run``: a trace through a cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.residency.cache_replay import CacheResult
    from routepack_opt.residency.route_trace import RouteTrace

POLICY_NAMES = ("lru", "lfu", "pinned", "static", "ours", "belady")
_MIB = 1 << 20

DESCRIPTION = """\
Replay a routing trace through an expert cache and count hits, misses and the bytes that misses
stream. Prefill is one batch a layer, decode one batch a token and layer; eviction comes after a
batch and never takes an expert that the batch used.
"""

EPILOG = """\
policies:
  lru     least recently used            lfu     least frequently used, prefill included
  pinned  most frequent of the prefill   static  most frequent of the first tenth of the trace
  ours    the controller                 belady  furthest next use: clairvoyant, a bound
  all     every one of them

examples:
  routepack residency run --trace qwen.route.csv --policy ours --capacity-mib 4000
  routepack residency run --trace qwen.route.csv --policy all --capacity-cycles 0.9
  routepack residency run --trace dump.npz --num-experts 64 --expert-bytes 17301504 --policy lru --capacity-mib 4000

A token cycle is what one token reads with nothing resident: top-k experts of every layer.
docs/residency-traces.md describes formats, accounting and policies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of run."""
    positive = integer(1)
    parser.usage = "routepack residency run --trace T --policy P (--capacity-mib M | --capacity-cycles X) [options]"
    parser.add_argument("--trace", required=True, metavar="T", help="a route.csv, or a routing dump of any format")
    parser.add_argument("--policy", required=True, choices=(*POLICY_NAMES, "all"), metavar="P", help="see below")
    capacity = parser.add_mutually_exclusive_group(required=True)
    size = number(1e-9, 1e12, "a number > 0")
    capacity.add_argument("--capacity-mib", type=size, metavar="M", help="cache size in MiB")
    capacity.add_argument("--capacity-cycles", type=size, metavar="X", help="cache size in token cycles")
    dumps = parser.add_argument_group("dumps, which do not tell these (a route.csv does)")
    dumps.add_argument("--num-experts", type=positive, metavar="E", help="experts of a layer")
    dumps.add_argument("--expert-bytes", type=positive, metavar="B", help="bytes of one expert")
    dumps.add_argument("--moe-layers", metavar="LAYERS", help="such as 3-60 (default: every layer of the dump)")
    dumps.add_argument(
        "--prompt-tokens", type=integer(0), default=32, metavar="N", help="first tokens of a sample that are its prompt"
    )


def run(options: argparse.Namespace) -> int:
    """Read, replay, print."""
    from routepack_opt.residency.cache_events import event_trace
    from routepack_opt.residency.cache_replay import replay_cache
    from routepack_opt.residency.token_trace import read_trace
    from routepack_opt.routes import parse_layer_ranges

    trace = read_trace(
        options.trace,
        num_experts=options.num_experts,
        expert_bytes=options.expert_bytes,
        prompt_tokens=options.prompt_tokens,
        moe_layers=None if options.moe_layers is None else parse_layer_ranges(options.moe_layers),
    )
    if options.capacity_mib is not None:
        capacity = int(options.capacity_mib * _MIB)
    else:
        capacity = int(options.capacity_cycles * trace.cycle_bytes)
    events = event_trace(trace)
    names = POLICY_NAMES if options.policy == "all" else (options.policy,)
    results, seconds = [], []
    for name in names:
        begun = time.perf_counter()
        results.append(replay_cache(events, name, capacity))
        seconds.append(time.perf_counter() - begun)
    if options.json:
        documents = [_document(trace, result, spent) for result, spent in zip(results, seconds, strict=True)]
        print_json(documents if options.policy == "all" else documents[0])
        return 0
    print(_heading(trace, capacity))
    print(_all_policies(results) if options.policy == "all" else _one_policy(results[0]))
    return 0


def _document(trace: RouteTrace, result: CacheResult, seconds: float) -> dict[str, Any]:
    shape = {"tokens": trace.num_tokens, "layers": trace.num_layers, "experts": trace.num_experts, "top_k": trace.top_k}
    cycles = result.capacity_bytes / trace.cycle_bytes
    return {"trace": trace.source, **shape, **result.to_json(), "capacity_cycles": cycles, "seconds": seconds}


def _heading(trace: RouteTrace, capacity: int) -> str:
    return (
        f"{trace.source}: {trace.num_tokens:,} tokens ({int(trace.prefill.sum()):,} of prompts),"
        f" {trace.num_layers} MoE layers x {trace.num_experts} experts, top-{trace.top_k}\n"
        f"cache of {capacity / _MIB:,.1f} MiB = {capacity / trace.cycle_bytes:.3g} token cycles\n"
    )


def _one_policy(result: CacheResult) -> str:
    rows = [[result.policy, "accesses", "hits", "hit rate", "streamed MiB"]]
    for name, count in (("prefill", result.prefill), ("decode", result.decode), ("total", result.total)):
        rows.append(
            [name, f"{count.accesses:,}", f"{count.hits:,}", f"{count.hit_rate:.2%}", _mib(count.bytes_streamed)]
        )
    text = table(rows)
    if result.switches:
        changes = ", ".join(f"{order} (batch {batch})" for batch, order in result.switches[:8])
        more = len(result.switches) - 8
        text += f"\n\nchanged its order to: {changes}{f' and {more} more' if more > 0 else ''}"
    return text


def _all_policies(results: list[CacheResult]) -> str:
    rows = [["policy", "accesses", "hits", "hit rate", "decode hit rate", "streamed MiB"]]
    for result in results:
        total = result.total
        rows.append(
            [
                result.policy + (" (bound)" if result.policy == "belady" else ""),
                f"{total.accesses:,}",
                f"{total.hits:,}",
                f"{total.hit_rate:.2%}",
                f"{result.decode.hit_rate:.2%}",
                _mib(total.bytes_streamed),
            ]
        )
    return table(rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}"
