"""``routepack synth``: a realistic window from published statistics."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import check_output, print_json

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Draw a window with the statistics of a published RL step: lengths and routes that siblings of
one prompt share, popular and unpopular experts. For examples, tests and benchmarks; a figure
measured on it is a figure about synthetic data.

Beside WINDOW.npz it writes WINDOW.cost.json, the cost model the preset is meant for, and it
prints the plan command that fits.
"""

EPILOG = """\
examples:
  routepack synth flash -o window.npz
  routepack synth v3 -n 1024 --seed 3 -o window.npz

Equal arguments give equal windows. docs/synth.md says how windows are drawn and what was measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of synth."""
    from routepack_opt.synth import PRESETS

    parser.usage = "routepack synth PRESET -o WINDOW.npz [options]"
    parser.add_argument("preset", metavar="PRESET", choices=tuple(PRESETS), help=", ".join(PRESETS))
    parser.add_argument("-o", "--output", required=True, metavar="WINDOW.npz")
    parser.add_argument(
        "-n", "--num-samples", type=integer(1), metavar="N", help="samples (default: the preset's own number)"
    )
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of the draw (default 0)")


def run(options: argparse.Namespace) -> int:
    """Draw and write; print the plan command the preset is meant for."""
    from routepack_opt.files import write_json
    from routepack_opt.synth import PRESETS, synth

    cost_path = f"{options.output.removesuffix('.npz')}.cost.json"
    check_output(options.output)
    check_output(cost_path)
    preset = PRESETS[options.preset]
    window = synth(options.preset, options.num_samples, options.seed)
    window.save(options.output)
    write_json(cost_path, preset.cost.to_json())
    sizes = f"--dp {preset.dp} --ep {preset.ep} --shards {preset.shards} --token-cap {preset.token_cap}"
    command = f"routepack plan {shlex.quote(options.output)} {sizes} --cost {shlex.quote(cost_path)} -o plan.json"
    if options.json:
        print_json(
            {
                "window": options.output,
                "cost": cost_path,
                "samples": window.num_samples,
                "tokens": int(window.lengths.sum()),
                "layers": window.num_layers,
                "experts": window.num_experts,
                "plan_command": command,
            }
        )
        return 0
    print(
        f"wrote {options.output}: {window.num_samples} samples, {int(window.lengths.sum()):,} tokens,"
        f" {window.num_layers} MoE layers x {window.num_experts} experts ({preset.about})"
    )
    print(f"wrote {cost_path}\nplan it with: {command}")
    return 0
