"""``routepack train``: GRPO of a MoE model on several processes, every step planned."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from routepack_opt.cli import INTERRUPTED
from routepack_opt.cli.arguments import integer
from routepack_opt.cli.output import print_json, table
from routepack_opt.cli.progress import stop_on_interrupt

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig
    from routepack_opt.integrations.torch_moe.grpo.summary import RunSummary

DESCRIPTION = """\
Train a Mixture-of-Experts model by reinforcement learning (GRPO) on sums that are made up
on the spot. Every optimizer step is planned from the routes its rollouts took: experts move
with their optimizer state, samples run in the planned cells.
"""

EPILOG = """\
examples:
  routepack train --config examples/grpo_cpu.toml
  routepack train --config examples/grpo_cpu.toml --no-routepack --out run-plain
  routepack train --config examples/grpo_cpu.toml --steps 400 --resume
  torchrun --nproc-per-node 8 -m routepack_opt train --config grpo_gpu.toml

Without torchrun the command starts ep x shards processes on this machine itself, and stops
all of them when one fails. The run's folder gets metrics.jsonl (a line a step), timeline.json
(chrome://tracing), summary.json and checkpoints/. A folder that holds a run already is left
alone: the next free name (run-2, run-3 ...) is taken, unless --resume goes on with it.

Ctrl-C ends the run after the current step, with a checkpoint, and exits with 130. SIGTERM
ends it at once."""

_GRACE_S = 60.0  # after Ctrl-C the ranks finish their step and write a checkpoint; a second one ends the wait
_REFUSALS = (2, 3, 4)  # exit codes with which all ranks refuse the same thing
_CONNECTION = ("gloo", "nccl", "connection", "timed out", "broken pipe")  # how torch.distributed says a peer is gone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of train."""
    parser.usage = "routepack train --config FILE.toml [options]"
    parser.add_argument("--config", required=True, metavar="FILE.toml", help="model, task, plan and run")
    parser.add_argument(
        "--no-routepack", action="store_true", help="contiguous experts, first-fit rows, nothing moves: the comparison"
    )
    parser.add_argument("--steps", type=integer(1), metavar="N", help="optimizer steps instead of the file's")
    parser.add_argument("--seed", type=integer(0), metavar="N", help="seed instead of the file's")
    parser.add_argument("--out", metavar="FOLDER", help="folder instead of the file's")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder")


def run(options: argparse.Namespace) -> int:
    """Join the job when torchrun or this command's own launcher started the process, else start the ranks."""
    from routepack_opt.errors import RoutePackError
    from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig
    from routepack_opt.integrations.torch_moe.processes.launch import leave_reason
    from routepack_opt.integrations.torch_moe.processes.process_setup import under_launcher

    config = RunConfig.load(options.config).override(
        run__steps=options.steps,
        run__seed=options.seed,
        run__out=options.out,
        plan__routepack=False if options.no_routepack else None,
    )
    config.check(options.config)
    _check_libraries()
    if under_launcher():
        try:
            summary = _join(config, options.resume)
        except RoutePackError as error:
            if not leave_reason(str(error)):
                raise
            return error.exit_code
        if summary is None:
            return 0
        _print(summary, options.json)
        return INTERRUPTED if summary.interrupted else 0
    return _start(options, config)


def _check_libraries() -> None:
    import importlib.util

    from routepack_opt.errors import MissingDependency

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("train needs torch; install it with: pip install routepack-opt[train]")


def _join(config: RunConfig, resume: bool) -> RunSummary | None:
    from routepack_opt.integrations.torch_moe.grpo.loop import run_training
    from routepack_opt.integrations.torch_moe.processes.process_setup import process_group

    parallel = config.parallel
    settings = {"backend": parallel.backend, "timeout_s": parallel.timeout_s, "num_threads": parallel.threads}
    with _torch_errors_in_one_line(), process_group(**settings) as setup, stop_on_interrupt() as stop:
        return run_training(config, setup.device, resume=resume, stop=stop)


@contextmanager
def _torch_errors_in_one_line() -> Iterator[None]:
    """A peer that is gone and a device that is full are no bugs: their tracebacks would bury the line that counts."""
    from routepack_opt.errors import InvalidInput, RoutePackError

    try:
        yield
    except RuntimeError as error:
        words, first = str(error).lower(), next(iter(str(error).splitlines()), "")
        if "out of memory" in words or "allocate memory" in words:
            what = "lower the sizes of the model, plan.token_cap or sampling"
            raise InvalidInput(f"this needs more memory than the device has; {what}") from error
        if any(word in words for word in _CONNECTION):
            raise RoutePackError(f"another rank cannot be reached: {first}") from error
        raise


def _start(options: argparse.Namespace, config: RunConfig) -> int:
    from routepack_opt.errors import RoutePackError
    from routepack_opt.integrations.torch_moe.processes.launch import LaunchError, launch

    command = [sys.executable, "-m", "routepack_opt", "train", "--config", options.config]
    for name in ("steps", "seed", "out"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    for name in ("no_routepack", "resume", "json", "quiet"):
        if getattr(options, name):
            command.append(f"--{name.replace('_', '-')}")
    try:
        launch(command, config.num_processes, grace_s=_GRACE_S)
    except LaunchError as error:
        if error.returncode not in _REFUSALS or error.reason is None:
            raise
        refusal = RoutePackError(error.reason)
        refusal.exit_code = error.returncode
        raise refusal from None
    return 0


def _print(summary: RunSummary, as_json: bool) -> None:
    if as_json:
        print_json(summary.to_json())
        return
    rows = [
        ["steps", f"{summary.steps:,}"],
        ["mean reward, first steps", f"{summary.first_reward:.3f}"],
        ["mean reward, last steps", f"{summary.last_reward:.3f}"],
        ["moved experts", f"{summary.moved_experts:,}"],
        ["steps that moved some", f"{summary.placements_changed:,}"],
        ["moved bytes, one shard", f"{summary.moved_bytes:,}"],
        ["exposed seconds", f"{summary.exposed_s:.2f}"],
        ["predicted gain, mean", f"{100 * summary.predicted_gain:.1f}%"],
        ["seconds", f"{summary.seconds:.1f}"],
        ["folder", summary.out],
    ]
    sys.stdout.write(table(rows) + "\n")
