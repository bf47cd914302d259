"""Balancing map: which replica serves each token group so that the busiest chiplet and region are least busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.mapping import balance_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.stage_kernels import StageTables

SWEEPS = 2
WEIGHTS = (1.0, 1.0, 1.0)  # load, bank, link: a signal set to 0 is not looked at


def balance_map(
    tables: StageTables,
    layout: Layout,
    demand: NDArray[np.int32],
    sweeps: int = SWEEPS,
    weights: tuple[float, float, float] = WEIGHTS,
) -> NDArray[np.int8]:
    """Slot that serves each group, int8 [L, E, C], -1 where there are no tokens.

    The counts of a layer are known after its gate. Experts with several replicas choose, busiest first, the set of
    replicas that raises the layer's peak service time least, arithmetic and streaming alike; then each chooses again,
    ``sweeps`` times, now that the rest is known. That is done from two starts - only the experts with one replica
    served, and every expert served by its primary - and the lower peak is kept: never worse than primaries alone.

    Parameters
    ----------
    tables
        Of the scene, ``StageModel.tables``.
    layout
        Published replicas.
    demand
        int32 [L, E, C].
    sweeps
        Repetitions.
    weights
        Of chiplets, regions and travel.
    """
    num_layers, num_chiplets = demand.shape[0], len(tables.chiplet_ops)
    order = np.argsort(-demand.sum(axis=2), axis=1, kind="stable")
    slots = np.empty(demand.shape, dtype=np.int8)
    balance_kernels.balance_window(
        tables, demand, order, layout.tier, layout.chiplet, np.asarray(weights, dtype=np.float64), sweeps,
        np.zeros((num_layers, num_chiplets)), np.zeros((num_layers, len(tables.region_bandwidth))),
        np.zeros(num_chiplets), np.zeros(num_chiplets, dtype=np.int8), slots,
    )  # fmt: skip
    return slots
