"""``routepack synth``: a realistic window from published statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.cli.output import print_json

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of synth."""
    from routepack_opt.synth import PRESETS

    parser.add_argument("preset", metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument("-n", "--num-samples", type=int, metavar="N", help="samples; default: the preset's own number")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("-o", "--output", required=True, metavar="WINDOW.npz")


def run(options: argparse.Namespace) -> int:
    """Draw and write; print the plan command the preset is meant for."""
    from routepack_opt.files import write_json
    from routepack_opt.synth import PRESETS, synth

    window = synth(options.preset, options.num_samples, options.seed)
    preset = PRESETS[options.preset]
    window.save(options.output)
    cost_path = f"{options.output.removesuffix('.npz')}.cost.json"
    write_json(cost_path, preset.cost.to_json())
    command = (
        f"routepack plan {options.output} --dp {preset.dp} --ep {preset.ep} --shards {preset.shards}"
        f" --token-cap {preset.token_cap} --cost {cost_path} -o plan.json"
    )
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
        f" {window.num_layers} layers x {window.num_experts} experts ({preset.about})"
    )
    print(f"wrote {cost_path}\nplan it with: {command}")
    return 0
