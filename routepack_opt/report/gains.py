"""Figures of one layout, and of the baselines a plan is compared with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.cost import attention_costs, expert_costs, rank_loads, score_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.plan import Plan
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window


@dataclass(frozen=True)
class LayoutFigures:
    """What one placement + layout costs, part by part (names of routepack.md section 8).

    Attributes
    ----------
    rows
        R.
    slowest_shard, total, worst_row
        The score.
    attention, experts
        Sums over rows and shards of A and E, in score units.
    peak_sum
        sum_{r,l} max_{g,p} W, assignments.
    peak
        max_{r,g,l,p} W, assignments.
    eta_ep
        sum_{r,l} max_g mean_p W / peak_sum; 1 is perfect EP balance. 1 when there is no demand.
    rank_cv
        Mean over layers of std_p / mean_p of the window's rank load.
    """

    rows: int
    slowest_shard: float
    total: float
    worst_row: float
    attention: float
    experts: float
    peak_sum: int
    peak: int
    eta_ep: float
    rank_cv: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def layout_figures(
    window: Window,
    cells: Sequence[Sequence[Sequence[int]]],
    logical_to_slot: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
) -> LayoutFigures:
    """Measure one layout with the exact evaluator's parts."""
    lengths = window.lengths
    tokens = np.array([[lengths[list(c)].sum() for c in row] for row in cells], dtype=np.int64)
    squares = np.array([[(lengths[list(c)] ** 2).sum() for c in row] for row in cells], dtype=np.int64)
    attention = attention_costs(cost.stages, tokens, squares, topology, token_cap)
    loads = rank_loads(window, cells, logical_to_slot, topology)
    experts = expert_costs(loads, cost.expert_weights(window.num_layers), token_cap)
    score = score_of(attention + experts, cost.sync)
    peak_sum = int(loads.max(axis=(1, 3)).sum())
    mean_sum = float(loads.mean(axis=3).max(axis=1).sum())
    per_rank = loads.sum(axis=(0, 1))
    mean = per_rank.mean(axis=1)
    loaded = mean > 0
    cv = per_rank.std(axis=1)[loaded] / mean[loaded]
    return LayoutFigures(
        rows=len(cells),
        slowest_shard=score.slowest_shard,
        total=score.total,
        worst_row=score.worst_row,
        attention=float(attention.sum()),
        experts=float(experts.sum()),
        peak_sum=peak_sum,
        peak=int(loads.max()),
        eta_ep=mean_sum / peak_sum if peak_sum else 1.0,
        rank_cv=float(cv.mean()) if cv.size else 0.0,
    )


def plan_figures(plan: Plan, window: Window) -> LayoutFigures:
    """Figures of a plan."""
    return layout_figures(window, plan.cells, plan.logical_to_slot, plan.topology, plan.token_cap, plan.cost)


def baseline_figures(
    plan: Plan, window: Window, standing_slots: NDArray[np.int64] | None = None
) -> dict[str, LayoutFigures]:
    """What users run today, under the plan's own constraints: first-fit rows with experts where they stand, and LPT.

    Empty when first fit finds no layout at all.
    """
    from routepack_opt.models.atoms import build_atoms
    from routepack_opt.models.layout import cells_from_assignment
    from routepack_opt.models.placement import lpt, slots_from_ranks
    from routepack_opt.models.rows import ffd_rows
    from routepack_opt.planner import rows_problem

    atoms = build_atoms(window, plan.constraints, plan.token_cap)
    packed = ffd_rows(rows_problem(atoms, plan.topology, plan.token_cap, plan.constraints))
    if packed is None:
        return {}
    cell_of = np.empty(atoms.num_atoms, dtype=np.int64)
    for k, members in enumerate(packed):
        cell_of[members] = k
    cells = cells_from_assignment(atoms, cell_of, len(packed) // plan.topology.dp, plan.topology.dp)
    identity = np.tile(np.arange(window.num_experts, dtype=np.int64), (window.num_layers, 1))
    placements = {
        "standing + FFD": identity if standing_slots is None else standing_slots,
        "LPT + FFD": slots_from_ranks(lpt(window.total_load, plan.topology.ep), plan.topology.ep),
    }
    return {
        name: layout_figures(window, cells, slots, plan.topology, plan.token_cap, plan.cost)
        for name, slots in placements.items()
    }
