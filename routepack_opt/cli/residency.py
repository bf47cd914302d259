"""``routepack residency``: which experts stay in fast memory. One module a sub-command."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from routepack_opt.cli.arguments import Parser

# Each is the module residency_<name> of this package with add_arguments, run, DESCRIPTION and EPILOG.
SUB_COMMANDS = {
    "run": "replay a routing trace through a cache: hits and streamed bytes of a policy",
    "compare": "policies on the same windows, next to the figures of the HCRMap paper",
    "bound": "how far policies are from the best layout and assignment of a window",
    "train": "the network of the dqn policy",
}

DESCRIPTION = """\
Keep the hot experts of a Mixture-of-Experts model in fast memory while it serves tokens.
"""

_NAMES = "\n".join(f"  {name:<8} {text}" for name, text in SUB_COMMANDS.items())
EPILOG = f"""\
sub-commands:
{_NAMES}

'routepack residency SUB-COMMAND --help' explains one of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser a sub-command, each with the options that all commands share."""
    parser.usage = "routepack residency SUB-COMMAND [options]"
    sub_parsers = parser.add_subparsers(
        dest="sub_command", metavar="SUB-COMMAND", required=True, parser_class=Parser, help=argparse.SUPPRESS
    )
    for name in SUB_COMMANDS:
        module = _module(name)
        sub = sub_parsers.add_parser(
            name, prog=f"routepack residency {name}", description=module.DESCRIPTION, epilog=module.EPILOG
        )
        module.add_arguments(sub)
        # again here: argparse looks for options that follow the sub-command in its parser only
        sub.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON document on stdout instead of text"
        )
        sub.add_argument("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Run the sub-command."""
    return int(_module(options.sub_command).run(options))


def _module(name: str) -> Any:
    return importlib.import_module(f"routepack_opt.cli.residency_{name}")
