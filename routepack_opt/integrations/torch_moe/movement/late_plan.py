"""A plan made in two waves: what caps its second wave, and the plan that results once the late moves are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.cost import score
from routepack_opt.models.late_moves import late_move_count
from routepack_opt.models.placement import rank_loads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.plan import Plan
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window


def late_share(
    constraints: Constraints, late_moves: float | None, moved: NDArray[np.int64], num_experts: int
) -> float | None:
    """Share of each layer's experts that co-refinement may move, given what the first wave moved.

    Parameters
    ----------
    late_moves
        Cap of the second wave, see :func:`routepack_opt.models.late_moves.late_move_count`. A count of n lets a layer
        move n at most; that all layers together stay below n is seen to when the late moves are chosen.
    moved
        int64 [L], experts the first wave moves. Together with the second it must respect ``constraints.max_moved``.
    """
    late_move_count(late_moves, moved.size * num_experts)  # refuses what is no cap
    shares = []
    if isinstance(late_moves, (float, np.floating)):
        shares.append(float(late_moves))
    elif late_moves is not None:
        shares.append(min(1.0, late_moves / num_experts))
    if constraints.max_moved is not None:
        allowed = int(constraints.max_moved * num_experts + 1e-9)
        shares.append(max(0, allowed - int(moved.max())) / num_experts)
    return min(shares) if shares else None


def with_placement(
    plan: Plan,
    window: Window,
    logical_to_slot: NDArray[np.int64],
    previous: NDArray[np.int64],
    constraints: Constraints,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan with the same cells under another placement, every claim about it derived again.

    Parameters
    ----------
    logical_to_slot, previous
        int64 [L, E], the placement to run and the one in force before the step.
    constraints
        Those of the step. Where the late moves left the plan behind LPT + FFD, which moves nearly all experts, the
        share that did move is written down as the cap it obeyed.
    """
    topology: Topology = plan.topology
    per_rank = topology.experts_per_rank(window.num_experts)
    rank_of = logical_to_slot // per_rank
    moved = (rank_of != previous // per_rank).sum(axis=1).astype(np.int64)
    final = score(window, plan.cells, logical_to_slot, topology, plan.token_cap, plan.cost)
    bound = min(plan.bound, final.slowest_shard)
    reached = rank_loads(window.total_load, rank_of, topology.ep).max(axis=1)
    seed = None if plan.seed_score is None or plan.seed_rows is None else (plan.seed_rows, *plan.seed_score)
    if constraints.max_moved is None and seed is not None and (plan.rows, *final) > seed:
        constraints = replace(constraints, max_moved=float(moved.sum()) / logical_to_slot.size)
        notes = (*notes, "max_moved: the share moved; more late moves would have cost more than they gain")
    return replace(
        plan,
        logical_to_slot=logical_to_slot,
        score=final,
        bound=bound,
        gap=(final.slowest_shard - bound) / bound if bound > 0 else final.slowest_shard,
        moved_experts=moved,
        constraints=constraints,
        certificates=plan.certificates
        | {
            "placement": [
                entry | {"reached": int(value)}
                for entry, value in zip(plan.certificates["placement"], reached, strict=True)
            ]
        },
        notes=plan.notes + notes,
    )
