"""Token mapping: which replica serves each token group, by the fast rule or by a simple one."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.simulator import stage_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.stage_kernels import StageTables

RULES = ("primary", "nearest", "round-robin", "fast")


@dataclass(frozen=True)
class MapWeights:
    """Weights of the fast map: a group goes to the replica with the least sum of weighted seconds.

    Parameters
    ----------
    queue
        Time the chiplet needs for what it was given, this group included.
    path
        Route of the group there and back.
    bank
        Time the region needs for the weights asked of it, this replica's included.
    streaming
        Streaming this replica's weights, region and route; nothing when an earlier group already uses it.
    peak
        Ours: the busiest chiplet or region of the layer after the choice. 0 is the paper's rule.
    block_groups
        Groups decided on the same counters; a group holds a few tokens.
    forced_first
        Ours: experts with one replica are counted first, then the others, busiest first. False: expert order.
    """

    queue: float = 1.0
    path: float = 1.0
    bank: float = 1.0
    streaming: float = 1.0
    peak: float = 0.0
    block_groups: int = 1
    forced_first: bool = True

    def __post_init__(self) -> None:
        """Weights are finite and not negative."""
        for name, value in zip(("queue", "path", "bank", "streaming", "peak"), astuple(self)[:5], strict=True):
            if not (np.isfinite(value) and value >= 0):
                raise InvalidInput(f"map weight {name!r}: {value!r} is not a finite number >= 0")
        if self.block_groups < 1:
            raise InvalidInput(f"block_groups: {self.block_groups} is not at least 1")

    def array(self) -> NDArray[np.float64]:
        """[5] for the kernels."""
        return np.array(astuple(self)[:5], dtype=np.float64)


FAST = MapWeights()


def assign(
    tables: StageTables, layout: Layout, demand: NDArray[np.int32], rule: str | MapWeights = FAST
) -> NDArray[np.int8]:
    """Slot that serves each group, int8 [L, E, C], -1 where there are no tokens.

    Parameters
    ----------
    tables
        Of the scene, ``StageModel.tables``.
    layout
        Published replicas.
    demand
        int32 [L, E, C].
    rule
        "primary", "nearest" (least route time, then lowest slot), "round-robin" (source and expert number modulo
        replicas), "fast" or the weights of the fast map.

    Raises
    ------
    InvalidInput
        Unknown rule, or demand of another shape.
    """
    shape = (*layout.count.shape, len(tables.chiplet_ops))
    if demand.shape != shape or demand.dtype != np.int32:
        raise InvalidInput(f"demand: {demand.dtype} {demand.shape}; expected int32 {shape}")
    if isinstance(rule, MapWeights) or rule == "fast":
        return fast_map(tables, layout, demand, rule if isinstance(rule, MapWeights) else FAST)
    if rule == "primary":
        slots = np.zeros(shape, dtype=np.int8)
    elif rule == "nearest":
        slots = _nearest(tables, layout)
    elif rule == "round-robin":
        turns = np.arange(shape[1])[:, None] + np.arange(shape[2])[None, :]
        slots = (turns[None] % layout.count[:, :, None]).astype(np.int8)
    else:
        raise InvalidInput(f"mapping: {rule!r} is no rule; expected one of {', '.join(RULES)}")
    return np.where(demand > 0, slots, np.int8(-1))


def _nearest(tables: StageTables, layout: Layout) -> NDArray[np.int8]:
    chiplets = layout.chiplet.astype(np.int64)
    sources = np.arange(len(tables.chiplet_ops))
    seconds = tables.route_latency + tables.token_bytes * tables.route_inverse
    away = seconds[sources[None, None, None, :], chiplets[..., None]]  # [L, E, R, C]
    away = np.where(chiplets[..., None] >= 0, away, np.inf)
    return np.asarray(np.argmin(away, axis=2), dtype=np.int8)


def fast_map(
    tables: StageTables, layout: Layout, demand: NDArray[np.int32], weights: MapWeights = FAST
) -> NDArray[np.int8]:
    """The fast loop: groups in blocks, each to its cheapest replica, counters updated after each block.

    Counters start at zero in every layer. Source chiplets come in order, so a block is a run of tokens.
    """
    num_layers, num_experts = layout.count.shape
    if weights.forced_first:
        order = np.argsort(-demand.sum(axis=2), axis=1, kind="stable")
    else:
        order = np.broadcast_to(np.arange(num_experts), (num_layers, num_experts)).copy()
    slots = np.empty(demand.shape, dtype=np.int8)
    stage_kernels.map_window(
        tables, demand, order, layout.tier, layout.chiplet, np.zeros(len(tables.chiplet_ops)),
        np.zeros(len(tables.region_bandwidth)), weights.array(), weights.block_groups, weights.forced_first, slots,
    )  # fmt: skip
    return slots
