"""One option per layer under shared resources, least total cost: the Lagrangian bound of a multiple-choice knapsack.

For any prices mu >= 0, ``sum over layers of min over options (cost + mu . use) - mu . capacity`` is a lower bound; the
linear program over the options, solved by generating columns, finds the best prices. The bound is then computed from
the prices alone, so the program's rounding errors cannot spoil it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ROUNDS = 60
_MARGIN = 1e-10  # relative, for sums of doubles


@dataclass(frozen=True)
class Options:
    """Options of one layer: ``cost`` [n] and ``use`` [n, num_resources]."""

    cost: NDArray[np.float64]
    use: NDArray[np.float64]


@dataclass(frozen=True)
class ChoiceBound:
    """``bound`` <= every choice's cost; ``prices`` [num_resources]; ``chosen`` one option a layer at these prices.

    ``feasible`` says whether any choice keeps the capacities at all, as far as the linear program can tell.
    """

    bound: float
    prices: NDArray[np.float64]
    chosen: NDArray[np.int64]
    feasible: bool = True


def choice_bound(layers: Sequence[Options], capacity: NDArray[np.float64]) -> ChoiceBound:
    """Best Lagrangian bound of the least total cost, one option of every layer, use within ``capacity``.

    Parameters
    ----------
    layers
        Options of every layer, at least one each.
    capacity
        [num_resources], may be infinite.
    """
    counted = np.flatnonzero(np.isfinite(capacity))
    limits = capacity[counted]
    uses = [layer.use[:, counted] for layer in layers]
    prices = np.zeros(len(counted))
    best = (-np.inf, prices, np.zeros(len(layers), dtype=np.int64))
    columns: list[dict[int, None]] = [{int(use.sum(axis=1).argmin()): None} for use in uses]
    scale = max(1e-30, max(float(np.abs(layer.cost).max()) for layer in layers))
    feasible = True
    for _ in range(_ROUNDS):
        reduced = [layer.cost + use @ prices for layer, use in zip(layers, uses, strict=True)]
        chosen = np.array([int(values.argmin()) for values in reduced])
        parts = [float(values[k]) for values, k in zip(reduced, chosen, strict=True)]
        bound = _sum_below(parts, prices * limits)
        if bound > best[0]:
            best = (bound, prices, chosen)
        fresh = False
        for held, k in zip(columns, chosen.tolist(), strict=True):
            fresh |= k not in held
            held[k] = None
        if not fresh:
            break
        value, duals = _master(layers, uses, columns, limits, scale)
        if value is None:
            break
        prices = np.maximum(duals, 0.0)
        feasible = value < np.inf
    full = np.zeros(len(capacity))
    full[counted] = best[1]
    return ChoiceBound(best[0], full, best[2], feasible)


def _sum_below(parts: list[float], spent: NDArray[np.float64]) -> float:
    """A number that is certainly not above sum(parts) - sum(spent)."""
    total = sum(parts) - float(spent.sum())
    return total - _MARGIN * (sum(abs(p) for p in parts) + float(np.abs(spent).sum()))


def _master(
    layers: Sequence[Options],
    uses: Sequence[NDArray[np.float64]],
    columns: list[dict[int, None]],
    limits: NDArray[np.float64],
    scale: float,
) -> tuple[float | None, NDArray[np.float64]]:
    """The linear program over the columns so far: (value, prices), (None, ..) when HiGHS fails.

    Every resource may be overdrawn at a high price, so that the program always has a solution.
    """
    from scipy.optimize import linprog

    picked = [np.fromiter(held, dtype=np.int64) for held in columns]
    owner = np.repeat(np.arange(len(layers)), [len(p) for p in picked])
    cost = np.concatenate([layer.cost[p] for layer, p in zip(layers, picked, strict=True)]) / scale
    use = np.concatenate([u[p] for u, p in zip(uses, picked, strict=True)])
    unit = np.maximum(1.0, np.abs(limits))
    num_resources = len(limits)
    overdraw = 1e4 * len(layers)
    a_ub = np.concatenate([use.T / unit[:, None], -np.eye(num_resources)], axis=1)
    a_eq = np.zeros((len(layers), len(cost) + num_resources))
    a_eq[owner, np.arange(len(cost))] = 1.0
    result = linprog(
        np.concatenate([cost, np.full(num_resources, overdraw)]),
        A_ub=a_ub if num_resources else None,
        b_ub=limits / unit if num_resources else None,
        A_eq=a_eq,
        b_eq=np.ones(len(layers)),
        method="highs",
    )
    if result.status != 0:
        return None, np.zeros(num_resources)
    duals = -np.asarray(result.ineqlin.marginals) * scale / unit if num_resources else np.zeros(0)
    overdrawn = bool((result.x[len(cost) :] > 1e-7).any())
    return (np.inf if overdrawn else float(result.fun) * scale), duals
