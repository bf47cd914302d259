"""From one placement to the next: fewest moved experts, and the slots they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def contiguous_ranks(num_layers: int, num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """int64 [L, E], the identity placement: expert e on EP rank e // H."""
    ranks = np.arange(num_experts, dtype=np.int64) // (num_experts // num_ranks)
    return np.tile(ranks, (num_layers, 1))


def num_moved(rank_of: NDArray[np.int64], standing: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [L], experts of each layer whose EP rank differs."""
    counts: NDArray[np.int64] = (rank_of != standing).sum(axis=1, dtype=np.int64)
    return counts


def relabel_ranks(rank_of: NDArray[np.int64], standing: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Permute the ranks of each layer so that the fewest experts leave their standing rank.

    The groups of experts stay as they are, so rank loads are permuted too and their maximum is the same. Exact: a
    maximum-weight assignment of groups to ranks by the number of experts that already stand there.

    Parameters
    ----------
    rank_of, standing
        int64 [L, E], EP rank of each logical expert, wanted and in force.
    """
    from scipy.optimize import linear_sum_assignment

    result = rank_of.copy()
    overlap = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for layer in np.flatnonzero((rank_of != standing).any(axis=1)):
        overlap[:] = 0
        np.add.at(overlap, (rank_of[layer], standing[layer]), 1)
        groups, ranks = linear_sum_assignment(overlap, maximize=True)
        new_rank = np.empty(num_ranks, dtype=np.int64)
        new_rank[groups] = ranks
        result[layer] = new_rank[rank_of[layer]]
    return result


def slots_from_ranks(
    rank_of: NDArray[np.int64], num_ranks: int, standing_slots: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """int64 [L, E], a slot of its rank for each expert; experts that stay in their rank keep their slot.

    Parameters
    ----------
    rank_of
        int64 [L, E] with exactly H = E / P experts a rank.
    standing_slots
        int64 [L, E], the logical_to_slot in force; None means identity. Newcomers take a rank's free slots in the
        order of their expert ids.
    """
    num_layers, num_experts = rank_of.shape
    capacity = num_experts // num_ranks
    if standing_slots is None:
        standing_slots = np.tile(np.arange(num_experts, dtype=np.int64), (num_layers, 1))
    slots = standing_slots.astype(np.int64, copy=True)
    moves = standing_slots // capacity != rank_of
    for layer in np.flatnonzero(moves.any(axis=1)):
        newcomers = np.flatnonzero(moves[layer])
        newcomers = newcomers[np.argsort(rank_of[layer, newcomers], kind="stable")]
        free = np.ones(num_experts, dtype=bool)
        free[slots[layer, ~moves[layer]]] = False
        # each rank has as many free slots as newcomers, so both lists run through the ranks in step
        slots[layer, newcomers] = np.flatnonzero(free)
    return slots
