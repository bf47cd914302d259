"""Seed layouts of the paper (routepack.md section 6): fixed-row FFD, EDPAwarePair, randomised best fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.topology import Topology


def edp_aware_pair(
    atoms: AtomSet,
    cells: Sequence[Sequence[int]],
    rank_of: NDArray[np.int64],
    topology: Topology,
    num_rows: int,
    *,
    width: int = 1,
    rng: np.random.Generator | None = None,
) -> NDArray[np.int64]:
    """Deal cells to (row, DP rank) positions so that their expert peaks interleave.

    Cells by descending routed-token peak; each goes to the empty position whose row-shard then has the smallest
    (increase of the sum of layer peaks, largest such peak), drawn among the best ``width`` with decaying weights.

    Returns
    -------
    int64 [n], the cell number r*D + d of each atom.
    """
    num_layers = atoms.demand.shape[1]
    num_shards = topology.num_shards
    loads = np.zeros((len(cells), num_layers, topology.ep), dtype=np.int64)
    layer_index = np.arange(num_layers)[:, None]
    for k, cell in enumerate(cells):
        demand = np.zeros(atoms.demand.shape[1:], dtype=np.int64)
        for atom in cell:
            demand += atoms.demand[atom]
        np.add.at(loads[k], (layer_index, rank_of), demand)
    peaks = loads.max(axis=2).sum(axis=1)
    shard_loads = np.zeros((num_rows * num_shards, num_layers, topology.ep), dtype=np.int64)
    shard_peaks = np.zeros((num_rows * num_shards, num_layers), dtype=np.int64)
    free = [list(ranks) for _ in range(num_rows) for ranks in topology.shards]
    result = np.empty(atoms.num_atoms, dtype=np.int64)
    for k in np.lexsort((np.arange(len(cells)), -peaks)).tolist():
        open_shards = np.array([x for x, ranks in enumerate(free) if ranks])
        new_peaks = (shard_loads[open_shards] + loads[k]).max(axis=2)
        increase = new_peaks.sum(axis=1) - shard_peaks[open_shards].sum(axis=1)
        best = np.lexsort((open_shards, new_peaks.max(axis=1), increase))[:width]
        choice = 0
        if rng is not None and best.size > 1:
            weights = 0.5 ** np.arange(best.size)
            choice = int(rng.choice(best.size, p=weights / weights.sum()))
        x = int(open_shards[best[choice]])
        rank = free[x].pop(0)
        result[list(cells[k])] = (x // num_shards) * topology.dp + rank
        shard_loads[x] += loads[k]
        shard_peaks[x] = shard_loads[x].max(axis=1)
    return result


def randomised_best_fit(
    padded: NDArray[np.int64], num_cells: int, cap: int, rng: np.random.Generator, *, width: int = 8
) -> list[list[int]] | None:
    """One randomised trial: window shuffle of descending lengths, the first B items open one cell each, best fit.

    Feasible cells are ranked by decreasing occupancy, then count, then index; one of the first ``width`` is drawn.
    None when an item fits nowhere.
    """
    remaining = np.lexsort((np.arange(padded.size), -padded)).tolist()
    used = np.zeros(num_cells, dtype=np.int64)
    counts = np.zeros(num_cells, dtype=np.int64)
    cells: list[list[int]] = [[] for _ in range(num_cells)]
    index = np.arange(num_cells)
    for position in range(padded.size):
        item = remaining.pop(int(rng.integers(min(width, len(remaining)))))
        if position < num_cells:
            k = position
        else:
            fits = index[used + padded[item] <= cap]
            if fits.size == 0:
                return None
            ranked = fits[np.lexsort((fits, counts[fits], -used[fits]))][:width]
            k = int(ranked[int(rng.integers(ranked.size))])
        cells[k].append(item)
        used[k] += padded[item]
        counts[k] += 1
    return cells
