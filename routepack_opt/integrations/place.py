"""Placement alone: recorded loads and the table in force in, a table of slots for an engine to load out.

Chooses the model that fits the question (one level, replicas, nodes, routing groups, few moves) and measures the answer
against its lower bound, against the table in force, and against other loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.integrations.eplb import balanced_table
from routepack_opt.models.grouped_placement import group_slots, solve_group_placement, solve_node_placement
from routepack_opt.models.moves import contiguous_ranks, slots_from_ranks
from routepack_opt.models.placement import (
    PlacementResult,
    check_load,
    fewest_moves,
    placement_bounds,
    placement_summary,
    solve_placement,
)
from routepack_opt.models.replication import replication_bound
from routepack_opt.models.token_split import even_split
from routepack_opt.topology import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Request:
    """What is asked of a placement.

    Parameters
    ----------
    num_ranks
        P.
    num_slots
        S, a multiple of P; None: one slot an expert.
    num_nodes
        Nodes of P / nodes consecutive ranks that are levelled first.
    num_groups
        Routing groups of consecutive experts, kept whole: on one node with ``num_nodes``, else in a block of slots.
    previous
        int64 [L, S'], the table in force; None: the trivial one, see :func:`trivial_table`.
    max_moved
        Largest share of a layer's experts that may change rank.
    within
        Move as few experts as bring each layer within this share of its bound.
    prove_s
        Seconds a solver may spend on layers above their bound.
    """

    num_ranks: int
    num_slots: int | None = None
    num_nodes: int | None = None
    num_groups: int | None = None
    previous: NDArray[np.int64] | None = None
    max_moved: float | None = None
    within: float | None = None
    prove_s: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class PlacedTable:
    """A table and what is known of it.

    Attributes
    ----------
    table
        int64 [L, S], the logical expert of every slot; slot s belongs to rank s // (S / P).
    summary
        The numbers ``place --json`` reports, see :func:`routepack_opt.models.placement.placement_summary`.
    """

    table: NDArray[np.int64]
    summary: dict[str, Any]


def place(load: NDArray[np.int64], request: Request) -> PlacedTable:
    """Place the experts of every layer.

    Parameters
    ----------
    load
        int [L, E], tokens routed to each logical expert.

    Raises
    ------
    InvalidInput
        Bad loads, sizes that do not fit together (TopologyError), a previous table of other experts or layers, or
        wishes that exclude one another.
    """
    array = check_load(load, 1)
    num_experts = array.shape[1]
    num_slots = num_experts if request.num_slots is None else request.num_slots
    _check_request(request, num_experts, num_slots)
    previous = trivial_table(len(array), num_experts, num_slots)
    if request.previous is not None:
        previous = fit_table(request.previous, array, request.num_ranks)
        _check_budget(request, previous.shape[1], num_experts)
    request = replace(request, num_slots=num_slots, previous=previous if request.previous is not None else None)
    if num_slots == num_experts:
        table, result = _place_once(array, request)
        reached: NDArray[Any] = result.reached
        bound: NDArray[Any] = result.bound
        kind = result.kind
    else:
        table = _place_copies(array, request, previous)
        reached = table_peaks(array, table, request.num_ranks)
        bound = replication_bound(array, request.num_ranks, num_slots)
        kind = tuple("mean" if b <= m else "largest" for b, m in zip(bound, array.sum(axis=1) / request.num_ranks))
    if request.num_nodes is not None:
        bound, kind = _raise_to_nodes(array, request, bound, kind)
    moved = num_loaded(table, previous, num_experts, request.num_ranks)
    summary = placement_summary(array, request.num_ranks, reached, bound, kind, moved)
    num_layers = int(array.any(axis=1).sum())
    summary["moved"] = float(moved[array.any(axis=1)].sum() / max(num_layers * num_slots, 1))
    summary["previous_over_mean"] = mean_imbalance(array, previous, request.num_ranks)
    return PlacedTable(table, summary)


def _check_request(request: Request, num_experts: int, num_slots: int) -> None:
    num_ranks = request.num_ranks
    if num_slots < num_experts:
        raise InvalidInput(f"slots: {num_slots} cannot hold {num_experts} experts; expected {num_experts} or more")
    if num_slots == num_experts:
        Topology(ep=num_ranks).experts_per_rank(num_experts)
    elif num_slots % num_ranks:
        valid = -(-num_slots // num_ranks) * num_ranks
        raise InvalidInput(f"slots: {num_slots} do not divide over {num_ranks} ranks; the next valid number is {valid}")
    levels = request.num_nodes is not None or request.num_groups is not None
    single = num_slots == num_experts and not levels
    for name, value in (("max_moved", request.max_moved), ("within", request.within), ("prove_s", request.prove_s)):
        if value is not None and not single:
            raise InvalidInput(f"{name}: only for placements without replicas, nodes and routing groups")
    if request.max_moved is not None and request.within is not None:
        raise InvalidInput(
            "max_moved and within exclude one another: one caps the moves, the other what they must reach"
        )
    if num_slots > num_experts and request.num_groups is not None and request.num_nodes is None:
        raise InvalidInput("num_groups: with replicas, groups can only be kept on nodes; give the number of nodes too")
    if request.num_nodes is not None:
        for name, part, whole, unit in (
            ("num_nodes", request.num_nodes, num_ranks, "ranks"),
            ("num_groups", request.num_groups or num_experts, num_experts, "experts"),
            ("num_nodes", request.num_nodes, request.num_groups or num_experts, "groups"),
        ):
            if whole % part:
                raise InvalidInput(f"{name}: {part} does not divide {whole} {unit}")


def _check_budget(request: Request, num_standing: int, num_experts: int) -> None:
    """Moves can be capped only from a table of the same slots: another number of slots has every rank reloaded."""
    for name, value in (("max_moved", request.max_moved), ("within", request.within)):
        if value is not None and num_standing != num_experts:
            raise InvalidInput(
                f"{name}: the table in force has {num_standing} slots for {num_experts} experts;"
                " moves are counted between tables without replicas only"
            )


def _place_once(load: NDArray[np.int64], request: Request) -> tuple[NDArray[np.int64], PlacementResult]:
    """One slot an expert: the table and the result behind it."""
    num_ranks, seed = request.num_ranks, request.seed
    slots = standing = None
    if request.previous is not None and request.previous.shape == load.shape:
        slots = np.argsort(request.previous, axis=1, kind="stable").astype(np.int64)
        standing = slots // (load.shape[1] // num_ranks)
    if request.num_groups is not None and request.num_nodes is None:
        result = solve_group_placement(load, num_ranks, request.num_groups, standing=standing, seed=seed)
        new_slots = group_slots(result.rank_of, num_ranks, request.num_groups)
        return np.argsort(new_slots, axis=1, kind="stable").astype(np.int64), result
    if request.num_nodes is not None:
        result = solve_node_placement(
            load, num_ranks, request.num_nodes, num_groups=request.num_groups, standing=standing, seed=seed
        )
    elif request.within is not None:
        home = contiguous_ranks(len(load), load.shape[1], num_ranks) if standing is None else standing
        result = fewest_moves(load, num_ranks, home, within=request.within, seed=seed)
    else:
        result = solve_placement(load, num_ranks, standing=standing, max_moved=request.max_moved, seed=seed)
    if request.prove_s is not None:
        result = _prove(load, request, result)
    new_slots = slots_from_ranks(result.rank_of, num_ranks, slots)
    return np.argsort(new_slots, axis=1, kind="stable").astype(np.int64), result


def _prove(load: NDArray[np.int64], request: Request, result: PlacementResult) -> PlacementResult:
    """The solver's bounds, and its placements too where the number of moves is free."""
    from routepack_opt.models.placement_exact import prove_placement

    proved = prove_placement(
        load, request.num_ranks, result, time_limit_s=request.prove_s or 0.0, min_gap=0.0, seed=request.seed
    )
    if request.max_moved is None and request.within is None:
        return proved
    return PlacementResult(result.rank_of, result.reached, proved.bound, proved.kind)


def _raise_to_nodes(
    load: NDArray[np.int64], request: Request, bound: NDArray[Any], kind: tuple[str, ...]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Some node carries at least the bound over nodes, and its fullest rank at least the node's average."""
    num_nodes = request.num_nodes or 1
    groups = request.num_groups or load.shape[1]
    over_nodes, _ = placement_bounds(load.reshape(len(load), groups, -1).sum(axis=2), num_nodes)
    node_bound = over_nodes / (request.num_ranks // num_nodes)
    if bound.dtype.kind == "i":
        node_bound = np.ceil(node_bound)
    raised = node_bound > bound
    kinds = tuple("node" if up else name for up, name in zip(raised, kind, strict=True))
    return np.maximum(bound, node_bound.astype(bound.dtype)), kinds


def _place_copies(load: NDArray[np.int64], request: Request, previous: NDArray[np.int64]) -> NDArray[np.int64]:
    num_slots = request.num_slots or 0
    return balanced_table(
        load,
        num_slots,
        request.num_groups or load.shape[1],
        request.num_nodes or 1,
        request.num_ranks,
        standing=previous if previous.shape[1] == num_slots else None,
        seed=request.seed,
    )


def trivial_table(num_layers: int, num_experts: int, num_slots: int) -> NDArray[np.int64]:
    """int64 [L, S], what engines start from: expert s mod E in slot s."""
    return np.tile(np.arange(num_slots, dtype=np.int64) % num_experts, (num_layers, 1))


def fit_table(
    table: NDArray[np.int64], load: NDArray[np.int64], num_ranks: int, name: str = "previous"
) -> NDArray[np.int64]:
    """A table in force as [L, S'] for the layers of ``load``, or FormatError.

    Files that leave out dense layers match the layers that carry load. An expert twice on a rank is no error here:
    other balancers do that.
    """
    num_layers, num_experts = load.shape
    num_slots = table.shape[1]
    loaded = np.flatnonzero(load.any(axis=1))
    if len(table) not in (num_layers, len(loaded)):
        raise FormatError(f"{name}: {len(table)} layers, the loads have {num_layers} ({len(loaded)} not zero)")
    if num_slots < num_experts or num_slots % num_ranks:
        raise FormatError(
            f"{name}: {num_slots} slots; expected a multiple of {num_ranks} ranks, at least {num_experts}"
        )
    if int(table.max()) >= num_experts:
        layer, slot = np.argwhere(table >= num_experts)[0].tolist()
        raise FormatError(f"{name}[{layer},{slot}]: expert {table[layer, slot]}, the loads have {num_experts}")
    there = np.zeros((len(table), num_experts), dtype=bool)
    np.put_along_axis(there, table, True, axis=1)
    if not there.all():
        layer, expert = np.argwhere(~there)[0].tolist()
        raise FormatError(f"{name}[{layer}]: expert {expert} has no slot")
    if len(table) == num_layers:
        return table
    result = trivial_table(num_layers, num_experts, num_slots)
    result[loaded] = table
    return result


def num_loaded(
    table: NDArray[np.int64], previous: NDArray[np.int64], num_experts: int, num_ranks: int
) -> NDArray[np.int64]:
    """int64 [L], slots whose expert the rank did not hold before: what has to be copied from elsewhere.

    With one slot an expert this is the number of experts that change rank.
    """
    held = [np.zeros((len(table), num_ranks, num_experts), dtype=np.int64) for _ in range(2)]
    for count, side in zip(held, (table, previous), strict=True):
        rank = np.arange(side.shape[1]) // (side.shape[1] // num_ranks)
        np.add.at(count, (np.arange(len(side))[:, None], rank[None], side), 1)
    missing: NDArray[np.int64] = np.maximum(held[0] - held[1], 0).sum(axis=(1, 2))
    return missing


def table_peaks(load: NDArray[np.int64], table: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    """float64 [L], load of the fullest rank when the copies of an expert share its tokens evenly."""
    tokens = even_split(load, table).reshape(len(load), num_ranks, -1)
    peaks: NDArray[np.float64] = tokens.sum(axis=2).max(axis=1)
    return peaks


def mean_imbalance(load: NDArray[np.int64], table: NDArray[np.int64], num_ranks: int) -> float:
    """Largest over mean rank load, mean over the layers that carry load; for loads other than those planned on too."""
    if load.shape != (len(table), int(table.max()) + 1):
        raise InvalidInput(f"loads: shape {load.shape}, the table has {len(table)} layers of {int(table.max()) + 1}")
    mean = load.sum(axis=1) / num_ranks
    loaded = mean > 0
    return float((table_peaks(load, table, num_ranks)[loaded] / mean[loaded]).mean()) if loaded.any() else 1.0


def warmup(replicas: bool = False) -> None:
    """Compile the kernels that :func:`place` uses."""
    from routepack_opt.models import placement, replication

    placement.warmup()
    if replicas:
        replication.warmup()
