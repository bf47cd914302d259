"""Placement: equal numbers of experts on every EP rank, smallest possible largest rank load, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import contiguous_ranks, num_moved, relabel_ranks, slots_from_ranks
from routepack_opt.models.placement_bounds import placement_bounds
from routepack_opt.topology import Topology
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PlacementResult",
    "check_load",
    "check_ranks",
    "lpt",
    "placement_bounds",
    "rank_loads",
    "relabel_ranks",
    "slots_from_ranks",
    "solve_placement",
    "warmup",
]


@dataclass(frozen=True)
class PlacementResult:
    """A placement of every layer and what is proved of it.

    Attributes
    ----------
    rank_of
        int64 [L, E], EP rank of each logical expert, exactly H = E / P experts a rank.
    reached
        int64 [L], largest rank load.
    bound
        int64 [L], lower bound on ``reached`` of every placement.
    kind
        What gives each bound: mean, largest, cardinality, hot-pigeonhole, pairing or solver.
    """

    rank_of: NDArray[np.int64]
    reached: NDArray[np.int64]
    bound: NDArray[np.int64]
    kind: tuple[str, ...]


def check_load(load: ArrayLike, num_ranks: int, name: str = "load") -> NDArray[np.int64]:
    """``load`` as int64 [L, E] with L, E >= 1, or InvalidInput / TopologyError naming what is wrong."""
    dtype = np.asarray(load).dtype
    if dtype.kind == "f":
        values = np.asarray(load)
        if not np.isfinite(values).all():
            bad = np.argwhere(~np.isfinite(values))[0].tolist()
            raise InvalidInput(
                f"{name}{bad}: {values[tuple(bad)]} is not a finite number; expected integer token counts"
            )
        raise InvalidInput(f"{name}: found {dtype}; expected integer token counts (round or scale them first)")
    array = integer_array(load, name, 2, low=0, high=(1 << 62) // max(1, np.shape(load)[-1]))
    if not array.size:
        raise InvalidInput(f"{name}: shape {array.shape} holds no expert; expected [layers, experts]")
    Topology(ep=num_ranks).experts_per_rank(array.shape[1])
    return np.ascontiguousarray(array, dtype=np.int64)


def check_ranks(rank_of: ArrayLike, shape: tuple[int, ...], num_ranks: int, name: str) -> NDArray[np.int64]:
    """``rank_of`` as int64 [L, E] with exactly H experts a rank in every layer, or InvalidInput."""
    array = integer_array(rank_of, name, 2, low=0, high=num_ranks - 1)
    if array.shape != shape:
        raise InvalidInput(f"{name}: shape {array.shape} does not match the load's {shape}")
    capacity = shape[1] // num_ranks
    counts = (array[:, :, None] == np.arange(num_ranks)).sum(axis=1)
    if (counts != capacity).any():
        layer, rank = np.argwhere(counts != capacity)[0].tolist()
        raise InvalidInput(
            f"{name}[{layer}]: EP rank {rank} holds {counts[layer, rank]} experts; expected {capacity} on every rank"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def rank_loads(load: NDArray[np.int64], rank_of: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """int64 [L, P], the load each EP rank carries, summed exactly."""
    num_layers = len(load)
    result = np.zeros((num_layers, num_ranks), dtype=np.int64)
    np.add.at(result, (np.arange(num_layers)[:, None], rank_of), load)
    return result


def lpt(load: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """The paper's placement: experts by (-load, e), each to the open rank with the smallest (rank load, rank).

    Returns
    -------
    rank_of
        int64 [L, E].
    """
    from routepack_opt.solvers.local_search import lpt_instances

    array = check_load(load, num_ranks)
    rank_of = np.zeros_like(array)
    lpt_instances(array, np.argsort(-array, axis=1, kind="stable"), num_ranks, rank_of)
    return rank_of


def solve_placement(
    load: ArrayLike,
    num_ranks: int,
    *,
    standing: ArrayLike | None = None,
    max_moved: float | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> PlacementResult:
    """Place every layer's experts: smallest largest rank load first, then fewest moved experts.

    A layer whose standing placement is already as good as the best found is left exactly as it stands.

    Parameters
    ----------
    load
        int [L, E], tokens routed to each logical expert.
    num_ranks
        P, a divisor of E.
    standing
        int [L, E], the EP ranks in force; None means identity (expert e on rank e // H).
    max_moved
        Share of the experts of each layer that may leave their standing rank; None means all.
    time_limit_s
        Stop improving after this many seconds; None does a fixed amount of work, the same result on every machine.
    seed
        Of the search's random kicks.

    Raises
    ------
    InvalidInput
        Negative, NaN or fractional loads; a standing placement without exactly H experts a rank; ``max_moved`` not in
        [0, 1].
    """
    from routepack_opt.solvers.local_search import balance

    array = check_load(load, num_ranks)
    num_layers, num_experts = array.shape
    home = (
        contiguous_ranks(num_layers, num_experts, num_ranks)
        if standing is None
        else check_ranks(standing, array.shape, num_ranks, "standing")
    )
    bound, kind = placement_bounds(array, num_ranks)
    standing_max = rank_loads(array, home, num_ranks).max(axis=1)

    free, reached = balance(array, lpt(array, num_ranks), num_ranks, bound)
    rank_of = relabel_ranks(free, home, num_ranks)
    moved = num_moved(rank_of, home)
    budget = np.full(num_layers, _move_budget(max_moved, num_experts), dtype=np.int64)
    if standing is not None or max_moved is not None:
        # from the standing placement: what the budget allows, or the same balance with fewer moves
        target = bound if max_moved is not None else reached
        near, near_reached = balance(array, home, num_ranks, target, standing=home, budget=budget)
        near_moved = num_moved(near, home)
        better = (near_reached < reached) | ((near_reached == reached) & (near_moved < moved)) | (moved > budget)
        rank_of[better], reached[better] = near[better], near_reached[better]
    stay = standing_max <= reached
    rank_of[stay], reached[stay] = home[stay], standing_max[stay]
    return PlacementResult(rank_of, reached, bound, kind)


def _move_budget(max_moved: Any, num_experts: int) -> int:
    if max_moved is None:
        return num_experts
    if isinstance(max_moved, bool) or not isinstance(max_moved, (int, float, np.number)) or not 0 <= max_moved <= 1:
        raise InvalidInput(f"max_moved: {max_moved!r} is not a share between 0 and 1")
    return int(float(max_moved) * num_experts + 1e-9)


def warmup() -> None:
    """Compile every kernel used here."""
    from routepack_opt.solvers import local_search

    local_search.warmup()
