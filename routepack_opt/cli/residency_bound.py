"""``routepack residency bound``: how far residency policies are from the best possible."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from routepack_opt.cli.arguments import integer, number
from routepack_opt.cli.output import print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.models.residency_gaps import BoundReport
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.traces.windows import Workload

DESCRIPTION = """\
Bound the routed time of single windows from below, over every layout within the capacities and
the replica budget and every assignment of tokens to replicas (stage-level model), and say how far
each policy is above it on the same windows.
"""

EPILOG = """\
The bound lets every window have its own layout; a policy that changes a few replicas a window
cannot follow, so part of the distance is out of any online policy's reach. --assignment also
bounds the best assignment under the policy's own layout: what better mapping alone could gain.

examples:
  routepack residency bound --package paper --model deepseek-v2-lite --phase decode
  routepack residency bound --model dbrx --phase prefill --bounds 16 --policies static,look-ahead --json

docs/residency-bounds.md describes the bounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of bound."""
    positive = integer(1)
    parser.usage = "routepack residency bound --model M --phase prefill|decode [options]"
    parser.add_argument("--package", default="paper", metavar="P", help="preset or TOML file (default: paper)")
    parser.add_argument("--model", required=True, metavar="M", help="one of the models residency knows, see docs")
    parser.add_argument("--phase", required=True, choices=("prefill", "decode"), help="shape of the windows")
    parser.add_argument("--windows", type=positive, default=256, metavar="N", help="measured windows (default: 256)")
    parser.add_argument("--bounds", type=positive, default=8, metavar="N", help="windows with a bound (default: 8)")
    parser.add_argument("--policies", metavar="A,B", help="or 'none' (default: single copy, fixed replicas and ours)")
    parser.add_argument("--assignment", action="store_true", help="also bound the best assignment under each layout")
    parser.add_argument("--layers", type=positive, metavar="L", help="MoE layers (default: as many as fit)")
    copies = number(1.0, 1e6, "a number >= 1")
    parser.add_argument("--budget-copies", type=copies, metavar="X", help="replica budget (default: the package's)")
    parser.add_argument("--data", metavar="FOLDER", help="recorded traces (default: ROUTEPACK_DATA, ../shared/data)")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="S", help="of the workload (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Build, bound, run, print."""
    from routepack_opt.models.residency_gaps import bound_report
    from routepack_opt.residency.comparison.case import Case, checked_folder, workload_of
    from routepack_opt.residency.control.policy_registry import REGISTRY, find_policies
    from routepack_opt.residency.machine.scene import build_scene

    if options.policies is None:
        names = [entry.name for entry in REGISTRY.values() if entry.group in ("static", "fixed", "ours")]
    else:
        names = [] if options.policies == "none" else [name for name in options.policies.split(",") if name]
    entries = find_policies(names)
    scene = build_scene(options.package, options.model, num_layers=options.layers, budget_copies=options.budget_copies)
    total = -(-options.windows * 10 // 9)  # the first tenth is the profile, as in compare
    workload = workload_of(Case(options.model, options.phase, options.seed), scene, total, checked_folder(options.data))
    first = len(workload) - options.windows
    quiet = options.quiet or options.json
    report = bound_report(
        scene, workload, entries, num_windows=options.bounds, first_window=first, with_assignment=options.assignment,
        progress=None if quiet else lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    if options.json:
        print_json(_document(options, scene, workload, report, first))
        return 0
    print(f"{scene.scope}\n{workload.name}, {workload.phase}, {options.windows} windows: {workload.note}\n")
    print(_text(report, first))
    return 0


def _document(
    options: argparse.Namespace, scene: Scene, workload: Workload, report: BoundReport, first: int
) -> dict[str, Any]:
    policies = []
    for gap in report.policies:
        entry = {
            "policy": gap.policy,
            "routed_s": gap.routed_s.tolist(),
            "gap": gap.gap,
            "worst_gap": float(gap.gaps.max()),
            "mean_routed_s_all_windows": float(gap.run.routed_s.mean()),
        }
        if gap.assignment_s is not None:
            entry["assignment_bound_s"] = gap.assignment_s.tolist()
        policies.append(entry)
    return {
        "package": scene.hardware.package.name,
        "model": options.model,
        "phase": options.phase,
        "scope": scene.scope,
        "workload": workload.note,
        "synthetic": workload.synthetic,
        "seed": options.seed,
        "measured_windows": options.windows,
        "windows": (report.windows - first).tolist(),
        "bound_s": report.bound_s.tolist(),
        "policies": policies,
    }


def _text(report: BoundReport, first: int) -> str:
    rows = [["window", "bound ms", *(gap.policy for gap in report.policies)]]
    for k, (window, bound) in enumerate(zip(report.windows.tolist(), report.bound_s.tolist(), strict=True)):
        rows.append([str(window - first), f"{bound * 1e3:.3f}", *(f"{gap.gaps[k]:+.1%}" for gap in report.policies)])
    mean = float(report.bound_s.mean()) * 1e3
    rows.append(["mean", f"{mean:.3f}", *(f"{gap.gap:+.1%}" for gap in report.policies)])
    text = table(rows)
    if any(gap.assignment_s is not None for gap in report.policies):
        lines = [["policy", "over best assignment", "best assignment over bound"]]
        for gap in report.policies:
            if gap.assignment_s is not None:
                best = float(gap.assignment_s.sum())
                lines.append([
                    gap.policy, f"{gap.routed_s.sum() / best - 1:+.1%}", f"{best / report.bound_s.sum() - 1:+.1%}"
                ])  # fmt: skip
        text += "\n\n" + table(lines)
    return text
