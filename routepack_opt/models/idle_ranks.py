"""EP ranks that get no assignment in some row and layer: avoided where it costs nothing, and reported.

Grouped kernels and gradient hooks of some frameworks stumble over a rank without tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.models.finish import loads_by_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_WORK = 2_000_000  # array entries looked at: some ten milliseconds


def fill_idle_ranks(
    rows: NDArray[np.int64], rank_of: NDArray[np.int64], standing: NDArray[np.int64], num_ranks: int
) -> NDArray[np.int64]:
    """``rank_of`` with experts swapped so that fewer ranks idle, every row-shard's peak and cost staying the same.

    No swap takes more experts away from where they stand. A fixed amount of work, hence the same answer everywhere.

    Parameters
    ----------
    rows
        int64 [X, L, E], demand of every row-shard.
    rank_of, standing
        int64 [L, E], EP rank of each expert, and the one in force.
    """
    result = rank_of.copy()
    work = _MAX_WORK
    for layer in range(rank_of.shape[0]):
        while work > 0:
            swap, spent = _find_swap(rows[:, layer, :], result[layer], standing[layer], num_ranks)
            work -= spent
            if swap is None:
                break
            result[layer, list(swap)] = result[layer, list(swap[::-1])]
    return result


def _find_swap(
    demand: NDArray[np.int64], ranks: NDArray[np.int64], standing: NDArray[np.int64], num_ranks: int
) -> tuple[tuple[int, int] | None, int]:
    """Two experts of one layer (demand int64 [X, E]) whose swap leaves fewer idle ranks, and the work of looking."""
    loads = loads_by_rank(demand, ranks, num_ranks)
    idle = (loads == 0) & (loads.sum(axis=1, keepdims=True) > 0)
    spent = demand.size
    peaks = loads.max(axis=1)
    for rank in np.flatnonzero(idle.any(axis=0)).tolist():
        others = np.flatnonzero(ranks != rank)
        theirs = ranks[others]
        for expert in np.flatnonzero(ranks == rank).tolist():
            spent += 8 * demand.shape[0] * others.size
            given = demand[:, others] - demand[:, [expert]]  # [X, F], what comes to ``rank``
            here, there = loads[:, [rank]] + given, loads[:, theirs] - given
            fewer = (
                idle[:, [rank]].astype(np.int64)
                + idle[:, theirs]
                - ((here == 0) & (peaks[:, None] > 0))
                - ((there == 0) & (peaks[:, None] > 0))
            ).sum(axis=0)
            away = (theirs != standing[expert]).astype(np.int64) + (rank != standing[others])
            away_before = int(rank != standing[expert]) + (theirs != standing[others])
            fits = (np.maximum(here, there) <= peaks[:, None]).all(axis=0)
            for k in np.flatnonzero(fits & (fewer > 0) & (away <= away_before)).tolist():
                after = loads.copy()
                after[:, rank], after[:, theirs[k]] = here[:, k], there[:, k]
                if (after.max(axis=1) == peaks).all():
                    return (expert, int(others[k])), spent
    return None, spent


def idle_ranks_note(loads: NDArray[np.int64]) -> str | None:
    """One line on ranks without assignments where their layer has some; None when there are none.

    Parameters
    ----------
    loads
        int64 [R, G, L, P], assignments each EP rank computes.
    """
    idle = (loads == 0) & (loads.sum(axis=3, keepdims=True) > 0)
    count = int(idle.sum())
    if count == 0:
        return None
    row, shard, layer, rank = (int(i) for i in np.argwhere(idle)[0])
    return (
        f"idle EP ranks: {count} of {idle.size} (row, shard, layer, EP rank) get no assignment,"
        f" first row {row}, shard {shard}, layer {layer}, EP rank {rank}"
    )
