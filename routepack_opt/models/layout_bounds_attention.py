"""Attention no layout avoids, beyond averaging: long samples fix what their rows cost, the cap what goes with them.

One attention stage; a cell costs the sum of its atoms' costs, a row-shard its costliest cell. Let v_1 >= v_2 >= ... be
the costs of the X row-shards. Truncation at a level k (``level``):

1. Longest samples (:func:`forced_costs`). If the atoms that cost at least u need more cells than the j - 1 largest
   row-shards have, one of them is in another, so v_j >= u. Let u_j be the largest such u.
2. Prices. Give every atom a price of at most its own cost, such that the atoms of a cell never sum to more than k.
   Then a cell's price is at most min(its cost, k), and a row-shard x of m_x cells holds at most m_x min(v_x, k).
3. v = min(v, k) + max(0, v - k). With weights c_x > 0 and rho = min c_x / m_x, c = min c_x:
   ``sum_x c_x v_x >= rho * sum of prices + c * sum_j max(0, u_j - k)``.

With k infinite and prices = costs it is averaging. A finite k pays where a few samples near the cap dominate: their
row-shards (u_j > k) are charged in full, and in exchange an atom counts for no more than the best that could be packed
beside them. The best prices are the dual solution of "how much attention can the cells of those row-shards hold under
the cap"; here that packing problem is relaxed by dual-feasible functions (Fekete and Schepers 2001; Carlier, Clautiaux
and Moukrim 2007), which makes it a linear program of a few dozen constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_BITS = 50  # all prices together stay below 2^50 units: sums are exact in float64 and far inside int64
_LARGEST_PROGRAM = 2048  # atoms in the linear program; more are merged with neighbours of like length
_MOST_ITERATIONS = 5000  # of the simplex method; a few hundred are usual
_MOST_LEVELS = 6  # numbers of forced row-shards tried by linear programs
_LARGEST_CHECK = 1 << 32  # knapsack table entries a checker may have to touch


@dataclass(frozen=True)
class StageAtoms:
    """What one stage sees of a window.

    Attributes
    ----------
    padded
        int64 [n], tokens of each atom as the cap counts them.
    samples
        int64 [n], samples of each atom.
    costs
        float64 [n], alpha * tokens / C + beta * squares / C^2 with true lengths.
    cap
        C.
    max_samples
        Most samples of a cell, 0 without limit.
    """

    padded: NDArray[np.int64]
    samples: NDArray[np.int64]
    costs: NDArray[np.float64]
    cap: int
    max_samples: int = 0


@dataclass(frozen=True)
class Truncation:
    """A proof for one stage, in whole units of ``unit``.

    Attributes
    ----------
    unit
        A power of two, in score units.
    table
        Prices of padded lengths, as (length, units); an atom's price is the smaller of its own cost, rounded down, and
        this, and its own cost where its length is not listed.
    max_cell
        k, the most a cell's prices sum to.
    prices
        Sum of all prices, in score units.
    excess
        Sum over j of max(0, u_j - k), in score units.
    """

    unit: float
    table: tuple[tuple[int, int], ...]
    max_cell: int
    prices: float
    excess: float

    def to_json(self, stage: int) -> dict[str, Any]:
        """One entry of ``certificates.layout.stages``."""
        table = [list(entry) for entry in self.table]
        return {"stage": stage, "unit": self.unit, "table": table, "max_cell": self.max_cell}


def forced_costs(atoms: StageAtoms, shard_rows: Sequence[int]) -> NDArray[np.float64]:
    """float64 [X], u_j: the j-th costliest row-shard costs at least this. Never increasing.

    Cells that the costliest atoms need: their tokens over the cap, one for each longer than half the cap, their samples
    over the most of a cell; atoms above the cap stand alone.

    Parameters
    ----------
    shard_rows
        Cells of each row-shard.
    """
    order = np.argsort(-atoms.costs, kind="stable")
    padded = atoms.padded[order]
    alone = padded > atoms.cap
    inside = np.where(alone, 0, padded)
    num_cells = np.maximum(-(-np.cumsum(inside) // atoms.cap), np.cumsum(2 * inside > atoms.cap))
    if atoms.max_samples:
        num_samples = np.cumsum(np.where(alone, 0, atoms.samples[order]))
        num_cells = np.maximum(num_cells, -(-num_samples // atoms.max_samples))
    num_cells += np.cumsum(alone)
    available = np.concatenate(([0], np.cumsum(-np.sort(-np.asarray(shard_rows, dtype=np.int64)))[:-1]))
    first = np.searchsorted(num_cells, available, side="right")  # first atom that needs one cell more
    costs = np.append(atoms.costs[order], 0.0)
    return np.asarray(costs[first])


def truncation(
    atoms: StageAtoms, shard_rows: Sequence[int], cells_per_forced: int, *, thorough: bool = True
) -> Truncation | None:
    """The best proof found for a stage, or None where averaging is as good.

    Parameters
    ----------
    shard_rows
        Cells of each row-shard.
    cells_per_forced
        c / rho: how many cells' worth of level a forced row-shard costs; the DP ranks of a shard when all are alike.
    thorough
        Linear programs over dual-feasible functions (about two milliseconds each for 512 samples); else only prices
        linear in length, with a premium for more than half the cap.
    """
    total = float(atoms.costs.sum())
    if not total > 0.0 or not _checkable(atoms):
        return None
    forced = forced_costs(atoms, shard_rows)
    gains = np.cumsum(forced) * cells_per_forced  # what the first j forced row-shards bring, in sums of prices
    start = _best_linear_level(atoms, gains, cells_per_forced)
    if start == 0 and not thorough:
        return None
    best: Truncation | None = None
    best_value = total
    functions = _functions(atoms, thorough=thorough)
    tried: set[int] = set()
    candidates = [max(start, 1)]
    while candidates and len(tried) < _MOST_LEVELS:
        num_forced = candidates.pop()
        tried.add(num_forced)
        multipliers = _multipliers(atoms, functions, num_forced * cells_per_forced)
        found = None if multipliers is None else _certify(atoms, functions, multipliers, forced)
        if found is None:
            continue
        value = found.prices + cells_per_forced * found.excess
        if value > best_value:
            best, best_value = found, value
            candidates = [j for j in (num_forced - 1, num_forced + 1) if 1 <= j < forced.size and j not in tried]
    return best if best_value > total * (1.0 + 1e-9) else None


def _checkable(atoms: StageAtoms) -> bool:
    """Whether a checker can redo the knapsack over the cap."""
    return bool(atoms.cap * atoms.padded.size <= _LARGEST_CHECK and atoms.cap < 1 << 26)


def _best_linear_level(atoms: StageAtoms, gains: NDArray[np.float64], cells_per_forced: int) -> int:
    """Number of forced row-shards with the best bound when cells are filled by attention per token, atoms cut."""
    density = atoms.costs / np.minimum(atoms.padded, atoms.cap)
    order = np.argsort(-density, kind="stable")
    tokens = np.concatenate(([0], np.cumsum(np.minimum(atoms.padded[order], atoms.cap))))
    work = np.concatenate(([0.0], np.cumsum(atoms.costs[order])))
    room = np.arange(1, gains.size + 1, dtype=np.float64) * cells_per_forced * atoms.cap
    left = work[-1] - np.interp(room, tokens, work)
    values = gains + left
    return int(values.argmax()) + 1 if values.max() > work[-1] else 0


def _functions(atoms: StageAtoms, *, thorough: bool) -> NDArray[np.float64]:
    """float64 [F, n], dual-feasible functions of the padded length: in a cell each sums to at most 1.

    Atoms above the cap, alone in their cell, have 1.
    """
    cap, size = atoms.cap, np.minimum(atoms.padded, atoms.cap)
    share = size / cap
    functions = [share, np.where(2 * size > cap, 1.0, np.where(2 * size == cap, 0.5, 0.0))]
    if thorough:
        for low in sorted({cap * j // 40 for j in range(2, 20)} - {0}):  # long counts 1, short 0, others their share
            functions.append(np.where(size > cap - low, 1.0, np.where(size >= low, share, 0.0)))
        for low in sorted({cap * j // 100 + 1 for j in range(34, 50, 2)}):  # above a third of the cap: two a cell
            if 3 * low > cap and 2 * low <= cap:
                functions.append(np.where(size > cap - low, 1.0, np.where(size >= low, 0.5, 0.0)))
        for k in range(2, 6):  # at most k atoms above C / (k + 1)
            count, rest = np.divmod((k + 1) * size, cap)
            functions.append(np.where(rest == 0, share, count / k))
    return np.array(functions)


def _multipliers(atoms: StageAtoms, functions: NDArray[np.float64], num_cells: int) -> NDArray[np.float64] | None:
    """float64 [F], dual prices of "most attention in ``num_cells`` cells, each function summing to at most that"."""
    import highspy

    from routepack_opt.solvers.highs import new_highs

    costs, counts = atoms.costs, np.ones(atoms.costs.size)
    if counts.size > _LARGEST_PROGRAM:
        order = np.argsort(atoms.padded, kind="stable")
        starts = np.linspace(0, order.size, _LARGEST_PROGRAM + 1).astype(np.int64)[:-1]
        counts = np.diff(np.append(starts, order.size)).astype(np.float64)
        costs = np.add.reduceat(costs[order], starts) / counts
        functions = np.add.reduceat(functions[:, order], starts, axis=1) / counts
    num_functions, num_columns = functions.shape
    scale = float(costs.max())
    none = np.zeros(0, dtype=np.int32)
    highs: Any = new_highs()
    highs.setOptionValue("presolve", "off")
    highs.setOptionValue("solver", "simplex")
    highs.setOptionValue("simplex_iteration_limit", _MOST_ITERATIONS)
    infinity = np.full(num_functions, highspy.kHighsInf)
    room = np.full(num_functions, float(num_cells))
    highs.addRows(num_functions, -infinity, room, 0, np.zeros(num_functions, dtype=np.int32), none, np.zeros(0))
    begins = (np.arange(num_columns) * num_functions).astype(np.int32)
    index = np.tile(np.arange(num_functions, dtype=np.int32), num_columns)
    entries = np.ascontiguousarray(functions.T).ravel()
    highs.addCols(num_columns, -costs / scale, np.zeros(num_columns), counts, entries.size, begins, index, entries)
    if highs.run() == highspy.HighsStatus.kError or highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    duals = np.array(highs.getSolution().row_dual, dtype=np.float64)
    return np.asarray(np.maximum(-duals, 0.0) * scale)


def _certify(
    atoms: StageAtoms, functions: NDArray[np.float64], multipliers: NDArray[np.float64], forced: NDArray[np.float64]
) -> Truncation | None:
    """Round multipliers of dual-feasible functions to a proof in whole units: prices down, the level up."""
    total = float(atoms.costs.sum())
    exponent = math.frexp(total)[1] - _BITS
    if not -1000 < exponent < 1000:
        return None
    unit = math.ldexp(1.0, exponent)
    own = np.floor(atoms.costs / unit).astype(np.int64)
    limit = np.floor(multipliers @ functions / unit).astype(np.int64)
    # floating sums of a cell may exceed the level by rounding: a part in 10^12 covers it
    max_cell = math.floor(float(multipliers.sum()) / unit * (1.0 + 1e-12)) + 1
    # one price a length: the lowest limit of its atoms (they differ by rounding at most)
    sizes, at = np.unique(atoms.padded, return_inverse=True)
    price = np.full(sizes.size, np.iinfo(np.int64).max)
    np.minimum.at(price, at, limit)
    listed = np.zeros(sizes.size, dtype=np.bool_)
    np.logical_or.at(listed, at, own >= price[at])
    prices = np.where(listed[at], np.minimum(own, price[at]), own)
    table = tuple((int(s), int(p)) for s, p in zip(sizes[listed], price[listed], strict=True))
    level = max_cell * unit
    excess = float(np.maximum(forced - level, 0.0).sum())
    return Truncation(unit, table, max_cell, float(prices.sum()) * unit, excess)
