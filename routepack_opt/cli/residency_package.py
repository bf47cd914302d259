"""``routepack residency run --package``: one policy on a simulated machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.residency.control.run_windows import PolicyRun
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.traces.route_trace import RouteTrace
    from routepack_opt.residency.traces.windows import Workload

_GIB = 1 << 30
_HIDDEN = 2048  # of a trace without --model: its expert sizes say the product of hidden and expert width only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the simulated machine."""
    group = parser.add_argument_group("simulated machine")
    group.add_argument("--package", metavar="P", help="paper, gpu-host-nvme, cxl, or a TOML file")
    group.add_argument("--show-package", action="store_true", help="print every value of the package (default paper)")
    group.add_argument("--model", metavar="NAME", help="model: needed without --trace")
    group.add_argument("--phase", choices=("prefill", "decode"), default="decode", help="windows; default decode")
    group.add_argument("--windows", type=integer(1), default=256, metavar="N", help="measured windows; default 256")
    group.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of synthetic windows; default 0")
    group.add_argument("--level", choices=("stage", "event"), default="stage", help="simulator; default stage")
    copies = number(1.0, 1e6, "a number >= 1")
    group.add_argument("--budget-copies", type=copies, metavar="X", help="replica budget; default the package's")


def show_package(options: argparse.Namespace) -> dict[str, Any]:
    """Description of the package, and the scope when there is a model."""
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import build_scene

    package = Package.load(options.package or "paper")
    shown: dict[str, Any] = {"package": package.name, "describe": package.describe().splitlines()}
    if options.model is not None:
        shown["scope"] = build_scene(package, options.model, budget_copies=options.budget_copies).scope
    return shown


def simulate(options: argparse.Namespace, trace: RouteTrace | None, policy: str) -> dict[str, Any]:
    """Run a policy of the registry; returns what JSON prints.

    Raises
    ------
    InvalidInput
        Neither trace nor model, or a trace of another model.
    """
    from routepack_opt.residency.control.policy_registry import find_policies
    from routepack_opt.residency.control.run_windows import run_policy
    from routepack_opt.residency.machine.package import Package

    (entry,) = find_policies([policy])
    scene, workload = _scene_and_workload(options, Package.load(options.package), trace)
    windows = [workload[w] for w in range(len(workload))] if entry.needs_windows else None
    begun = time.perf_counter()
    first = len(workload) - options.windows
    run = run_policy(scene, workload, entry.make(windows), level=options.level, first_window=first)
    return _document(scene, workload, run, time.perf_counter() - begun)


def _scene_and_workload(
    options: argparse.Namespace, package: Package, trace: RouteTrace | None
) -> tuple[Scene, Workload]:
    from routepack_opt.errors import InvalidInput
    from routepack_opt.residency.comparison.case import Case, workload_of
    from routepack_opt.residency.machine.scene import build_scene, scene_of
    from routepack_opt.residency.traces.windows import trace_workload

    total = -(-options.windows * 10 // 9)  # the first tenth is the profile
    if trace is None:
        if options.model is None:
            raise InvalidInput("model: missing; expected --model NAME or --trace T with --package")
        scene = build_scene(package, options.model, budget_copies=options.budget_copies)
        return scene, workload_of(Case(options.model, options.phase, options.seed), scene, total, None)
    if options.model is not None:
        scene = build_scene(package, options.model, budget_copies=options.budget_copies)
        found = trace.num_experts, trace.top_k
        if found != (scene.num_experts, scene.top_k) or trace.num_layers < scene.num_layers:
            raise InvalidInput(
                f"{trace.source}: {trace.num_layers} layers x {found[0]} experts, top-{found[1]}, is not of "
                f"{options.model}: expected {scene.num_experts} experts, top-{scene.top_k}"
            )
    else:
        weights = float(trace.expert_bytes.mean()) / package.rules.bytes_per_weight
        scene = scene_of(
            package, num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k,
            expert_bytes=trace.expert_bytes.astype("float64"), hidden=_HIDDEN,
            expert_width=max(1, round(weights / (3 * _HIDDEN))), budget_copies=options.budget_copies,
        )  # fmt: skip
    return scene, trace_workload(
        trace, options.phase, scene.num_chiplets, num_windows=total, layers=range(scene.num_layers), seed=options.seed
    )


def _document(scene: Scene, workload: Workload, run: PolicyRun, seconds: float) -> dict[str, Any]:
    from routepack_opt.residency.simulator.stage import STAGES

    accesses, hits = int(run.reads.sum()), int(run.reads[:, :-1].sum())
    tiers = scene.hardware.tier_names
    return {
        "policy": run.policy, "package": scene.hardware.package.name, "workload": run.workload, "phase": run.phase,
        "synthetic": workload.synthetic, "note": workload.note, "scope": scene.scope, "level": run.level,
        "windows": len(run.routed_s), "accesses": accesses, "hits": hits, "hit_rate": hits / max(accesses, 1),
        "bytes_streamed": int(run.streamed_bytes[:, -1].sum()), "latency_s": float(run.end_to_end_s.sum()),
        "routed_s": float(run.routed_s.sum()), "energy_j": float(run.energy_j.sum()),
        "edp_js": float(run.energy_j.sum() * run.end_to_end_s.sum()),
        "stages_s": dict(zip(STAGES, run.stages.sum(axis=0).tolist(), strict=True)),
        "tier_bytes": dict(zip(tiers, run.streamed_bytes.sum(axis=0).tolist(), strict=True)),
        "migrated_bytes": float(run.migrated_bytes.sum()), "copies": int(run.copies.sum()),
        "evictions": int(run.evictions.sum()), "deferred": int(run.deferred.sum()), "seconds": seconds,
    }  # fmt: skip


def text(documents: list[dict[str, Any]]) -> str:
    """Scope, trace and one row a policy."""
    first = documents[0]
    rows = [["policy", "latency, s", "routed, s", "energy, J", "reads", "fast tiers", "slow tier, GiB", "copies"]]
    rows += [
        [d["policy"], f"{d['latency_s']:.6g}", f"{d['routed_s']:.6g}", f"{d['energy_j']:.5g}", f"{d['accesses']:,}",
         f"{d['hit_rate']:.2%}", f"{d['bytes_streamed'] / _GIB:,.2f}", f"{d['copies']:,}"]
        for d in documents
    ]  # fmt: skip
    kind = "synthetic" if first["synthetic"] else "recorded"
    head = f"{first['windows']} {first['phase']} windows, {first['level']} level, {kind} routes: {first['note']}"
    return f"{first['scope']}\n{head}\n\n{table(rows)}"
