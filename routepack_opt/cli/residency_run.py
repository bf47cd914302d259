"""``routepack residency run``: a trace through a cache, or a policy on a simulated machine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from routepack_opt.cli import residency_package
from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.residency.cache.replay import CacheResult
    from routepack_opt.residency.traces.route_trace import RouteTrace

POLICY_NAMES = ("lru", "lfu", "pinned", "static", "ours", "belady")
_MIB = 1 << 20

DESCRIPTION = """\
Replay a routing trace through an expert cache and count hits, misses and the bytes that misses
stream. Prefill is one batch a layer, decode one batch a token and layer; eviction comes after a
batch and never takes an expert that the batch used. With --package a policy runs on a simulated
machine instead, which adds time and energy; with a capacity as well, both are printed.
"""

EPILOG = """\
policies:
  lru     least recently used            lfu     least frequently used, prefill included
  pinned  most frequent of the prefill   static  most frequent of the first tenth of the trace
  ours    the controller                 belady  furthest next use: clairvoyant, a bound
  all     every one of them
  with --package: those of 'routepack residency compare --list-policies', and ours

examples:
  routepack residency run --trace qwen.route.csv --policy ours --capacity-mib 4000
  routepack residency run --trace qwen.route.csv --policy all --capacity-cycles 0.9
  routepack residency run --trace dump.npz --num-experts 64 --expert-bytes 17301504 --policy lru --capacity-mib 4000
  routepack residency run --package paper --model deepseek-v3 --phase decode --policy ours
  routepack residency run --package cxl --trace qwen.route.csv --policy lfu --json
  routepack residency run --show-package --package paper

A token cycle is what one token reads with nothing resident: top-k experts of every layer.
docs/residency-traces.md describes formats, accounting and policies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of run."""
    positive = integer(1)
    parser.usage = (
        "routepack residency run --trace T --policy P (--capacity-mib M | --capacity-cycles X) [options]\n"
        "       routepack residency run --package P (--model NAME | --trace T) --policy P [options]"
    )
    parser.add_argument("--trace", metavar="T", help="a route.csv, or a routing dump of any format")
    parser.add_argument("--policy", metavar="P", help="see below")
    capacity = parser.add_mutually_exclusive_group()
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
    residency_package.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Read, replay or simulate, print."""
    if options.show_package and options.policy is None:
        shown = residency_package.show_package(options)
        if options.json:
            print_json(shown)
        else:
            print("\n".join([*shown["describe"], *([shown["scope"]] if "scope" in shown else [])]))
        return 0
    _check(options)
    trace = None if options.trace is None else _read(options)
    if options.package is None or _has_capacity(options):
        assert trace is not None, "checked"
        replayed = _replay(options, trace)
    else:
        replayed = []
    simulated = [] if options.package is None else _simulate(options, trace)
    if options.json:
        documents = [document for _, document in replayed] or simulated
        if replayed and simulated:  # counts are the cache's, time and energy the machine's
            keys = ("latency_s", "routed_s", "energy_j")
            for document, other in zip(documents, simulated, strict=True):
                document |= {key: other[key] for key in keys} | {"package_run": other}
        print_json(documents if options.policy == "all" else documents[0])
        return 0
    if replayed:
        assert trace is not None, "checked"
        results = [result for result, _ in replayed]
        print(_heading(trace, results[0].capacity_bytes))
        print(_all_policies(results) if options.policy == "all" else _one_policy(results[0]))
    if simulated:
        described = "\n".join(residency_package.show_package(options)["describe"]) if options.show_package else ""
        print("\n\n".join(part for part in ("" if replayed else described, residency_package.text(simulated)) if part))
    return 0


def _has_capacity(options: argparse.Namespace) -> bool:
    return options.capacity_mib is not None or options.capacity_cycles is not None


def _check(options: argparse.Namespace) -> None:
    """Combinations of options that argparse cannot see; usage errors exit 2."""
    if options.policy is None:
        _usage("the following arguments are required: --policy")
    names = _names(options)
    if options.policy not in names:
        choices = ", ".join(map(repr, names))
        _usage(f"argument --policy: invalid choice: {options.policy!r} (choose from {choices})")
    if options.package is None:
        if options.trace is None:
            _usage("the following arguments are required: --trace")
        if not _has_capacity(options):
            _usage("one of the arguments --capacity-mib --capacity-cycles is required (or --package)")
    elif options.trace is None:
        if options.model is None:
            _usage("one of the arguments --model --trace is required with --package")
        if _has_capacity(options):
            _usage("a cache of --capacity-mib or --capacity-cycles replays a trace: --trace is required")


def _usage(message: str) -> NoReturn:
    print(f"routepack residency run: {message}; see 'routepack residency run --help'", file=sys.stderr)
    raise SystemExit(2)


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    """Policies that can be asked for."""
    if options.package is None:
        return (*POLICY_NAMES, "all")
    from routepack_opt.residency.control.policy_registry import REGISTRY

    if _has_capacity(options):  # both: those that are a cache's and a machine's
        return tuple(name for name in POLICY_NAMES if name == "ours" or name in REGISTRY)
    return (*REGISTRY, "ours", "all")


def _simulate(options: argparse.Namespace, trace: RouteTrace | None) -> list[dict[str, Any]]:
    from routepack_opt.residency.control.policy_registry import OURS, default_policies

    chosen: tuple[str, ...] = (OURS if options.policy == "ours" else options.policy,)
    if options.policy == "all":
        chosen = default_policies()
    return [residency_package.simulate(options, trace, name) for name in chosen]


def _read(options: argparse.Namespace) -> RouteTrace:
    from routepack_opt.residency.traces.token_trace import read_trace
    from routepack_opt.routes import parse_layer_ranges

    num_experts, expert_bytes = options.num_experts, options.expert_bytes
    if options.model is not None and options.package is not None:
        from routepack_opt.residency.machine.moe_models import moe_model
        from routepack_opt.residency.machine.package import Package

        model = moe_model(options.model)
        num_experts = num_experts or model.num_experts
        size = model.expert_weights * Package.load(options.package).rules.bytes_per_weight
        expert_bytes = expert_bytes or round(size)
    return read_trace(
        options.trace,
        num_experts=num_experts,
        expert_bytes=expert_bytes,
        prompt_tokens=options.prompt_tokens,
        moe_layers=None if options.moe_layers is None else parse_layer_ranges(options.moe_layers),
    )


def _replay(options: argparse.Namespace, trace: RouteTrace) -> list[tuple[CacheResult, dict[str, Any]]]:
    """Each policy through the cache, and its document."""
    from routepack_opt.residency.cache.events import event_trace
    from routepack_opt.residency.cache.replay import replay_cache

    if options.capacity_mib is not None:
        capacity = int(options.capacity_mib * _MIB)
    else:
        capacity = int(options.capacity_cycles * trace.cycle_bytes)
    events, done = event_trace(trace), []
    for name in POLICY_NAMES if options.policy == "all" else (options.policy,):
        begun = time.perf_counter()
        result = replay_cache(events, name, capacity)
        done.append((result, _document(trace, result, time.perf_counter() - begun)))
    return done


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
