"""``routepack residency train``: the network of the dqn policy."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import print_json, table

if TYPE_CHECKING:
    import argparse

    from routepack_opt.residency.dqn.training import TrainingResult

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Train the network of the dqn policy offline: a masked Double DQN with a counterfactual reward,
on windows of several models in both phases. The same seed gives the same weights, bit for bit.
"""

EPILOG = """\
examples:
  routepack residency train -o mine.safetensors
  routepack residency train --models deepseek-v2-lite,dbrx --steps 2000 --seed 7 -o mine.safetensors
  routepack residency train --config train.toml -o mine.safetensors

Writes the weights (.safetensors) and beside them the training's record (.json): seed, settings,
reward curve, versions, sha256 of the training windows. Ctrl-C ends it early and keeps what it has.
Settings, reward, figures: docs/residency-dqn.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of train."""
    parser.usage = "routepack residency train -o FILE.safetensors [options]"
    parser.add_argument("--config", metavar="FILE.toml", help="settings and workloads")
    parser.add_argument("--models", metavar="M,M", help="generated windows of these models instead of the workloads")
    parser.add_argument("--steps", type=integer(1), metavar="N", help="windows decided on (6000)")
    parser.add_argument("--seed", type=integer(0), metavar="N", help="of all draws (0)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.safetensors", help="weights; the record beside")


def run(options: argparse.Namespace) -> int:
    """Train, save, print."""
    from routepack_opt.cli import INTERRUPTED
    from routepack_opt.cli.progress import stop_on_interrupt

    importlib.import_module("routepack_opt.residency.dqn.network")  # says in one line that torch is missing
    from routepack_opt.residency.dqn.checkpoint import checked_output, save_checkpoint
    from routepack_opt.residency.dqn.settings import Settings
    from routepack_opt.residency.dqn.training import train

    settings = Settings() if options.config is None else Settings.load(options.config)
    models = None if options.models is None else tuple(name.strip() for name in options.models.split(","))
    settings = settings.override(models=models, steps=options.steps, seed=options.seed)
    weights = checked_output(options.output)
    logger.info("training on %d workloads, %d steps", len(settings.workload), settings.steps)
    with stop_on_interrupt() as stop:
        result = train(settings, stop=stop)
    record = save_checkpoint(result, weights)
    if options.json:
        print_json({**_summary(result), "weights": str(weights), "record": str(record)})
    else:
        print(_text(result, str(weights), str(record)))
    return INTERRUPTED if result.steps < settings.steps else 0


def _summary(result: TrainingResult) -> dict[str, object]:
    first, last = (point["reward"] for point in (result.curve[0], result.curve[-1]))
    return {
        "seed": result.settings.seed,
        "steps": result.steps,
        "workloads": [work["name"] for work in result.workloads],
        "choices": result.kinds,
        "first_reward": first,
        "last_reward": last,
        "seconds": result.seconds,
    }


def _text(result: TrainingResult, weights: str, record: str) -> str:
    tenth = max(1, len(result.curve) // 10)
    rewards = [point["reward"] for point in result.curve]
    rows = [
        ["steps", f"{result.steps:,}"],
        ["mean reward, first tenth", f"{sum(rewards[:tenth]) / tenth:+.4f}"],
        ["mean reward, last tenth", f"{sum(rewards[-tenth:]) / tenth:+.4f}"],
        ["choices", ", ".join(f"{count:,} {kind}" for kind, count in result.kinds.items())],
        ["seconds", f"{result.seconds:.1f}"],
        ["weights", weights],
        ["record", record],
    ]
    return table(rows)
