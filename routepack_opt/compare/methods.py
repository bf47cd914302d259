"""The named methods, and those that other packages add."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from routepack_opt.compare import builtin as runs
from routepack_opt.compare.case import Answer, Case
from routepack_opt.compare.external import ENTRY_POINTS, TABLE
from routepack_opt.errors import InvalidInput, MissingDependency

Run = Callable[[Case, float, int], Answer]


def _always() -> None:
    return None


@dataclass(frozen=True)
class Method:
    """A way to plan a window.

    Attributes
    ----------
    run
        (case, budget_s, seed) -> Answer; raises Infeasible where it finds no layout.
    missing
        Why it cannot run here; None when it can.
    searches
        Whether budget and seed matter; the others do one fixed thing.
    prepare
        Called once before any clock starts: imports and compilation.
    """

    name: str
    about: str
    run: Run
    missing: Callable[[], str | None] = _always
    searches: bool = False
    prepare: Callable[[], None] = _always


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("identity+ffd", "experts where they stand, first fit decreasing", runs.identity_ffd),
        Method("lpt+ffd", "LPT placement, first fit decreasing", runs.lpt_ffd),
        Method("lpt+kk", "LPT placement, Karmarkar-Karp to ranks and rows (as verl and slime balance)", runs.lpt_kk),
        Method("place+ffd", "our window placement, first fit decreasing", runs.place_ffd),
        Method("lpt+rows", "LPT placement, our certified row count and its packing", runs.lpt_rows),
        Method(
            "lpt+pair", "LPT placement, first fit decreasing, cells dealt by the paper's EDPAwarePair", runs.lpt_pair
        ),
        Method("seeds", "our placement, rows and best seed layout, no search", runs.seeds),
        Method(
            "paper",
            "the paper's pipeline as printed: LPT kept, its seeds, population annealing, resampling",
            runs.paper,
            searches=True,
            prepare=runs.prepare_paper,
        ),
        Method("lpt+anneal", "LPT placement kept, our annealing of samples", runs.lpt_anneal, searches=True),
        Method("plan-fixed", "our placement kept, our annealing of samples", runs.plan_fixed, searches=True),
        Method("plan", "the whole planner: placement and layout refined together", runs.plan_full, searches=True),
        Method("plan-cuda", "the whole planner on a CUDA device", runs.plan_cuda, runs.no_cuda, searches=True),
        Method(
            "cp-sat",
            "LPT placement kept, exact model in CP-SAT (small windows)",
            runs.cp_sat,
            _always,
            True,
            runs.import_solvers,
        ),
        Method(
            "highs",
            "LPT placement kept, exact model in HiGHS (small windows)",
            runs.highs,
            _always,
            True,
            runs.import_solvers,
        ),
        *(Method(e.name, e.about, e.run, e.missing) for e in TABLE),
    )
}


def available() -> dict[str, Method]:
    """Methods that can run here, those of installed plug-ins included."""
    return {name: method for name, method in all_methods().items() if method.missing() is None}


def all_methods() -> dict[str, Method]:
    """The registry and the methods that installed packages offer as entry points."""
    methods = dict(METHODS)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        method = entry.load()
        if not isinstance(method, Method):
            raise InvalidInput(f"entry point {entry.name!r} of group {ENTRY_POINTS}: is not a Method")
        methods[method.name] = method
    return methods


def find_methods(names: list[str]) -> list[Method]:
    """Methods by name, whatever the case of the letters.

    Raises
    ------
    InvalidInput
        Unknown name.
    MissingDependency
        A method that cannot run here; says why.
    """
    known = all_methods()
    found = []
    for name in dict.fromkeys(name.strip().lower() for name in names):
        if name not in known:
            raise InvalidInput(f"method {name!r} is unknown; expected some of {', '.join(known)}")
        reason = known[name].missing()
        if reason is not None:
            raise MissingDependency(f"method {name!r} cannot run here: {reason}")
        found.append(known[name])
    return found
