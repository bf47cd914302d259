"""One plan for all ranks: rank 0 plans and broadcasts, or every rank plans the same.

Names: N samples, R rows, D DP ranks, L MoE layers, E experts, P EP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel, score
from routepack_opt.errors import Infeasible, RoutePackError
from routepack_opt.integrations.torch_moe.mesh import ParallelMesh, broadcast_

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

Cells = tuple[tuple[tuple[int, ...], ...], ...]
_FACTS = ("predicted_gain", "load_before", "load_after", "plan_gap")


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Where samples run and experts live in one optimizer step.

    Attributes
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices.
    logical_to_slot
        int64 [L, E].
    facts
        ``predicted_gain``: slowest shard of contiguous experts with first-fit rows over that of this layout, minus 1;
        ``load_before``, ``load_after``: largest over mean load of an EP rank over the window, mean over layers,
        contiguous and here; ``plan_gap``: distance to the proved bound (absent without a plan).
    """

    cells: Cells
    logical_to_slot: NDArray[np.int64]
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """R."""
        return len(self.cells)


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
    """``predicted_gain``, ``load_before`` and ``load_after`` of :class:`StepLayout`."""
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


def agree_on_layout(
    make: Callable[[], StepLayout], window: Window, mesh: ParallelMesh, *, every_rank: bool = False
) -> StepLayout:
    """The layout ``make`` returns on rank 0, on every rank; or each rank's own, compared.

    Parameters
    ----------
    make
        Called on rank 0 only, unless ``every_rank``.

    Raises
    ------
    RoutePackError
        What ``make`` raised, on the rank where it did; elsewhere that rank 0 could not plan, or that plans differ.
    """
    layout: StepLayout | None = None
    problem: RoutePackError | None = None
    if mesh.rank == 0 or every_rank:
        try:
            layout = make()
        except RoutePackError as error:
            problem = error
    mine = _encode(layout, window, mesh.num_ranks)
    sent, facts = torch.from_numpy(mine), torch.zeros(len(_FACTS), dtype=torch.float64)
    if layout is not None:
        facts = torch.tensor([layout.facts.get(name, np.nan) for name in _FACTS], dtype=torch.float64)
    sent, facts = sent.to(mesh.device), facts.to(mesh.device)
    broadcast_(sent, 0, mesh.dp_group)
    broadcast_(facts, 0, mesh.dp_group)
    if problem is not None:
        raise problem
    received = sent.cpu().numpy()
    if received[0] == 0:
        raise RoutePackError(f"rank {mesh.rank}: rank 0 could not plan this step")
    if every_rank and not np.array_equal(mine, received):
        raise RoutePackError(f"rank {mesh.rank}: its plan differs from that of rank 0; use planner = 'rank0'")
    known = {name: value for name, value in zip(_FACTS, facts.tolist(), strict=True) if not np.isnan(value)}
    return _decode(received, window, mesh.num_ranks, known)


def _encode(layout: StepLayout | None, window: Window, num_ranks: int) -> NDArray[np.int64]:
    """Int64 [1 + N + L E]: rows (0: none), cell r * D + d of each sample, slots."""
    parts = np.zeros(1 + window.num_samples + window.num_layers * window.num_experts, dtype=np.int64)
    if layout is None:
        return parts
    parts[0] = layout.rows
    for row, cells in enumerate(layout.cells):
        for rank, cell in enumerate(cells):
            parts[1 + np.array(cell, dtype=np.int64)] = row * num_ranks + rank
    parts[1 + window.num_samples :] = layout.logical_to_slot.reshape(-1)
    return parts


def _decode(parts: NDArray[np.int64], window: Window, num_ranks: int, facts: dict[str, float]) -> StepLayout:
    rows, cell_of = int(parts[0]), parts[1 : 1 + window.num_samples]
    cells: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(rows)]
    for sample, cell in enumerate(cell_of.tolist()):
        cells[cell // num_ranks][cell % num_ranks].append(sample)
    slots = parts[1 + window.num_samples :].reshape(window.num_layers, window.num_experts)
    return StepLayout(_frozen(cells), slots.copy(), facts)


def _frozen(cells: Any) -> Cells:
    return tuple(tuple(tuple(int(i) for i in cell) for cell in row) for row in cells)
