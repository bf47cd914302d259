"""Seed layouts: the paper's EDPAwarePair (routepack.md section 6) and level packing.

Fixed-row FFD and randomised fills live with the rows problem (:mod:`routepack_opt.models.rows`).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.cost import CostModel
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.topology import Topology


_MOST_SKIPPED = 256  # full cells level packing looks past before it gives up


def rank_loads_of_atoms(atoms: AtomSet, rank_of: NDArray[np.int64], num_ranks: int) -> NDArray[np.int32]:
    """int32 [n, P, L], assignments of each atom to each EP rank under ``rank_of`` [L, E]."""
    from routepack_opt.solvers.annealing.rank_swaps import build_loads

    out = np.zeros((atoms.num_atoms, num_ranks, atoms.demand.shape[1]), dtype=np.int32)
    build_loads(atoms.demand, atoms.source, rank_of, out, 0)
    return out


def edp_aware_pair(
    loads: NDArray[np.int32],
    cells: Sequence[Sequence[int]],
    topology: Topology,
    num_rows: int,
    *,
    width: int = 1,
    rng: np.random.Generator | None = None,
) -> NDArray[np.int64]:
    """Deal cells to (row, DP rank) positions so that their expert peaks interleave.

    Cells by descending routed-token peak; each goes to the empty position whose row-shard then has the smallest
    (increase of the sum of layer peaks, largest such peak), drawn among the best ``width`` with decaying weights.

    Parameters
    ----------
    loads
        int32 [n, P, L], assignments of each atom to each EP rank.

    Returns
    -------
    int64 [n], the cell number r*D + d of each atom.
    """
    num_shards = topology.num_shards
    of_cell = np.stack([loads[list(cell)].sum(axis=0, dtype=np.int64) for cell in cells])
    peaks = of_cell.max(axis=1).sum(axis=1)
    shard_loads = np.zeros((num_rows * num_shards, *loads.shape[1:]), dtype=np.int64)
    shard_peaks = np.zeros(num_rows * num_shards, dtype=np.int64)
    free = [list(ranks) for _ in range(num_rows) for ranks in topology.shards]
    result = np.empty(loads.shape[0], dtype=np.int64)
    for k in np.lexsort((np.arange(len(cells)), -peaks)).tolist():
        open_shards = np.array([x for x, ranks in enumerate(free) if ranks])
        new_peaks = (shard_loads[open_shards] + of_cell[k]).max(axis=1)
        increase = new_peaks.sum(axis=1) - shard_peaks[open_shards]
        best = np.lexsort((open_shards, new_peaks.max(axis=1), increase))[:width]
        choice = 0
        if rng is not None and best.size > 1:
            weights = 0.5 ** np.arange(best.size)
            choice = int(rng.choice(best.size, p=weights / weights.sum()))
        x = int(open_shards[best[choice]])
        result[list(cells[k])] = (x // num_shards) * topology.dp + free[x].pop(0)
        shard_loads[x] += of_cell[k]
        shard_peaks[x] += increase[best[choice]]
    return result


def level_packing(
    atoms: AtomSet, num_cells: int, token_cap: int, cost: CostModel, constraints: Constraints
) -> list[list[int]] | None:
    """Costliest atom first, each into the cheapest cell it fits in: level cells where the cap leaves room.

    An atom's cost is its attention cost over all stages, or its tokens when attention is free.

    Returns
    -------
    ``num_cells`` cells of atoms, or None when an atom fits nowhere or a cell would stay empty.
    """
    tokens = atoms.tokens / float(token_cap)
    squares = atoms.squares / float(token_cap) ** 2
    weight = sum((s.alpha * tokens + s.beta * squares for s in cost.stages), np.zeros(atoms.num_atoms))
    if not weight.any():
        weight = atoms.padded.astype(np.float64)
    limit = constraints.max_samples_per_cell
    heap = [(0.0, k) for k in range(num_cells)]
    room = [token_cap] * num_cells
    held = [0] * num_cells
    cells: list[list[int]] = [[] for _ in range(num_cells)]
    for atom in np.lexsort((np.arange(atoms.num_atoms), -weight)).tolist():
        padded, samples = int(atoms.padded[atom]), int(atoms.samples[atom])
        skipped: list[tuple[float, int]] = []
        while heap and len(skipped) < _MOST_SKIPPED:
            level, k = heapq.heappop(heap)
            if (padded <= room[k] or not cells[k]) and (limit is None or held[k] + samples <= limit):
                cells[k].append(atom)
                room[k] -= padded
                held[k] += samples
                skipped.append((level + float(weight[atom]), k))
                break
            skipped.append((level, k))
        else:
            return None
        for entry in skipped:
            heapq.heappush(heap, entry)
    return cells if all(cells) else None
