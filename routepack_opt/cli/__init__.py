"""The ``routepack`` command. Results go to stdout, progress and logs to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "ingest": "routing-replay dumps -> window, with every anomaly reported",
    "synth": "a realistic window from published statistics",
    "plan": "window -> plan: experts placed, samples packed, gains and proofs",
    "verify": "re-check every claim of a plan",
    "doctor": "what is installed and usable here",
}
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; a command's module is imported only when its parser is needed."""
    import routepack_opt

    parser = argparse.ArgumentParser(
        prog="routepack",
        description="Plans expert placement and sample packing for MoE RL training steps, and proves its answers.",
        epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 3 infeasible, 4 invalid input, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"routepack {routepack_opt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in _COMMANDS:
        build_parser().parse_args(arguments or ["--help"])
        return 0
    name, rest = arguments[0], arguments[1:]
    import importlib

    module = importlib.import_module(f"routepack_opt.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"routepack {name}", description=_COMMANDS[name])
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable results on stdout, nothing else there")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(rest)
    _set_up_logging(options.quiet)
    from routepack_opt.errors import RoutePackError

    try:
        return int(module.run(options))
    except RoutePackError as error:
        print(f"routepack {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"routepack {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _set_up_logging(quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("routepack_opt")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
