"""``routepack verify``: re-check every claim of a plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from routepack_opt.cli.output import print_json

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Re-derive every claim of a plan from the plan and its window alone, in exact arithmetic, with
code that shares nothing with the planner: coverage, token cap, constraints, placement, score,
and the certificates behind the words "certified" and "bound".
"""

EPILOG = """\
exit codes:
  0  every claim holds; each is printed with an 'ok'
  1  a claim is broken; the first one is named
  4  a file cannot be read, or is not a plan or a window

docs/certificates.md lists the claims and says how each is checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of verify."""
    parser.usage = "routepack verify PLAN.json WINDOW.npz [options]"
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("window", metavar="WINDOW.npz", help="the window the plan was made for")


def run(options: argparse.Namespace) -> int:
    """Exit 1 names the first broken claim."""
    from routepack_opt.errors import VerificationError
    from routepack_opt.files import read_json
    from routepack_opt.plan import check_plan_object
    from routepack_opt.verify import verify_plan
    from routepack_opt.window import Window

    plan = read_json(options.plan)
    check_plan_object(plan, options.plan)
    window = Window.load(options.window)
    try:
        claims = verify_plan(plan, window)
    except VerificationError as error:
        if options.json:
            print_json({"verified": False, "claim": error.claim, "message": str(error)})
        print(f"routepack verify: broken claim: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print_json({"verified": True, "claims": claims})
        return 0
    print(*(f"ok  {claim}" for claim in claims), sep="\n")
    print(f"verified: {len(claims)} claims hold")
    return 0
