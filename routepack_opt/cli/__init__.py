"""The ``routepack`` command. Results go to stdout, progress and logs to stderr."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.cli.arguments import Parser

# Each is a module of this package with add_arguments, run, and DESCRIPTION and EPILOG of its help.
COMMANDS = {
    "ingest": "routing-replay dumps -> window, with every anomaly reported",
    "synth": "a realistic window from published statistics",
    "plan": "window -> plan: experts placed, samples packed, gains and proofs",
    "verify": "re-check every claim of a plan",
    "place": "expert placement alone, in the file formats of inference engines",
    "certify": "proved row counts of many windows, offline and resumable",
    "compare": "the same windows under several methods: gaps, times, plots",
    "train": "GRPO of a MoE model on several processes, every step planned",
    "residency": "hot experts in inference packages: caches, policies, bounds, comparison",
    "replay": "step time of a plan from its kernels, measured on one device",
    "calibrate": "cost weights and step-time terms from measured kernels",
    "simulate": "step time on a cluster nobody here has, from measured or published rates",
    "doctor": "what is installed and usable here",
}
INTERRUPTED = 130

_DESCRIPTION = """\
Plans expert placement and sample packing for Mixture-of-Experts RL training steps,
and proves how good its answers are."""

_EPILOG = """\
a first run:
  routepack synth flash -o window.npz
  routepack plan window.npz --dp 16 --ep 8 --shards 2 --token-cap 8192 -o plan.json
  routepack verify plan.json window.npz

'routepack COMMAND --help' explains one command.

exit codes:
  0  done                      3  infeasible: says what would do
  1  a check failed            4  invalid input: names file, field and index
  2  usage                   130  interrupted; what is done is kept
Results go to stdout (with --json one JSON document and nothing else), the rest to stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    prog = "routepack" if name is None else f"routepack {name}"
    try:
        try:
            code = _overview(arguments) if name is None else _run(name, arguments[1:])
        except SystemExit as end:  # argparse: help, version and usage errors
            code = end.code if isinstance(end.code, int) else 2
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout left, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as error:
        print(f"{prog}: {_one_line(error)}", file=sys.stderr)
        return 4


def _one_line(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return f"this needs more memory than the machine has ({error or 'out of memory'})"
    return f"{'' if error.filename is None else f'{error.filename}: '}{error.strerror or error}"


def overview_parser() -> Parser:
    """The parser behind ``routepack --help``; each command has its own."""
    import routepack_opt
    from routepack_opt.cli.arguments import Parser

    names = "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
    parser = Parser("routepack", _DESCRIPTION, f"commands:\n{names}\n\n{_EPILOG}")
    parser.usage = "routepack COMMAND [options]"
    parser.add_argument("--version", action="version", version=f"routepack {routepack_opt.__version__}")
    return parser


def _overview(arguments: list[str]) -> int:
    parser = overview_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if not arguments[0].startswith("-"):
        parser.error(f"unknown command {arguments[0]!r}; commands are {', '.join(COMMANDS)}")
    parser.parse_args(arguments)
    return 2


def command_parser(name: str) -> Parser:
    """The parser of one command."""
    from routepack_opt.cli.arguments import Parser

    module = importlib.import_module(f"routepack_opt.cli.{name}")
    parser = Parser(f"routepack {name}", module.DESCRIPTION, module.EPILOG)
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def _run(name: str, arguments: list[str]) -> int:
    from routepack_opt.errors import RoutePackError

    module = importlib.import_module(f"routepack_opt.cli.{name}")
    prepare = getattr(module, "prepare", list)  # a command may rewrite its arguments first
    options = command_parser(name).parse_args(prepare(arguments))
    _set_up_logging(options.quiet)
    try:
        return int(module.run(options))
    except RoutePackError as error:
        print(f"routepack {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code


def _set_up_logging(quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("routepack_opt")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
