"""Placement: equal numbers of experts on every EP rank, smallest possible largest rank load, layer by layer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import contiguous_ranks, relabel_ranks, slots_from_ranks
from routepack_opt.models.placement_bounds import placement_bounds
from routepack_opt.models.placement_search import NOISE, Search, lpt_ranks
from routepack_opt.topology import Topology
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PlacementResult",
    "check_load",
    "check_ranks",
    "fewest_moves",
    "lpt",
    "placement_bounds",
    "placement_summary",
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
    try:
        values = np.asarray(load)
    except ValueError as error:
        raise InvalidInput(f"{name}: not a rectangular array ({error})") from None
    dtype = values.dtype
    if dtype.kind == "f":
        if not np.isfinite(values).all():
            bad = np.argwhere(~np.isfinite(values))[0].tolist()
            raise InvalidInput(
                f"{name}{bad}: {values[tuple(bad)]} is not a finite number; expected integer token counts"
            )
        raise InvalidInput(f"{name}: found {dtype}; expected integer token counts (round or scale them first)")
    array = integer_array(load, name, 2, low=0, high=(1 << 60) // max(1, values.shape[-1] if values.ndim else 1))
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
    return lpt_ranks(check_load(load, num_ranks), num_ranks)


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

    With ``standing`` or ``max_moved``, placements whose largest rank loads differ by less than 0.01% count as equal and
    the one that moves fewer experts wins. A layer whose standing placement is as good as the best found stays as it is.

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
        Go on improving layers above their bound for this many seconds; None does a fixed, small amount of work and so
        gives the same result on every machine.
    seed
        Of the search's random kicks.

    Raises
    ------
    InvalidInput
        Negative, NaN or fractional loads; a standing placement without exactly H experts a rank; ``max_moved`` not in
        [0, 1].
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    array = check_load(load, num_ranks)
    home = _standing_ranks(standing, array.shape, num_ranks)
    budget = _move_budget(max_moved, array.shape)
    bound, kind = placement_bounds(array, num_ranks)
    standing_max = rank_loads(array, home, num_ranks).max(axis=1)
    search = Search(array, num_ranks, bound, home, standing_max, seed, deadline)
    if standing is None and max_moved is None:
        rank_of, reached = search.from_scratch(np.flatnonzero(standing_max > bound))
        rank_of = relabel_ranks(rank_of, home, num_ranks)
    else:
        rank_of, reached = search.from_standing(budget)
    stay = standing_max <= reached
    rank_of[stay], reached[stay] = home[stay], standing_max[stay]
    return PlacementResult(rank_of, reached, bound, kind)


def fewest_moves(
    load: ArrayLike, num_ranks: int, standing: ArrayLike, *, within: float = 0.01, seed: int = 0
) -> PlacementResult:
    """Move as few experts as the search can to bring every layer within a share of its bound.

    Where that is out of reach, as close as it gets; a layer already within it stays as it is.

    Parameters
    ----------
    within
        Wanted largest rank load, as a share above the bound (0.01 is one percent).
    """
    from routepack_opt.solvers.move_search import rebalance

    array = check_load(load, num_ranks)
    home = _standing_ranks(standing, array.shape, num_ranks)
    if isinstance(within, bool) or not isinstance(within, (int, float, np.number)) or not 0 <= within < 1e6:
        raise InvalidInput(f"within: {within!r} is not a share of the bound, zero or more")
    bound, kind = placement_bounds(array, num_ranks)
    goal = bound + np.floor(bound * float(within)).astype(np.int64)
    rank_of, reached = rebalance(array, home, num_ranks, goal, slack=(0.0,) * 2, noise=NOISE, seed=seed)
    hard = np.flatnonzero(reached > goal)
    if len(hard):
        near, near_reached = rebalance(
            array, home, num_ranks, goal, slack=(0.0,) * 8, noise=NOISE, chosen=hard, seed=seed + 1
        )
        better = near_reached[hard] < reached[hard]
        rank_of[hard[better]], reached[hard[better]] = near[hard[better]], near_reached[hard[better]]
        hard = hard[reached[hard] > goal[hard]]
    if len(hard):
        # out of reach by moving little: from the best balance there is, as solve_placement would
        best = solve_placement(array[hard], num_ranks, standing=home[hard], seed=seed)
        better = best.reached < reached[hard]
        rank_of[hard[better]], reached[hard[better]] = best.rank_of[better], best.reached[better]
    return PlacementResult(rank_of, reached, bound, kind)


def placement_summary(
    load: NDArray[np.int64],
    num_ranks: int,
    reached: NDArray[Any],
    bound: NDArray[Any],
    kind: tuple[str, ...],
    moved: NDArray[np.int64],
) -> dict[str, Any]:
    """What ``place --json`` reports: means over the layers that carry load, then one entry a layer.

    Parameters
    ----------
    reached, bound
        [L], largest rank load and its lower bound, whole or fractional (replicas share).
    moved
        int64 [L], experts or slots that change rank.
    """
    mean = load.sum(axis=1) / num_ranks
    loaded = mean > 0
    scale = np.where(loaded, mean, 1.0)
    gap = (reached - bound) / np.where(bound > 0, bound, 1)

    def average(values: NDArray[Any]) -> float:
        return float(values[loaded].mean()) if loaded.any() else 1.0

    layers = [
        {
            "layer": layer,
            "reached": reached[layer].item(),
            "bound": bound[layer].item(),
            "kind": kind[layer],
            "max_over_mean": float(reached[layer] / scale[layer]) if loaded[layer] else 1.0,
            "gap": float(gap[layer]),
            "moved": int(moved[layer]),
        }
        for layer in range(len(load))
    ]
    return {
        "max_over_mean": average(reached / scale),
        "bound_over_mean": average(bound / scale),
        "gap": float(gap[loaded].mean()) if loaded.any() else 0.0,
        "moved": float(moved.sum() / load.size),
        "layers": layers,
    }


def _standing_ranks(standing: ArrayLike | None, shape: tuple[int, ...], num_ranks: int) -> NDArray[np.int64]:
    if standing is None:
        return contiguous_ranks(shape[0], shape[1], num_ranks)
    return check_ranks(standing, shape, num_ranks, "standing")


def _move_budget(max_moved: Any, shape: tuple[int, ...]) -> NDArray[np.int64]:
    share = 1.0 if max_moved is None else max_moved
    if isinstance(share, bool) or not isinstance(share, (int, float, np.number)) or not 0 <= share <= 1:
        raise InvalidInput(f"max_moved: {max_moved!r} is not a share between 0 and 1")
    return np.full(shape[0], int(float(share) * shape[1] + 1e-9), dtype=np.int64)


def warmup() -> None:
    """Compile every kernel used here."""
    import scipy.optimize  # noqa: F401  (a tenth of a second on first use)

    from routepack_opt.solvers import local_search, move_search

    local_search.warmup()
    move_search.warmup()
