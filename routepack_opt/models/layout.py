"""The layout problem: atoms into R x D cells so that the slowest EDP shard is fastest; bounds and final form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.models.layout_bounds import LayoutBound as LayoutBound  # kept under its first address too
from routepack_opt.models.layout_bounds import averaging_bound as averaging_bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.topology import Topology

Cells = tuple[tuple[tuple[int, ...], ...], ...]


def simple_averaging_bound(
    lengths: NDArray[np.int64], load: NDArray[np.int64], topology: Topology, token_cap: int, cost: CostModel
) -> float:
    """The averaging bound exactly as routepack.md section 5 prints it: the unit in which gains are stated."""
    per_rank = load.shape[1] // topology.ep
    ascending = np.sort(load, axis=1)
    smallest = ascending[:, : per_rank - 1].sum(axis=1)
    peaks = np.maximum(load.sum(axis=1) / topology.ep, ascending[:, -1] + smallest)
    cap = float(token_cap)
    work = sum(
        s.alpha * float(lengths.sum()) / cap + s.beta * float((lengths * lengths).sum()) / cap**2 for s in cost.stages
    )
    experts = float((cost.expert_weights(load.shape[0]) * peaks).sum()) / cap
    return (work / (topology.dp / topology.num_shards) + experts) / topology.num_shards


def shard_row_of_cell(topology: Topology, num_rows: int) -> NDArray[np.int64]:
    """int64 [R*D], the row-shard r*G + g of cell r*D + d."""
    rows, ranks = np.divmod(np.arange(num_rows * topology.dp, dtype=np.int64), topology.dp)
    return np.asarray(rows * topology.num_shards + topology.shard_of_rank[ranks])


def cells_from_assignment(
    atoms: AtomSet, cell_of: NDArray[np.int64], num_rows: int, num_ranks: int
) -> list[list[list[int]]]:
    """``cells[row][rank]`` -> sorted sample indices, from the cell number r*D + d of each atom."""
    cells: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_rows)]
    for atom, cell in enumerate(cell_of.tolist()):
        cells[cell // num_ranks][cell % num_ranks].extend(atoms.members[atom])
    for row in cells:
        for cell_members in row:
            cell_members.sort()
    return cells


def canonical_ranks(
    atoms: AtomSet, cell_of: NDArray[np.int64], topology: Topology, num_rows: int, free: bool
) -> NDArray[np.int64]:
    """Permute cells among the DP ranks of a shard, row by row: the score stays, sample counts even out.

    The fullest cells go to the rank with the fewest samples (then tokens) so far. ``free`` is False when cells may
    not change rank (equal sample counts, rank groups): then the assignment is returned as it is.
    """
    if not free:
        return cell_of
    num_ranks = topology.dp
    num_cells = num_rows * num_ranks
    samples = np.bincount(cell_of, weights=atoms.samples, minlength=num_cells).astype(np.int64)
    tokens = np.bincount(cell_of, weights=atoms.tokens, minlength=num_cells).astype(np.int64)
    first = np.full(num_cells, atoms.num_atoms, dtype=np.int64)
    np.minimum.at(first, cell_of, np.arange(atoms.num_atoms))
    target = np.arange(num_cells, dtype=np.int64)
    rank_samples = np.zeros(num_ranks, dtype=np.int64)
    rank_tokens = np.zeros(num_ranks, dtype=np.int64)
    for row in range(num_rows):
        for ranks in topology.shards:
            here = row * num_ranks + np.asarray(ranks)
            fullest = here[np.lexsort((first[here], -tokens[here], -samples[here]))]
            emptiest = np.asarray(ranks)[
                np.lexsort((np.asarray(ranks), rank_tokens[list(ranks)], rank_samples[list(ranks)]))
            ]
            target[fullest] = row * num_ranks + emptiest
            rank_samples[emptiest] += samples[fullest]
            rank_tokens[emptiest] += tokens[fullest]
    return target[cell_of]
