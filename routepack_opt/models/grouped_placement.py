"""Placement in two levels: experts or routing groups onto nodes first, then onto the EP ranks of each node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput, TopologyError
from routepack_opt.models.moves import contiguous_ranks, num_moved, slots_from_ranks
from routepack_opt.models.placement import PlacementResult, check_load, check_ranks, rank_loads, solve_placement

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def solve_node_placement(
    load: ArrayLike,
    num_ranks: int,
    num_nodes: int,
    *,
    num_groups: int | None = None,
    standing: ArrayLike | None = None,
    seed: int = 0,
) -> PlacementResult:
    """Level the nodes, then the EP ranks inside each node.

    Node n owns EP ranks [n * P / nodes, (n + 1) * P / nodes). Traffic between nodes is levelled too, and whole routing
    groups stay on one node where ``num_groups`` is given (group-limited routing then reaches few nodes a token).

    Parameters
    ----------
    load
        int [L, E].
    num_nodes
        A divisor of P, and of ``num_groups``.
    num_groups
        Routing groups of E / groups consecutive experts that must not be torn between nodes; None: single experts.
    standing
        int [L, E], EP ranks in force; None means identity.
    """
    array = check_load(load, num_ranks)
    num_layers, num_experts = array.shape
    num_groups = num_experts if num_groups is None else num_groups
    _check_divides("num_groups", num_groups, num_experts, "experts")
    _check_divides("num_nodes", num_nodes, num_ranks, "EP ranks")
    _check_divides("num_nodes", num_nodes, num_groups, "groups")
    home = (
        contiguous_ranks(num_layers, num_experts, num_ranks)
        if standing is None
        else check_ranks(standing, array.shape, num_ranks, "standing")
    )
    node_of = assign_groups(array, num_groups, num_nodes, home=home // (num_ranks // num_nodes), seed=seed)
    rank_of = _inside_nodes(array, node_of, num_nodes, num_ranks, home, seed)
    reached = rank_loads(array, rank_of, num_ranks).max(axis=1)
    # the one-level bound holds for two levels as well
    free = solve_placement(array, num_ranks, standing=None if standing is None else home, seed=seed)
    if num_groups == num_experts:
        # level nodes may lack the cold experts that hot ones need as rank mates: such layers level the ranks first
        better = np.flatnonzero(free.reached < reached)
        rank_of[better] = _ranks_to_nodes(array[better], free.rank_of[better], num_nodes, num_ranks, seed)
        reached[better] = free.reached[better]
    return PlacementResult(rank_of, reached, free.bound, free.kind)


def solve_group_placement(
    load: ArrayLike, num_ranks: int, num_groups: int, *, standing: ArrayLike | None = None, seed: int = 0
) -> PlacementResult:
    """Place experts so that every routing group keeps a block of consecutive slots of its own (router-row mode).

    A trainer that permutes router rows instead of mapping ids after top-k leaves group-limited routing intact only
    under such placements. With more ranks than groups, each group is levelled over its own ranks; with more groups than
    ranks, whole groups are levelled over the ranks.

    Returns
    -------
    PlacementResult
        ``bound`` holds for group-preserving placements only; see :func:`group_slots` for the slots.

    Raises
    ------
    TopologyError
        Neither of groups and ranks divides the other.
    """
    array = check_load(load, num_ranks)
    num_layers, num_experts = array.shape
    _check_divides("num_groups", num_groups, num_experts, "experts")
    size = num_experts // num_groups
    home = (
        contiguous_ranks(num_layers, num_experts, num_ranks)
        if standing is None
        else check_ranks(standing, array.shape, num_ranks, "standing")
    )
    if num_groups % num_ranks == 0:
        group_load = array.reshape(num_layers, num_groups, size).sum(axis=2)
        group_home = home[:, ::size]
        whole = (np.repeat(group_home, size, axis=1) == home).all()
        result = solve_placement(group_load, num_ranks, standing=group_home if whole else None, seed=seed)
        return PlacementResult(np.repeat(result.rank_of, size, axis=1), result.reached, result.bound, result.kind)
    if num_ranks % num_groups:
        raise TopologyError(
            f"num_groups: {num_groups} routing groups and {num_ranks} EP ranks do not divide one another;"
            " keeping groups whole needs one to be a multiple of the other"
        )
    ranks = num_ranks // num_groups
    block = np.arange(num_experts) // size
    inside = solve_placement(
        array.reshape(-1, size), ranks, standing=_local_standing(home, block, ranks, size), seed=seed
    )
    rank_of = inside.rank_of.reshape(num_layers, num_experts) + block * ranks
    bounds = inside.bound.reshape(num_layers, num_groups)
    worst = bounds.argmax(axis=1)
    kind = tuple(inside.kind[layer * num_groups + group] for layer, group in enumerate(worst.tolist()))
    reached = inside.reached.reshape(num_layers, num_groups).max(axis=1)
    stay = (rank_loads(array, home, num_ranks).max(axis=1) <= reached) & (home // ranks == block).all(axis=1)
    rank_of[stay] = home[stay]
    return PlacementResult(rank_of, reached, bounds.max(axis=1), kind)


def group_slots(rank_of: NDArray[np.int64], num_ranks: int, num_groups: int) -> NDArray[np.int64]:
    """int64 [L, E], slots of a group-preserving placement: group by group inside a rank, expert by expert in a group.

    Raises
    ------
    InvalidInput
        When a group shares a block of slots with another; names layer and group.
    """
    num_layers, num_experts = rank_of.shape
    size = num_experts // num_groups
    order = np.argsort(rank_of, axis=1, kind="stable")
    slots = np.empty_like(rank_of)
    np.put_along_axis(slots, order, np.arange(num_experts)[None].repeat(num_layers, axis=0), axis=1)
    blocks = (slots // size).reshape(num_layers, num_groups, size)
    torn = (blocks != blocks[:, :, :1]).any(axis=2)
    if torn.any():
        layer, group = np.argwhere(torn)[0].tolist()
        raise InvalidInput(f"rank_of[{layer}]: routing group {group} does not keep a block of slots of its own")
    return slots


def assign_groups(
    load: NDArray[np.int64], num_groups: int, num_nodes: int, *, home: NDArray[np.int64] | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """int64 [L, E], the node of each expert: equal numbers of whole groups, node loads level.

    ``home`` [L, E] is the node each expert is on; it is kept where that is as good.
    """
    num_layers, num_experts = load.shape
    size = num_experts // num_groups
    group_load = load.reshape(num_layers, num_groups, size).sum(axis=2)
    standing = None
    if home is not None and (np.repeat(home[:, ::size], size, axis=1) == home).all():
        standing = home[:, ::size]
    return np.repeat(solve_placement(group_load, num_nodes, standing=standing, seed=seed).rank_of, size, axis=1)


def node_experts(node_of: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """int64 [L, nodes, E / nodes], the experts of each node in rising order."""
    num_layers, num_experts = node_of.shape
    return np.argsort(node_of, axis=1, kind="stable").reshape(num_layers, num_nodes, num_experts // num_nodes)


def _ranks_to_nodes(
    load: NDArray[np.int64], rank_of: NDArray[np.int64], num_nodes: int, num_ranks: int, seed: int
) -> NDArray[np.int64]:
    """Rename the ranks of a placement so that node loads are level; ranks of nodes that are as good stay."""
    if not len(load):
        return rank_of
    standing = contiguous_ranks(len(load), num_ranks, num_nodes)
    nodes = solve_placement(rank_loads(load, rank_of, num_ranks), num_nodes, standing=standing, seed=seed).rank_of
    return np.take_along_axis(slots_from_ranks(nodes, num_nodes), rank_of, axis=1)


def _inside_nodes(
    load: NDArray[np.int64],
    node_of: NDArray[np.int64],
    num_nodes: int,
    num_ranks: int,
    home: NDArray[np.int64],
    seed: int,
) -> NDArray[np.int64]:
    num_layers, num_experts = load.shape
    ranks, size = num_ranks // num_nodes, num_experts // num_nodes
    experts = node_experts(node_of, num_nodes).reshape(num_layers, num_experts)
    node = np.arange(num_experts) // size
    part = np.take_along_axis(load, experts, axis=1)
    standing = _local_standing(np.take_along_axis(home, experts, axis=1), node, ranks, size)
    inside = solve_placement(part.reshape(-1, size), ranks, standing=standing, seed=seed).rank_of
    rank_of = np.empty_like(load)
    np.put_along_axis(rank_of, experts, inside.reshape(num_layers, num_experts) + node * ranks, axis=1)
    if (num_moved(rank_of, home) == 0).all():
        return home
    return rank_of


def _local_standing(home: NDArray[np.int64], node: NDArray[np.intp], ranks: int, size: int) -> NDArray[np.int64]:
    """Ranks inside the node for experts already there; newcomers fill the places that are left."""
    capacity = size // ranks
    local = (home - node * ranks).reshape(-1, size)
    for row in local:
        count = np.zeros(ranks, dtype=np.int64)
        for k, rank in enumerate(row.tolist()):
            if 0 <= rank < ranks and count[rank] < capacity:
                count[rank] += 1
            else:
                row[k] = -1
        row[row < 0] = np.repeat(np.arange(ranks), capacity - count)
    return local


def _check_divides(name: str, part: int, whole: int, unit: str) -> None:
    if isinstance(part, bool) or not isinstance(part, (int, np.integer)) or part < 1 or whole % part:
        raise TopologyError(f"{name}: {part} does not divide {whole} {unit}")
