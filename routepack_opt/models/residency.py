"""Bounds on the routed time of a window over every layout and assignment: the residency problem, relaxed by layer.

Each layer chooses how many replicas it reads from each tier. That choice implies floors of its memory, queue, compute
and network time (:mod:`routepack_opt.models.residency_bounds`); the layers share the capacity of every tier and the
replica budget. Prices on those make the layers independent (:mod:`routepack_opt.models.residency_choice`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import Infeasible, InvalidInput
from routepack_opt.models import residency_bounds as floors
from routepack_opt.models.residency_choice import Options, choice_bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene

_MARGIN = 1e-9  # relative: floors repeat the stage-level model's arithmetic in another order


@dataclass(frozen=True)
class WindowBound:
    """A lower bound of one window.

    Attributes
    ----------
    bound_s
        No layout within capacities, budget and R_max, with any assignment, has a smaller routed time.
    layer_s
        [L] cost of the option each layer prefers at the prices of the shared resources; need not add up to the bound.
    stages
        [L, 4] of that option: fixed (gate and combine), network, memory with queue, compute.
    prices
        Seconds a replica is worth, in each tier and in the budget.
    replicas
        [L, num_tiers] of that option: replicas read from each tier.
    """

    bound_s: float
    layer_s: NDArray[np.float64]
    stages: NDArray[np.float64]
    prices: NDArray[np.float64]
    replicas: NDArray[np.int64]


def check_demand(scene: Scene, demand: NDArray[np.int32]) -> None:
    """Refuse demand that does not belong to ``scene``.

    Raises
    ------
    InvalidInput
        Another shape, kind of number, or a negative count.
    """
    shape = (scene.num_layers, scene.num_experts, scene.num_chiplets)
    if demand.shape != shape or not np.issubdtype(demand.dtype, np.integer):
        raise InvalidInput(f"demand: {demand.dtype} {demand.shape}; expected integers {shape}")
    if demand.min(initial=0) < 0:
        at = tuple(int(i) for i in np.unravel_index(int(demand.argmin()), shape))
        raise InvalidInput(f"demand{list(at)}: {demand.min()} tokens; expected at least 0")


def layout_bound(scene: Scene, demand: NDArray[np.int32]) -> WindowBound:
    """Least routed time of a window over all layouts and assignments, from below.

    Parameters
    ----------
    scene
        Model on machine.
    demand
        int32 [L, E, C].

    Raises
    ------
    InvalidInput
        See :func:`check_demand`.
    Infeasible
        Regions that hold no whole copy of a layer's experts: there is no layout to bound.
    """
    check_demand(scene, demand)
    capacity = shared_capacity(scene)
    tables = [LayerTable.build(scene, layer, demand[layer], capacity) for layer in range(scene.num_layers)]
    for layer, table in enumerate(tables):
        if not len(table.options.cost):
            raise Infeasible(f"layer {layer}: the regions hold fewer whole experts than the window uses")
    result = choice_bound([table.options for table in tables], capacity)
    picked = [int(k) for k in result.chosen]
    stages = np.array([table.stages[k] for table, k in zip(tables, picked, strict=True)])
    return WindowBound(
        bound_s=max(0.0, result.bound * (1.0 - _MARGIN)),
        layer_s=np.array([table.options.cost[k] for table, k in zip(tables, picked, strict=True)]),
        stages=stages,
        prices=result.prices,
        replicas=np.array([table.replicas[k] for table, k in zip(tables, picked, strict=True)]),
    )


def shared_capacity(scene: Scene) -> NDArray[np.float64]:
    """[num_tiers + 1] what the layers share: room of every tier, and of all replicas; bytes.

    With experts of one size only whole ones count.
    """
    size, tier = scene.expert_bytes, scene.hardware.region_tier
    room = scene.region_room
    total = scene.budget_bytes
    if (size == size[0]).all():
        room = np.floor(room / size[0]) * size[0]
        total = np.floor(total / size[0]) * size[0]
    by_tier = np.bincount(tier, weights=room, minlength=scene.num_tiers)
    return np.append(by_tier, min(total, float(by_tier.sum())))


@dataclass(frozen=True)
class LayerTable:
    """Options of one layer: replicas read from each tier [n, num_tiers], their floors [n, 4], cost and use in bytes."""

    options: Options
    replicas: NDArray[np.int64]
    stages: NDArray[np.float64]

    @classmethod
    def build(cls, scene: Scene, layer: int, demand: NDArray[np.int32], capacity: NDArray[np.float64]) -> LayerTable:
        """All options of ``layer`` with demand [E, C]."""
        size = float(scene.expert_bytes[layer])
        used = int((demand.sum(axis=1) > 0).sum())
        others = float(scene.expert_bytes.sum() - size) * scene.num_experts  # one copy of every other layer
        spare = int((capacity[-1] - others) // size) - scene.num_experts
        most_extra = max(0, min(spare, used * (scene.r_max - 1)))
        extra = min(most_extra, scene.num_chiplets - 1)  # more do not lower the compute floor
        tiers = floors.tier_floors(scene, layer, used + extra)
        counts = _grids([len(tier.memory_s) for tier in tiers], used, used + extra)
        memory = np.max([tier.memory_s[counts[:, t]] for t, tier in enumerate(tiers)], axis=0)
        queue = np.max([tier.queue_s[counts[:, t]] for t, tier in enumerate(tiers)], axis=0)
        beyond = counts.sum(axis=1) - used
        compute = floors.compute_floor(scene, demand, extra)[beyond]
        network = floors.network_floor(scene, demand, most_extra)
        network = np.append(network[:extra], network[-1])[beyond]  # the last option stands for all with more replicas
        fixed = floors.fixed_seconds(scene, demand)
        cost = fixed + network + queue + np.maximum(memory, compute)
        resident = (beyond + scene.num_experts)[:, None]
        parts = np.stack([np.full(len(cost), fixed), network, memory + queue, compute], axis=1)
        return cls(Options(cost, np.concatenate([counts, resident], axis=1) * size), counts, parts)


def _grids(held: list[int], least: int, most: int) -> NDArray[np.int64]:
    """[n, num_tiers] all counts below ``held`` that sum to least..most."""
    counts = np.zeros((1, 0), dtype=np.int64)
    for t, limit in enumerate(held):
        after = sum(h - 1 for h in held[t + 1 :])
        step = np.arange(limit)
        grown = np.repeat(counts, limit, axis=0)
        counts = np.concatenate([grown, np.tile(step, len(counts))[:, None]], axis=1)
        total = counts.sum(axis=1)
        counts = counts[(total <= most) & (total + after >= least)]
    return counts
