"""From one placement to the next: fewest moved experts, the slots they take, and the rounds they travel in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput

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


def list_transfers(rank_of: NDArray[np.int64], standing: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [M, 4], one row (layer, expert, source rank, target rank) for each moved expert."""
    layers, experts = np.nonzero(rank_of != standing)
    columns = [layers, experts, standing[layers, experts], rank_of[layers, experts]]
    return np.stack(columns, axis=1).astype(np.int64)


def transfer_seconds(
    transfers: NDArray[np.int64], expert_bytes: float | NDArray[Any], bytes_per_s: float | NDArray[Any]
) -> NDArray[np.float64]:
    """float64 [M], the time each transfer keeps its link busy.

    Parameters
    ----------
    transfers
        int64 [M, 4], see :func:`list_transfers`.
    expert_bytes
        Bytes moved with one expert (weights, masters, moments): one number, or [L] by layer.
    bytes_per_s
        Bandwidth from rank to rank: one number, or [P, P] (source, target).

    Raises
    ------
    InvalidInput
        A size or bandwidth that is not a positive number, or a table of another shape.
    """
    sizes = np.asarray(expert_bytes, dtype=np.float64)
    links = np.asarray(bytes_per_s, dtype=np.float64)
    for name, values, dims in (("expert_bytes", sizes, (0, 1)), ("bytes_per_s", links, (0, 2))):
        if values.ndim not in dims or not (np.isfinite(values).all() and (values > 0).all()):
            raise InvalidInput(f"{name}: expected positive numbers, found {values.dtype} of shape {values.shape}")
    layers, source, target = transfers[:, 0], transfers[:, 2], transfers[:, 3]
    for name, values, most in (
        ("expert_bytes", sizes, layers.max(initial=-1)),
        ("bytes_per_s", links, max(source.max(initial=-1), target.max(initial=-1))),
    ):
        if values.ndim and min(values.shape) <= most:
            raise InvalidInput(f"{name}: shape {values.shape} has no entry for index {most}")
    return np.asarray(
        (sizes[layers] if sizes.ndim else np.full(len(transfers), float(sizes)))
        / (links[source, target] if links.ndim else float(links))
    )


def schedule_moves(
    transfers: NDArray[np.int64], num_ranks: int, *, seconds: NDArray[np.float64] | None = None
) -> list[NDArray[np.int64]]:
    """Split transfers into the fewest rounds in which every rank sends at most one expert and receives at most one.

    The rounds colour the edges of the bipartite multigraph senders x receivers; by König's theorem as
    many suffice as the busiest rank sends or receives, and no fewer can do. Each new edge takes a colour free at both
    ends, after flipping an alternating path where there is none.

    Parameters
    ----------
    transfers
        int64 [M, 4], see :func:`list_transfers`.
    seconds
        float64 [M], see :func:`transfer_seconds`: long transfers then share rounds, since a round takes as long as its
        longest. The number of rounds stays the least.

    Returns
    -------
    rounds
        Rows of ``transfers``, every row in exactly one round, in their order. A rank that receives before its own
        outgoing expert has left needs one spare slot, so a round is carried out as a whole: send and receive together.
    """
    if not len(transfers):
        return []
    source, target = transfers[:, 2], transfers[:, 3]
    num_rounds = int(max(np.bincount(source).max(), np.bincount(target).max()))
    # edge_at[side][rank, colour] = transfer that uses the colour there, or -1
    edge_at = np.full((2, num_ranks, num_rounds), -1, dtype=np.int64)
    colour = np.full(len(transfers), -1, dtype=np.int64)
    ends = (source, target)
    order = range(len(transfers)) if seconds is None else np.argsort(-seconds, kind="stable").tolist()
    for edge in order:
        a, b = int(source[edge]), int(target[edge])
        free_a = int(np.argmax(edge_at[0, a] < 0))
        free_b = int(np.argmax(edge_at[1, b] < 0))
        if free_a != free_b:
            # free_a is taken at b: swap the two colours along the path that leaves b; it never reaches a
            path, side, rank, wanted, other = [], 1, b, free_a, free_b
            while (following := int(edge_at[side, rank, wanted])) >= 0:
                path.append(following)
                side = 1 - side
                rank = int(ends[side][following])
                wanted, other = other, wanted
            for step in path:
                edge_at[0, source[step], colour[step]] = edge_at[1, target[step], colour[step]] = -1
            for step in path:
                colour[step] = free_a + free_b - colour[step]
                edge_at[0, source[step], colour[step]] = edge_at[1, target[step], colour[step]] = step
        colour[edge] = free_a
        edge_at[0, a, free_a] = edge_at[1, b, free_a] = edge
    return [transfers[colour == k] for k in range(num_rounds)]
