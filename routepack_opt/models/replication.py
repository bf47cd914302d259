"""Replication: more slots than experts. How many copies of each expert, and on which EP ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.placement import check_load
from routepack_opt.models.token_split import count_copies, even_split, free_split, wrap_around
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_KICKS = 200
_EQUAL_WITHIN = 5e-5


@dataclass(frozen=True)
class ReplicationResult:
    """Copies of every layer's experts and what they carry.

    Attributes
    ----------
    slot_expert
        int64 [L, S], the logical expert in each slot; slot s lives on EP rank s // (S / P).
    copies
        int64 [L, E], slots of each expert, at least one.
    tokens
        float64 [L, S], load of each slot: an even share of its expert's load, or the LP's split.
    reached
        float64 [L], largest rank load.
    bound
        float64 [L], lower bound on ``reached`` for all numbers of copies, ranks and splits.
    """

    slot_expert: NDArray[np.int64]
    copies: NDArray[np.int64]
    tokens: NDArray[np.float64]
    reached: NDArray[np.float64]
    bound: NDArray[np.float64]


def solve_replication(
    load: ArrayLike, num_ranks: int, num_slots: int, *, split: str = "even", seed: int = 0
) -> ReplicationResult:
    """Choose copies and ranks together so that the largest rank load is as small as the search can make it.

    No rank holds two copies of one expert unless ``num_slots`` > E * P leaves no other way.

    Parameters
    ----------
    load
        int [L, E], tokens routed to each logical expert.
    num_ranks
        P; need not divide E.
    num_slots
        S >= E, a multiple of P.
    split
        "even": every copy carries the same share (what dispatchers do). "free": a linear program splits the tokens.
    seed
        Of the search's random kicks; the amount of work is fixed.

    Raises
    ------
    InvalidInput
        Bad loads; fewer slots than experts; slots that do not divide over ranks (names the next number that does).
    """
    array = check_load(load, 1)
    num_experts = array.shape[1]
    _check_slots(num_experts, num_ranks, num_slots)
    if split not in ("even", "free"):
        raise InvalidInput(f'split: {split!r} is unknown; expected "even" or "free"')
    bound = replication_bound(array, num_ranks, num_slots)
    slot_expert = _search(array, num_ranks, num_slots, bound, seed)
    if split == "even":
        tokens = even_split(array, slot_expert)
        return ReplicationResult(
            slot_expert, count_copies(slot_expert, num_experts), tokens, _rank_max(tokens, num_ranks), bound
        )
    tokens = free_split(array, slot_expert, num_ranks)
    reached = _rank_max(tokens, num_ranks)
    hard = np.flatnonzero(reached > bound * (1 + _EQUAL_WITHIN))
    if len(hard):
        cut = np.stack([wrap_around(array[layer], num_ranks, num_slots, float(bound[layer])) for layer in hard])
        cut_tokens = free_split(array[hard], cut, num_ranks)
        better = _rank_max(cut_tokens, num_ranks) < reached[hard]
        slot_expert[hard[better]], tokens[hard[better]] = cut[better], cut_tokens[better]
        reached = _rank_max(tokens, num_ranks)
    return ReplicationResult(slot_expert, count_copies(slot_expert, num_experts), tokens, reached, bound)


def replication_bound(load: NDArray[np.int64], num_ranks: int, num_slots: int) -> NDArray[np.float64]:
    """float64 [L]: the mean rank load, or the largest expert over as many ranks as its copies can reach."""
    num_experts = load.shape[1]
    reach = min(num_ranks, num_slots - num_experts + 1)
    bound: NDArray[np.float64] = np.maximum(load.sum(axis=1) / num_ranks, load.max(axis=1) / reach)
    return bound


def keep_slots(slot_expert: NDArray[np.int64], standing: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Permute ranks, then slots inside ranks, so that as many slots as possible keep the expert they hold.

    Parameters
    ----------
    slot_expert, standing
        int64 [L, S], wanted and in force.
    """
    from scipy.optimize import linear_sum_assignment

    num_layers, num_slots = slot_expert.shape
    capacity = num_slots // num_ranks
    num_experts = int(max(slot_expert.max(), standing.max())) + 1
    result = standing.copy()
    for layer in range(num_layers):
        new = slot_expert[layer].reshape(num_ranks, capacity)
        old = standing[layer].reshape(num_ranks, capacity)
        here = np.zeros((2, num_ranks, num_experts), dtype=np.int64)
        for side, table in enumerate((new, old)):
            np.add.at(here[side], (np.arange(num_ranks)[:, None], table), 1)
        overlap = np.minimum(here[0][:, None], here[1][None]).sum(axis=2)
        for group, rank in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
            wanted = new[group].tolist()
            row: list[int] = []
            for expert in old[rank].tolist():
                if expert in wanted:
                    wanted.remove(expert)
                    row.append(expert)
                else:
                    row.append(-1)
            for k in range(capacity):
                if row[k] < 0:
                    row[k] = wanted.pop(0)
            result[layer, rank * capacity : (rank + 1) * capacity] = row
    return result


def check_table(
    slot_expert: ArrayLike, num_experts: int, num_ranks: int, name: str = "table", *, num_nodes: int = 1
) -> NDArray[np.int64]:
    """A physical-to-logical table as int64 [L, S] that misses no expert and doubles none on a rank, or InvalidInput.

    A rank may hold an expert twice only where the expert has more copies than there are ranks; ranks of one node, where
    all copies of an expert keep to one of ``num_nodes`` nodes.
    """
    array = integer_array(slot_expert, name, 2, low=0, high=num_experts - 1).astype(np.int64)
    num_slots = array.shape[1]
    _check_slots(num_experts, num_ranks, num_slots)
    copies = count_copies(array, num_experts)
    if (copies == 0).any():
        layer, expert = np.argwhere(copies == 0)[0].tolist()
        raise InvalidInput(f"{name}[{layer}]: expert {expert} has no slot; expected at least one for every expert")
    ordered = np.sort(array.reshape(len(array), num_ranks, -1), axis=2)
    twice = ordered[:, :, 1:] == ordered[:, :, :-1]
    layers = np.arange(len(array))[:, None, None]
    twice &= copies[layers, ordered[:, :, 1:]] <= num_ranks // num_nodes
    if twice.any():
        layer, rank, k = np.argwhere(twice)[0].tolist()
        raise InvalidInput(
            f"{name}[{layer}]: EP rank {rank} holds expert {ordered[layer, rank, k]} twice; expected different experts"
        )
    return array


def warmup() -> None:
    """Compile every kernel used here."""
    from routepack_opt.solvers import replica_search

    replica_search.warmup()


def _check_slots(num_experts: int, num_ranks: int, num_slots: int) -> None:
    if num_slots < num_experts:
        raise InvalidInput(
            f"num_slots: {num_slots} slots cannot hold {num_experts} experts; expected {num_experts} or more"
        )
    if num_ranks < 1 or num_slots % num_ranks:
        valid = -(-num_slots // max(1, num_ranks)) * max(1, num_ranks)
        raise InvalidInput(
            f"num_slots: {num_slots} slots do not divide over {num_ranks} ranks; the next valid number is {valid}"
        )


def _search(
    load: NDArray[np.int64], num_ranks: int, num_slots: int, bound: NDArray[np.float64], seed: int
) -> NDArray[np.int64]:
    from routepack_opt.solvers.replica_search import replicate

    num_layers, num_experts = load.shape
    if num_slots > num_experts * num_ranks:
        # more slots than distinct (expert, rank) pairs: the same list on every rank, hottest experts twice and more
        capacity = num_slots // num_ranks
        order = np.argsort(-load, axis=1, kind="stable")
        return np.tile(order[:, np.arange(capacity) % num_experts], (1, num_ranks))
    tables = replicate(load, num_ranks, num_slots, bound * (1 + _EQUAL_WITHIN), kicks=_KICKS, seed=seed)
    return tables.reshape(num_layers, num_slots)


def _rank_max(tokens: NDArray[np.float64], num_ranks: int) -> NDArray[np.float64]:
    largest: NDArray[np.float64] = tokens.reshape(len(tokens), num_ranks, -1).sum(axis=2).max(axis=1)
    return largest
