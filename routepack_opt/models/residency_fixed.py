"""Bound on a window under a given layout: the best assignment, relaxed to shares of groups, layer by layer.

A linear program over :mod:`routepack_opt.models.residency_rows`; the bound is computed anew from its duals (weak
duality, every variable bounded), so HiGHS's tolerances cannot lift it above the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.models.residency import check_demand
from routepack_opt.models.residency_bounds import fixed_seconds
from routepack_opt.models.residency_rows import NUM_STAGES, LayerRows, layer_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout

_MARGIN = 1e-9  # relative


@dataclass(frozen=True)
class AssignmentBound:
    """``bound_s``: no assignment under the layout is faster; ``layer_s`` [L] adds up to it."""

    bound_s: float
    layer_s: NDArray[np.float64]


def assignment_bound(scene: Scene, layout: Layout, demand: NDArray[np.int32]) -> AssignmentBound:
    """Least routed time of a window under ``layout`` over all assignments, from below.

    Parameters
    ----------
    scene, layout
        Published replicas of the model on the machine.
    demand
        int32 [L, E, C].

    Raises
    ------
    InvalidInput
        See :func:`~routepack_opt.models.residency.check_demand`.
    """
    check_demand(scene, demand)
    layer_s = np.zeros(scene.num_layers)
    for layer in range(scene.num_layers):
        if not demand[layer].any():
            continue
        places = [(e, t, c) for e in range(scene.num_experts) for t, c in layout.replicas(layer, e)]
        rows = layer_rows(scene, layer, demand[layer], places)
        layer_s[layer] = (fixed_seconds(scene, demand[layer]) + _relaxed(rows)) * (1.0 - _MARGIN)
    return AssignmentBound(float(layer_s.sum()), layer_s)


def _relaxed(rows: LayerRows) -> float:
    """Seconds of the four stages, relaxed: min c x, A x <= b, E x = 1, 0 <= x <= upper.

    Columns: serve [A], read [P], bank [G], stages [4]. Whatever the duals say, replacing the rows by their priced sum
    gives a valid bound.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    index, value, starts, unit = _matrix(rows)
    num_serve, num_read = len(rows.serves), len(rows.places)
    width = num_serve + num_read + (int(rows.region.max()) + 1) + NUM_STAGES
    a_ub = csr_matrix((value, index, starts), shape=(len(starts) - 1, width))
    groups = np.array([n for n, _ in rows.serves])
    a_eq = csr_matrix((np.ones(num_serve), (groups, np.arange(num_serve))), shape=(len(rows.groups), width))
    cost = np.zeros(width)
    cost[-NUM_STAGES:] = 1.0
    upper = np.ones(width)
    upper[-NUM_STAGES:] = [_most(rows, stage) / unit for stage in range(NUM_STAGES)]
    result = linprog(
        cost, A_ub=a_ub, b_ub=np.zeros(a_ub.shape[0]), A_eq=a_eq, b_eq=np.ones(len(rows.groups)),
        bounds=np.stack([np.zeros(width), upper], axis=1), method="highs",
    )  # fmt: skip
    if result.status != 0:
        return 0.0
    below = np.minimum(np.asarray(result.ineqlin.marginals), 0.0)
    of_group = np.asarray(result.eqlin.marginals)
    reduced = cost - a_ub.T @ below - a_eq.T @ of_group
    bound = float(of_group.sum() + np.minimum(reduced * upper, 0.0).sum())
    return max(0.0, bound * unit)


def _most(rows: LayerRows, stage: int) -> float:
    """No assignment makes the stage last longer."""
    totals = [
        sum(row.serve.values()) + sum(row.read.values()) + sum(row.bank.values())
        for row in rows.rows
        if row.stage == stage
    ]
    return max(totals, default=0.0)


def _matrix(rows: LayerRows) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], float]:
    """CSR of all rows ``... <= 0`` and the unit of seconds they are written in."""
    num_serve, num_read = len(rows.serves), len(rows.places)
    bank, stages = num_serve + num_read, num_serve + num_read + int(rows.region.max()) + 1
    unit = max(_most(rows, stage) for stage in range(NUM_STAGES))
    index: list[int] = []
    value: list[float] = []
    starts = [0]
    for row in rows.rows:
        index += [*row.serve, *(num_serve + p for p in row.read), *(bank + g for g in row.bank), stages + row.stage]
        value += [s / unit for part in (row.serve, row.read, row.bank) for s in part.values()]
        value.append(-1.0)
        starts.append(len(index))
    places_at = rows.places_at()
    for k, (n, chiplet) in enumerate(rows.serves):
        at = [num_serve + p for p in places_at[rows.groups[n][0], chiplet]]
        index += [k, *at]
        value += [1.0] + [-1.0] * len(at)
        starts.append(len(index))
    for p, g in enumerate(rows.region.tolist()):
        index += [num_serve + p, bank + g]
        value += [1.0, -1.0]
        starts.append(len(index))
    return np.array(index), np.array(value), np.array(starts), unit
