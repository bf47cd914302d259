"""Layouts to compare: a plan's own, and the two it is usually held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import Infeasible, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.plan import Plan
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window


@dataclass(frozen=True, eq=False)
class Layout:
    """Where samples and experts are, without claims.

    Attributes
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices.
    logical_to_slot
        int64 [L, E]; slot s lives on EP rank s // (E / P).
    """

    name: str
    topology: Topology
    cells: Sequence[Sequence[Sequence[int]]]
    logical_to_slot: NDArray[np.int64]


def plan_layout(plan: Plan, window: Window, name: str, where: str = "plan") -> Layout:
    """The layout of a plan, after checking that the plan belongs to the window.

    Raises
    ------
    InvalidInput
        Another window, cells that do not hold every sample exactly once, or slots that are no bijection.
    """
    claimed = tuple(plan.window.get(key) for key in ("samples", "layers", "experts"))
    shape = tuple(window.demand.shape)
    if claimed != shape:
        raise InvalidInput(f"{where}: made for {claimed} samples, layers, experts; the window has {shape}")
    if plan.window.get("sha256") != window.sha256:
        raise InvalidInput(f"{where}: field 'window.sha256': the plan was made for another window")
    if len(plan.cells) == 0 or any(len(row) != plan.topology.dp for row in plan.cells):
        raise InvalidInput(f"{where}: field 'cells': expected rows of {plan.topology.dp} cells")
    listed = sorted(i for row in plan.cells for cell in row for i in cell)
    if listed != list(range(window.num_samples)):
        raise InvalidInput(f"{where}: field 'cells': expected every sample 0..{window.num_samples - 1} exactly once")
    return Layout(name, plan.topology, plan.cells, plan_slots(plan, window, where))


def plan_slots(plan: Plan, window: Window, where: str = "plan") -> NDArray[np.int64]:
    """A plan's placement, int64 [L, E], after checking that it fits the window's layers and experts.

    Raises
    ------
    InvalidInput
        Another shape, or slots that are no bijection; names the layer.
    """
    shape = (window.num_layers, window.num_experts)
    if plan.logical_to_slot.shape != shape:
        raise InvalidInput(f"{where}: field 'logical_to_slot': {plan.logical_to_slot.shape}, the window has {shape}")
    plan.topology.experts_per_rank(window.num_experts)
    bijective = (np.sort(plan.logical_to_slot, axis=1) == np.arange(window.num_experts)).all(axis=1)
    if not bijective.all():
        layer = int(np.argmin(bijective))
        raise InvalidInput(f"{where}: field 'logical_to_slot[{layer}]': not a bijection of experts to slots")
    return plan.logical_to_slot


def comparison_layouts(plan: Plan, window: Window, *, budget_s: float = 1.0, seed: int = 0) -> list[Layout]:
    """``baseline`` (experts at home, rows first-fit decreasing) and ``reorder`` (experts at home, RoutePack's rows).

    Both obey the plan's constraints. Together with the plan itself they are the three columns of the paper's
    throughput table (routepack.md section 8). Home is slot e for expert e.

    Raises
    ------
    Infeasible
        First-fit decreasing finds no layout.
    """
    from routepack_opt.models.atoms import build_atoms
    from routepack_opt.models.layout import cells_from_assignment
    from routepack_opt.models.rows import ffd_rows
    from routepack_opt.planner import plan_window, rows_problem

    atoms = build_atoms(window, plan.constraints, plan.token_cap)
    packed = ffd_rows(rows_problem(atoms, plan.topology, plan.token_cap, plan.constraints))
    if packed is None:
        raise Infeasible("baseline: first fit decreasing finds no layout under the plan's constraints")
    cell_of = np.empty(atoms.num_atoms, dtype=np.int64)
    for k, members in enumerate(packed):
        cell_of[members] = k
    cells = cells_from_assignment(atoms, cell_of, len(packed) // plan.topology.dp, plan.topology.dp)
    home = np.tile(np.arange(window.num_experts, dtype=np.int64), (window.num_layers, 1))
    reordered = plan_window(
        window,
        plan.topology,
        token_cap=plan.token_cap,
        cost=plan.cost,
        constraints=replace(plan.constraints, max_moved=0.0),
        co_refine=False,
        budget_s=budget_s,
        seed=seed,
    )
    return [
        Layout("baseline", plan.topology, cells, home),
        Layout("reorder", plan.topology, reordered.cells, reordered.logical_to_slot),
    ]
