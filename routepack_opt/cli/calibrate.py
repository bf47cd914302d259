"""``routepack calibrate``: cost weights and step-time terms from measured kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import check_output, print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.simulation.calibrate import Calibration, LinearFit

DESCRIPTION = """\
Fit measured kernel times: alpha and beta of attention, the weight of an assignment, and for
'routepack simulate' the terms the score has no place for (constant, per active expert).
"""

EPILOG = """\
files:
  .json     written by 'routepack replay --save'; several are fitted together
  .csv      columns tokens, activated_experts, time_us: one MoE layer on one device
  .parquet  a grid of MoE kernels; --model chooses the rows. Rows with several EP ranks are never used

examples:
  routepack calibrate measurements.json -o cost.json --step-time step_time.json
  routepack calibrate layer.csv --model qwen3-30b-a3b --token-cap 8192 -o cost.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of calibrate."""
    positive = integer(1)
    parser.usage = "routepack calibrate FILE... [-o COST.json] [options]"
    parser.add_argument("files", nargs="+", metavar="FILE", help="measured kernel times")
    parser.add_argument("-o", "--output", metavar="COST.json", help="weights for 'routepack plan --cost'")
    parser.add_argument("--step-time", metavar="FILE", help="seconds for 'routepack simulate --step-time'")
    parser.add_argument("--token-cap", type=positive, metavar="C", help="default: that of the replayed plan")
    parser.add_argument(
        "--model", metavar="NAME", help="preset or config.json: sizes, and attention where none is timed"
    )
    parser.add_argument(
        "--top-k", type=positive, metavar="K", help="assignments of a CSV's token (default: the model's)"
    )


def run(options: argparse.Namespace) -> int:
    """Read, fit, write, print."""
    from routepack_opt.cost import CostModel
    from routepack_opt.errors import InvalidInput
    from routepack_opt.files import write_json
    from routepack_opt.model_shapes import model_shape
    from routepack_opt.simulation.calibrate import calibrate, cost_model, fits_json
    from routepack_opt.simulation.step_model import StepModel
    from routepack_opt.simulation.timing_tables import read_timings

    for path in (options.output, options.step_time):
        if path is not None:
            check_output(path, *options.files)
    outputs = [os.path.abspath(path) for path in (options.output, options.step_time) if path is not None]
    if len(set(outputs)) < len(outputs):
        raise InvalidInput(f"{options.output}: named by -o and --step-time; expected two files")
    model = None if options.model is None else model_shape(options.model)
    fits = calibrate([read_timings(path, model, options.top_k) for path in options.files])
    token_cap = options.token_cap or fits.token_cap
    cost = None
    if options.output is not None:
        if token_cap is None:
            raise InvalidInput("token cap: the files name none or several; give --token-cap")
        stages = () if options.model is None else CostModel.for_model(options.model, token_cap=token_cap).stages
        cost = cost_model(fits, token_cap, stages=stages)
        write_json(options.output, cost.to_json())
    if options.step_time is not None:
        write_json(options.step_time, StepModel.from_calibration(fits).to_json(), indent=1)
    if options.json:
        written = {"cost": None if cost is None else cost.to_json(), "token_cap": token_cap}
        print_json({**fits_json(fits), **written, "sources": list(fits.sources), "notes": list(fits.notes)})
        return 0
    print(_fit_table(fits))
    for note in fits.notes:
        print(f"note   {note}")
    if cost is not None:
        parts = ", ".join(f"{s.name}: alpha {s.alpha:.4g}, beta {s.beta:.4g}" for s in cost.stages)
        print(f"cost   {parts}; expert_weight 1; token cap {token_cap:,}\nwrote  {options.output}")
    if options.step_time is not None:
        print(f"wrote  {options.step_time}")
    return 0


def _fit_table(fits: Calibration) -> str:
    lines = [["one layer", "constant us", "active us", "token us", "square us", "R2", "mean error", "worst", "n"]]

    def line(name: str, fit: LinearFit) -> list[str]:
        terms = [
            f"{1e6 * fit.terms[t]:.4g}" if t in fit.terms else "" for t in ("constant", "active", "token", "square")
        ]
        errors = [f"{100 * fit.mean_share:.1f}%", f"{100 * fit.worst_share:.1f}%"]
        return [name, *terms, f"{fit.r2:.4f}", *errors, str(fit.num_measurements)]

    if fits.experts is not None:
        lines.append(line("experts", fits.experts))
    lines += [line(f"attention {name}", fit) for name, fit in fits.attention.items()]
    return table(lines)
