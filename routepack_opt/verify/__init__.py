"""The independent checker of plan.json: no solver, no evaluator, integers only.

It shares nothing with the planner but the file readers, so a mistake there cannot hide here. Each module
re-derives one kind of claim; the first broken one is raised by name.
"""

from __future__ import annotations

from typing import Any

from routepack_opt.errors import InvalidInput
from routepack_opt.plan import check_plan_object
from routepack_opt.verify.bound import check_bound
from routepack_opt.verify.facts import read_facts
from routepack_opt.verify.layout import check_layout
from routepack_opt.verify.placement import check_placement, check_placement_certificate
from routepack_opt.verify.rows import check_rows
from routepack_opt.verify.scoring import check_score
from routepack_opt.window import Window

__all__ = ["verify_plan"]


def verify_plan(plan: dict[str, Any], window: Window) -> list[str]:
    """Re-derive every claim of a plan.

    Parameters
    ----------
    plan
        The object of plan.json, as :func:`routepack_opt.files.read_json` returns it.
    window
        The window the plan says it was made for.

    Returns
    -------
    list of str
        The claims that were checked, one sentence each.

    Raises
    ------
    FormatError
        The object is not a plan: a field is missing or of the wrong type.
    VerificationError
        ``claim`` names the first broken claim.
    """
    check_plan_object(plan, "plan")
    if not isinstance(window, Window):
        raise InvalidInput(f"window: expected a Window, found {type(window).__name__}")
    facts, checked = read_facts(plan, window)
    checked += check_layout(plan, facts)
    checked += check_placement(plan, facts)
    checked += check_score(plan, facts)
    checked += check_rows(plan, facts)
    checked += check_placement_certificate(plan, facts)
    checked += check_bound(plan, facts)
    return checked
