"""What the named methods do: each a function (case, budget_s, seed) -> Answer."""

from __future__ import annotations

import importlib
import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.compare.case import PLAIN, Answer, Case
from routepack_opt.compare.heuristics import (
    as_layout,
    atoms_and_rows,
    cell_numbers,
    ffd_atoms,
    ffd_cells,
    partition_cells,
)
from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.rows import ffd_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.models.layout_exact import LayoutEngine
    from routepack_opt.models.layout_search import LayoutTask
    from routepack_opt.plan import Plan


# Placements


def identity_slots(case: Case) -> NDArray[np.int64]:
    """int64 [L, E], slot e holds expert e."""
    window = case.window
    return np.tile(np.arange(window.num_experts, dtype=np.int64), (window.num_layers, 1))


def lpt_slots(case: Case) -> NDArray[np.int64]:
    """int64 [L, E], the paper's placement."""
    from routepack_opt.models.placement import lpt, slots_from_ranks

    return slots_from_ranks(lpt(case.window.total_load, case.topology.ep), case.topology.ep)


def our_slots(case: Case) -> NDArray[np.int64]:
    """int64 [L, E], our window placement, without regard to where experts stand."""
    from routepack_opt.models.placement import slots_from_ranks, solve_placement

    ranks = solve_placement(case.window.total_load, case.topology.ep).rank_of
    return slots_from_ranks(ranks, case.topology.ep)


# Methods that do one fixed thing


def identity_ffd(case: Case, budget_s: float, seed: int) -> Answer:
    """Experts where they stand, first fit decreasing."""
    return Answer(ffd_cells(case), identity_slots(case))


def lpt_ffd(case: Case, budget_s: float, seed: int) -> Answer:
    """LPT, first fit decreasing."""
    return Answer(ffd_cells(case), lpt_slots(case))


def lpt_kk(case: Case, budget_s: float, seed: int) -> Answer:
    """LPT, balanced partitions."""
    return Answer(partition_cells(case), lpt_slots(case))


def place_ffd(case: Case, budget_s: float, seed: int) -> Answer:
    """Our window placement, first fit decreasing."""
    return Answer(ffd_cells(case), our_slots(case))


def lpt_rows(case: Case, budget_s: float, seed: int) -> Answer:
    """LPT, the packing that proves the row count."""
    from routepack_opt.models.rows import solve_rows

    atoms, problem = atoms_and_rows(case)
    packed = solve_rows(problem, time_limit_s=budget_s, seed=seed).cells
    return Answer(as_layout(case, atoms, packed), lpt_slots(case))


def lpt_pair(case: Case, budget_s: float, seed: int) -> Answer:
    """LPT, first fit decreasing, cells dealt by EDPAwarePair."""
    from routepack_opt.models.placement import lpt
    from routepack_opt.models.seeds import edp_aware_pair, rank_loads_of_atoms

    atoms, problem = atoms_and_rows(case)
    packed = ffd_atoms(problem)
    dp = case.topology.dp
    ranks = lpt(case.window.total_load, case.topology.ep)
    loads = rank_loads_of_atoms(atoms, ranks, case.topology.ep)
    cell_of = edp_aware_pair(loads, packed, case.topology, len(packed) // dp)
    return Answer(cells_from_assignment(atoms, cell_of, len(packed) // dp, dp), lpt_slots(case))


# Our planner, whole and in parts


def _plan(
    case: Case,
    budget_s: float,
    seed: int,
    *,
    co_refine: bool = True,
    device: str = "cpu",
    budget_steps: int | None = None,
) -> Answer:
    from routepack_opt.planner import plan_window

    plan = plan_window(
        case.window,
        case.topology,
        token_cap=case.token_cap,
        cost=case.cost,
        budget_s=budget_s,
        budget_steps=budget_steps,
        seed=seed,
        device=device,
        co_refine=co_refine,
    )
    return answer_of_plan(plan)


def answer_of_plan(plan: Plan) -> Answer:
    """A plan as an answer."""
    proposals = int(plan.timings.get("proposals", 0))
    return Answer(plan.cells, plan.logical_to_slot, plan=plan, proposals=proposals, notes=plan.notes)


def plan_full(case: Case, budget_s: float, seed: int) -> Answer:
    """The whole planner."""
    return _plan(case, budget_s, seed)


def plan_fixed(case: Case, budget_s: float, seed: int) -> Answer:
    """The planner without co-refinement."""
    return _plan(case, budget_s, seed, co_refine=False)


def plan_cuda(case: Case, budget_s: float, seed: int) -> Answer:
    """The planner on a CUDA device."""
    return _plan(case, budget_s, seed, device="cuda")


@cache
def no_cuda() -> str | None:
    """The planner is asked with the smallest window there is."""
    from routepack_opt.planner import plan_window
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

    try:
        plan_window(Window([1], [[[1]]]), Topology(ep=1), token_cap=1, budget_steps=0, device="cuda")
    except RoutePackError as error:
        return " ".join(str(error).split())
    return None


def seeds(case: Case, budget_s: float, seed: int) -> Answer:
    """The planner without search."""
    return _plan(case, budget_s, seed, budget_steps=0)


def lpt_anneal(case: Case, budget_s: float, seed: int) -> Answer:
    """The paper's question with our engine: the placement is LPT's and stays, only samples move."""
    from routepack_opt.models.layout_search import search_layout

    start = time.perf_counter()
    task = lpt_task(case, 0.2 * budget_s, seed)
    found = search_layout(task, deadline=start + 0.97 * budget_s, steps=None, seed=seed, refine=False)
    cells = cells_from_assignment(task.atoms, found.best.cell_of, task.num_rows, case.topology.dp)
    return Answer(cells, lpt_slots(case), proposals=found.num_scored)


def paper(case: Case, budget_s: float, seed: int) -> Answer:
    """The paper's pipeline."""
    from routepack_opt.compare.paper import paper_pipeline

    return paper_pipeline(case, budget_s, seed)


def prepare_paper() -> None:
    """Compile the paper's proposals."""
    from routepack_opt.compare import paper

    paper.warmup()


def lpt_task(case: Case, rows_s: float, seed: int) -> LayoutTask:
    """The layout task with rows counted and experts placed by LPT."""
    from routepack_opt.models.layout_bounds import averaging_bound
    from routepack_opt.models.layout_search import LayoutTask
    from routepack_opt.models.placement import lpt, placement_bounds
    from routepack_opt.models.rows import solve_rows

    atoms, problem = atoms_and_rows(case)
    load = case.window.total_load
    ranks = lpt(load, case.topology.ep)
    bounds, _ = placement_bounds(load, case.topology.ep)
    return LayoutTask(
        window=case.window,
        topology=case.topology,
        token_cap=case.token_cap,
        cost=case.cost,
        constraints=PLAIN,
        atoms=atoms,
        rows_problem=problem,
        cells=solve_rows(problem, time_limit_s=rows_s, seed=seed).cells,
        rank_of=ranks,
        lpt_ranks=ranks,
        standing=ranks,
        bound=averaging_bound(case.window.lengths, bounds, case.topology, case.token_cap, case.cost).value,
    )


# Exact solvers, the placement fixed

_MOST_ENTRIES = 400_000  # of the exact model's matrix; beyond, building it takes seconds and solving it forever


def _exact(case: Case, budget_s: float, seed: int, engine: LayoutEngine) -> Answer:
    """LPT placement kept; started from first fit decreasing where that has as many rows."""
    from routepack_opt.models.layout_exact import solve_layout_exact

    start = time.perf_counter()
    task = lpt_task(case, 0.2 * budget_s, seed)
    n, num_layers, _ = task.atoms.demand.shape
    entries = n * len(task.cells) * (num_layers * case.topology.ep + n // 2)
    if entries > _MOST_ENTRIES:
        raise InvalidInput(f"window: too large for an exact model ({entries:,} entries; at most {_MOST_ENTRIES:,})")
    packed = ffd_rows(task.rows_problem)
    cells = packed if packed is not None and len(packed) == len(task.cells) else task.cells
    hint = cell_numbers(cells, n)
    left_s = max(0.0, budget_s - (time.perf_counter() - start))
    found = solve_layout_exact(task, engine=engine, time_limit_s=left_s, seed=seed, hint=hint)
    best = hint if found.cell_of is None else found.cell_of
    layout = cells_from_assignment(task.atoms, best, task.num_rows, case.topology.dp)
    notes = (f"{found.solver} {found.version}: {found.status}", *((found.note,) if found.note else ()))
    return Answer(layout, lpt_slots(case), fixed_bound=found.bound, notes=notes)


def import_solvers() -> None:
    """Import the exact solvers before a clock runs."""
    from routepack_opt.models import layout_exact  # noqa: F401

    for name in ("ortools.sat.python.cp_model", "highspy"):
        importlib.import_module(name)


def cp_sat(case: Case, budget_s: float, seed: int) -> Answer:
    """The exact model in CP-SAT."""
    return _exact(case, budget_s, seed, "cp-sat")


def highs(case: Case, budget_s: float, seed: int) -> Answer:
    """The exact model in HiGHS."""
    return _exact(case, budget_s, seed, "highs")
