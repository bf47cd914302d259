"""Final touches where nothing else decides: experts that may stay where they stand, even sample counts.

They leave the score exactly as it was. Were they to improve it, a longer search could end worse than a shorter one
that happened to be touched up better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.cost import attention_costs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.topology import Topology


def row_demand(atoms: AtomSet, cell_of: NDArray[np.int64], shard_row_of_cell: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [X, L, E], demand of every row-shard."""
    rows = np.zeros((int(shard_row_of_cell.max()) + 1, *atoms.demand.shape[1:]), dtype=np.int64)
    for atom, x in enumerate(shard_row_of_cell[cell_of].tolist()):
        rows[x] += atoms.demand[atoms.source[atom]]
    return rows


def keep_standing_layers(
    rows: NDArray[np.int64], rank_of: NDArray[np.int64], standing: NDArray[np.int64], num_ranks: int
) -> NDArray[np.int64]:
    """``rank_of`` with every layer put back to ``standing`` where no row-shard's peak changes by it.

    Layers without load, or with uniform load, then move no expert.

    Parameters
    ----------
    rows
        int64 [X, L, E], demand of every row-shard.
    """
    result = rank_of.copy()
    for layer in range(rank_of.shape[0]):
        if np.array_equal(rank_of[layer], standing[layer]):
            continue
        now, before = (
            loads_by_rank(rows[:, layer], ranks, num_ranks).max(axis=1) for ranks in (rank_of[layer], standing[layer])
        )
        if (now == before).all():
            result[layer] = standing[layer]
    return result


def loads_by_rank(demand: NDArray[np.int64], ranks: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """int64 [X, P], demand int64 [X, E] of one layer summed over the E / P experts of each EP rank."""
    by_rank = demand[:, np.argsort(ranks, kind="stable")]
    return np.asarray(by_rank.reshape(demand.shape[0], num_ranks, -1).sum(axis=2))


def even_sample_counts(
    atoms: AtomSet,
    cell_of: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    topology: Topology,
    cost: CostModel,
    token_cap: int,
    max_samples: int | None,
    *,
    max_trials: int = 64,
) -> NDArray[np.int64]:
    """Move single atoms from the DP rank with most samples to the one with fewest where every row-shard costs the same.

    Nothing else decides between such layouts, and frameworks like even counts.
    """
    num_ranks = topology.dp
    num_rows = int(cell_of.max()) // num_ranks + 1
    shard_of_rank = topology.shard_of_rank
    cell_of = cell_of.copy()
    num_layers = atoms.demand.shape[1]
    layer_index = np.arange(num_layers)[:, None]

    def peaks(row: int, shard: int, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        inside = np.flatnonzero((cells // num_ranks == row) & (shard_of_rank[cells % num_ranks] == shard))
        demand = np.zeros(atoms.demand.shape[1:], dtype=np.int64)
        for atom in inside:
            demand += atoms.demand[atoms.source[atom]]
        loads = np.zeros((num_layers, topology.ep), dtype=np.int64)
        np.add.at(loads, (layer_index, rank_of), demand)
        return np.asarray(loads.max(axis=1))

    def attention(cells: NDArray[np.int64]) -> NDArray[np.float64]:
        shape = (num_rows, num_ranks)
        tokens = np.zeros(num_rows * num_ranks, dtype=np.int64)
        squares = np.zeros_like(tokens)
        np.add.at(tokens, cells, atoms.tokens)
        np.add.at(squares, cells, atoms.squares)
        return attention_costs(cost.stages, tokens.reshape(shape), squares.reshape(shape), topology, token_cap)

    base = attention(cell_of)
    trials = 0
    while trials < max_trials:
        counts = np.bincount(cell_of % num_ranks, weights=atoms.samples, minlength=num_ranks).astype(np.int64)
        high, low = int(np.argmax(counts)), int(np.argmin(counts))
        if counts[high] - counts[low] < 2:
            break
        moved = False
        cell_padded = np.bincount(cell_of, weights=atoms.padded, minlength=num_rows * num_ranks).astype(np.int64)
        cell_samples = np.bincount(cell_of, weights=atoms.samples, minlength=num_rows * num_ranks).astype(np.int64)
        cell_atoms = np.bincount(cell_of, minlength=num_rows * num_ranks)
        for atom in np.flatnonzero(cell_of % num_ranks == high).tolist():
            row = int(cell_of[atom]) // num_ranks
            target = row * num_ranks + low
            if (
                atoms.samples[atom] > (counts[high] - counts[low]) // 2
                or cell_atoms[cell_of[atom]] < 2
                or cell_padded[target] + atoms.padded[atom] > token_cap
                or (max_samples is not None and cell_samples[target] + atoms.samples[atom] > max_samples)
            ):
                continue
            trials += 1
            trial = cell_of.copy()
            trial[atom] = target
            after = attention(trial)
            shards = {int(shard_of_rank[high]), int(shard_of_rank[low])}
            if (after[row] == base[row]).all() and (
                len(shards) == 1 or all((peaks(row, g, trial) == peaks(row, g, cell_of)).all() for g in shards)
            ):
                cell_of, moved = trial, True
                break
            if trials >= max_trials:
                break
        if not moved:
            break
    return cell_of
