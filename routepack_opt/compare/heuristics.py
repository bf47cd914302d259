"""What trainers do today, in our own words: first fit decreasing, and balanced partitions by differencing."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.compare.case import PLAIN
from routepack_opt.errors import Infeasible
from routepack_opt.models.atoms import build_atoms
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.rows import check_enough_samples, ffd_rows
from routepack_opt.planner import rows_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.compare.case import Case
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.models.rows import RowsProblem

    # (weights, number of parts, equal counts) -> indices of each part
    Partition = Callable[[list[int], int, bool], list[list[int]]]


def atoms_and_rows(case: Case) -> tuple[AtomSet, RowsProblem]:
    """The window's samples as the rows problem sees them."""
    atoms = build_atoms(case.window, PLAIN, case.token_cap)
    return atoms, rows_problem(atoms, case.topology, case.token_cap, PLAIN)


def cell_numbers(cells: Sequence[Sequence[int]], num_atoms: int) -> NDArray[np.int64]:
    """int64 [n], the cell of each atom."""
    cell_of = np.empty(num_atoms, dtype=np.int64)
    for k, members in enumerate(cells):
        cell_of[list(members)] = k
    return cell_of


def as_layout(case: Case, atoms: AtomSet, cells: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """R*D cells of atoms, index r*D + d, as ``cells[row][dp_rank]`` of samples."""
    dp = case.topology.dp
    return cells_from_assignment(atoms, cell_numbers(cells, atoms.num_atoms), len(cells) // dp, dp)


def ffd_atoms(problem: RowsProblem) -> list[list[int]]:
    """First fit decreasing into the fewest rows it manages: R*D cells of atoms."""
    packed = ffd_rows(problem)
    if packed is None:
        check_enough_samples(problem, 1)
        raise Infeasible("first fit decreasing finds no layout")
    return packed


def ffd_cells(case: Case) -> list[list[list[int]]]:
    """The same as ``cells[row][dp_rank]`` of samples."""
    atoms, problem = atoms_and_rows(case)
    return as_layout(case, atoms, ffd_atoms(problem))


def karmarkar_karp(weights: list[int], num_parts: int, equal_counts: bool) -> list[list[int]]:
    """Set differencing (Karmarkar and Karp 1982) for ``num_parts`` parts.

    Partial partitions wait in a heap, widest spread of sums first; two are merged by laying the heavy parts of one on
    the light parts of the other. With ``equal_counts`` (n a multiple of ``num_parts``) they start as runs of
    ``num_parts`` items next to each other in size, one item a part, and so the counts stay equal.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    width = num_parts if equal_counts else 1
    if len(weights) % width:
        raise Infeasible(f"{len(weights)} samples cannot be shared equally by {num_parts} DP ranks")
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), width):
        parts = [(weights[i], [i]) for i in reversed(order[start : start + width])]
        parts += [(0, [])] * (num_parts - width)
        heap.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, tag, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tag, merged))
    return [members for _, members in heap[0][2]]


def partition_cells(case: Case, partition: Partition = karmarkar_karp) -> list[list[list[int]]]:
    """Samples to DP ranks in equal numbers, then each rank's samples to rows; one row more until the cap holds.

    This is the balancing of verl and slime. Where N is no multiple of D the counts are left free. Heavy cells of all
    ranks meet in the same row.
    """
    lengths, dp = case.window.lengths, case.topology.dp
    check_enough_samples(atoms_and_rows(case)[1], 1)
    ranks = partition(lengths.tolist(), dp, len(lengths) % dp == 0)
    rows = max(1, *(-(-int(lengths[part].sum()) // case.token_cap) for part in ranks))
    while rows <= min(map(len, ranks)):
        cells: list[list[list[int]]] = [[] for _ in range(rows)]
        for part in ranks:
            micro = [[part[i] for i in inner] for inner in partition(lengths[part].tolist(), rows, False)]
            micro.sort(key=lambda cell: -int(lengths[cell].sum()))
            for row, cell in zip(cells, micro, strict=True):
                row.append(sorted(cell))
        held = [int(lengths[cell].sum()) if cell else case.token_cap + 1 for row in cells for cell in row]
        if max(held) <= case.token_cap:
            return cells
        rows += 1
    raise Infeasible("balanced partitions find no layout under the cap")
