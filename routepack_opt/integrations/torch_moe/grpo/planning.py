"""What a step would look like without a planner, and what a plan gains over it.

Names: R rows, L MoE layers, E experts, P EP ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel, score
from routepack_opt.errors import Infeasible

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

Cells = tuple[tuple[tuple[int, ...], ...], ...]


def contiguous_slots(num_layers: int, num_experts: int) -> NDArray[np.int64]:
    """Slot e holds expert e, int64 [L, E]."""
    return np.tile(np.arange(num_experts, dtype=np.int64), (num_layers, 1))


def first_fit_cells(window: Window, topology: Topology, token_cap: int) -> Cells:
    """First-fit-decreasing rows: what a trainer without a planner does.

    Raises
    ------
    Infeasible
        No layout under the cap; says what would do.
    """
    from routepack_opt.models.atoms import build_atoms
    from routepack_opt.models.layout import cells_from_assignment
    from routepack_opt.models.rows import ffd_rows
    from routepack_opt.planner import rows_problem

    constraints = Constraints()
    atoms = build_atoms(window, constraints, token_cap)
    packed = ffd_rows(rows_problem(atoms, topology, token_cap, constraints))
    if packed is None:
        raise Infeasible(f"first fit finds no layout of {window.num_samples} samples under a cap of {token_cap} tokens")
    cell_of = np.empty(atoms.num_atoms, dtype=np.int64)
    for cell, members in enumerate(packed):
        cell_of[members] = cell
    return _frozen(cells_from_assignment(atoms, cell_of, len(packed) // topology.dp, topology.dp))


def layout_facts(
    window: Window, topology: Topology, token_cap: int, cost: CostModel, cells: Cells, slots: NDArray[np.int64]
) -> dict[str, float]:
    """What a layout gains over contiguous experts with first-fit rows.

    Returns
    -------
    ``predicted_gain``: slowest shard there over slowest shard here, minus 1. ``load_before``, ``load_after``: largest
    over mean load of an EP rank over the window, mean over layers, there and here.
    """
    contiguous = contiguous_slots(window.num_layers, window.num_experts)
    plain = score(window, first_fit_cells(window, topology, token_cap), contiguous, topology, token_cap, cost)
    mine = score(window, cells, slots, topology, token_cap, cost)
    return {
        "predicted_gain": plain.slowest_shard / mine.slowest_shard - 1.0 if mine.slowest_shard > 0 else 0.0,
        "load_before": rank_imbalance(window, contiguous, topology.ep),
        "load_after": rank_imbalance(window, slots, topology.ep),
    }


def rank_imbalance(window: Window, logical_to_slot: NDArray[np.int64], num_ranks: int) -> float:
    """Largest over mean load of an EP rank, mean over the layers that carry load; 1 is even."""
    slot_load = np.empty_like(window.total_load)
    np.put_along_axis(slot_load, logical_to_slot, window.total_load, axis=1)
    loads = slot_load.reshape(window.num_layers, num_ranks, -1).sum(axis=2)
    carrying = loads.sum(axis=1) > 0
    if not carrying.any():
        return 1.0
    return float((loads.max(axis=1)[carrying] / loads.mean(axis=1)[carrying]).mean())


def _frozen(cells: Any) -> Cells:
    return tuple(tuple(tuple(int(i) for i in cell) for cell in row) for row in cells)
