"""From bins to cells: every cell filled, samples dealt evenly to DP ranks, atoms of a rank group on one rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers import bin_packing
from routepack_opt.solvers.rank_balance import balance_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routepack_opt.models.rows import RowsProblem

GROUP_TRIES = 40  # shuffled group-to-rank assignments tried per row count
RANDOM_SKIP = 0.1  # chance that a randomised subset filling passes over an item


@dataclass(frozen=True)
class Sorted:
    """The atoms of a problem in decreasing tokens (then index).

    Attributes
    ----------
    order
        int64 [n], atom at each sorted position.
    tokens, samples
        int64 [n] in that order.
    num_alone
        The first so many are over the cap and each fill a cell.
    max_samples
        Most samples in a cell (no limit: a number larger than any count).
    """

    order: NDArray[np.int64]
    tokens: NDArray[np.int64]
    samples: NDArray[np.int64]
    num_alone: int
    cap: int
    max_samples: int

    @classmethod
    def of(cls, problem: RowsProblem) -> Sorted:
        """Sort the atoms."""
        order = np.argsort(-problem.tokens, kind="stable").astype(np.int64)
        tokens = problem.tokens[order]
        limit = problem.max_samples_per_cell
        return cls(
            order,
            tokens,
            problem.samples[order],
            int((tokens > problem.cap).sum()),
            problem.cap,
            bin_packing.NO_LIMIT if limit is None else limit,
        )

    def with_alone(self, regular: NDArray[np.int64]) -> NDArray[np.int64]:
        """bin_of of the regular atoms -> of all atoms, those over the cap in the first bins."""
        if not self.num_alone:
            return regular
        return np.concatenate((np.arange(self.num_alone, dtype=np.int64), regular + self.num_alone))


def to_cells(atoms: Sorted, bin_of: NDArray[np.int64], num_cells: int) -> list[list[int]]:
    """Cell index of each sorted atom -> sorted atom lists."""
    by_cell = np.lexsort((atoms.order, bin_of))
    stops = np.cumsum(np.bincount(bin_of, minlength=num_cells))
    atom, start, cells = atoms.order[by_cell].tolist(), 0, []
    for stop in stops.tolist():
        cells.append(atom[start:stop])
        start = stop
    return cells


_WISHED_TRIES = 64  # pairs of ranks looked at for even sample counts when they are only a wish


def arrange(
    atoms: Sorted, bin_of: NDArray[np.int64], num_rows: int, num_ranks: int, *, equal_samples: bool = False
) -> tuple[NDArray[np.int64], int]:
    """Make R x D full cells of at most R x D bins.

    Returns
    -------
    int64 [n] cell r * D + d of each sorted atom, and the spread of samples per rank (0 or 1 when evened out).
    """
    num_cells = num_rows * num_ranks
    bins = split_bins(bin_of, num_cells)
    held = np.bincount(bins, atoms.samples, num_cells).astype(np.int64)
    load = np.bincount(bins, atoms.tokens, num_cells).astype(np.int64)
    rank_of = deal(held, load, num_rows, num_ranks)
    # Inside a rank: fullest cell first, so that one row holds cells of like size.
    cell_of_bin = np.empty(num_cells, dtype=np.int64)
    for_rank = np.lexsort((-load, rank_of))
    cell_of_bin[for_rank] = np.tile(np.arange(num_rows), num_ranks) * num_ranks + np.repeat(
        np.arange(num_ranks), num_rows
    )
    cells = cell_of_bin[bins]
    limits = {"cap": atoms.cap, "max_count": atoms.max_samples, "num_ranks": num_ranks, "num_bins": num_cells}
    max_tries = None if equal_samples else _WISHED_TRIES
    return cells, balance_ranks(atoms.tokens, atoms.samples, cells, max_tries=max_tries, **limits)


def split_bins(bin_of: NDArray[np.int64], num_bins: int) -> NDArray[np.int64]:
    """Fill every empty bin with the shortest atom of the bin that holds most atoms (needs n >= num_bins)."""
    bins = bin_of.copy()
    size = np.bincount(bins, minlength=num_bins)
    for empty in np.flatnonzero(size == 0):
        donor = int(np.argmax(size))
        bins[np.flatnonzero(bins == donor)[-1]] = empty
        size[donor] -= 1
        size[empty] = 1
    return bins


def deal(held: NDArray[np.int64], load: NDArray[np.int64], num_rows: int, num_ranks: int) -> NDArray[np.int64]:
    """Rank of each bin: most samples first, to the rank with fewest samples (then tokens) that has rows left."""
    rank_of = np.empty(held.size, dtype=np.int64)
    if num_rows == 1:
        return np.arange(held.size, dtype=np.int64)
    samples, tokens, rows = [0] * num_ranks, [0] * num_ranks, [0] * num_ranks
    heap = [(0, 0, d) for d in range(num_ranks)]
    for b in np.lexsort((-load, -held)).tolist():
        _, _, d = heapq.heappop(heap)
        rank_of[b] = d
        samples[d] += int(held[b])
        tokens[d] += int(load[b])
        rows[d] += 1
        if rows[d] < num_rows:
            heapq.heappush(heap, (samples[d], tokens[d], d))
    return rank_of


def group_layout(
    atoms: Sorted, groups: NDArray[np.int64], num_rows: int, num_ranks: int, *, even: bool, rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """Cells with every rank group on one DP rank, or None when no try succeeds.

    Parameters
    ----------
    groups
        int64 [n], group of each sorted atom.
    even
        Every rank must get the same number of samples.
    """
    _, group_of = np.unique(groups, return_inverse=True)
    num_groups = int(group_of.max()) + 1
    whole_cells = np.minimum(atoms.tokens, atoms.cap)  # an atom over the cap takes one cell
    tokens = np.bincount(group_of, whole_cells).astype(np.int64)
    samples = np.bincount(group_of, atoms.samples).astype(np.int64)
    sizes = np.bincount(group_of).astype(np.int64)
    share = -(-int(samples.sum()) // num_ranks)
    for attempt in range(GROUP_TRIES):
        noise = rng.uniform(0.7, 1.3, num_groups) if attempt > 2 else np.ones(num_groups)
        order = np.argsort(-(sizes if attempt == 1 else tokens) * noise, kind="stable")
        limit = share if even or attempt % 3 == 0 else bin_packing.NO_LIMIT
        weights = sizes[order] if attempt == 1 else tokens[order]
        capacity = bin_packing.NO_LIMIT if attempt == 1 else num_rows * min(atoms.cap, int(tokens.sum()))
        dealt = bin_packing.fit(
            weights, samples[order], capacity, max_bins=num_ranks, max_count=limit, rule=bin_packing.LEAST_LOADED
        )
        if dealt is None:
            continue
        rank_of_group = np.empty(num_groups, dtype=np.int64)
        rank_of_group[order] = dealt
        cells = _pack_ranks(atoms, rank_of_group[group_of], num_rows, num_ranks, rng)
        if cells is not None:
            return cells
    return None


def _pack_ranks(
    atoms: Sorted, rank_of: NDArray[np.int64], num_rows: int, num_ranks: int, rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """Pack the atoms of each rank into its own rows; None when one rank fails."""
    if np.bincount(rank_of, minlength=num_ranks).min() < num_rows:
        return None
    cells = np.empty(rank_of.size, dtype=np.int64)
    for d in range(num_ranks):
        mine = np.flatnonzero(rank_of == d)
        part = Sorted(
            mine,
            atoms.tokens[mine],
            atoms.samples[mine],
            int((mine < atoms.num_alone).sum()),
            atoms.cap,
            atoms.max_samples,
        )
        rows = pack_bins(part, num_rows, rng, num_random=4)
        if rows is None:
            return None
        cells[mine] = split_bins(rows, num_rows) * num_ranks + d
    return cells


def pack_bins(atoms: Sorted, num_bins: int, rng: np.random.Generator, *, num_random: int) -> NDArray[np.int64] | None:
    """The first of :func:`packings`, or None."""
    return next(packings(atoms, num_bins, rng, num_random=num_random), None)


def packings(atoms: Sorted, num_bins: int, rng: np.random.Generator, *, num_random: int) -> Iterator[NDArray[np.int64]]:
    """Packings into at most ``num_bins`` bins by rising effort: balanced, first fit, best fit, subset filling."""
    tokens, samples = atoms.tokens[atoms.num_alone :], atoms.samples[atoms.num_alone :]
    room = num_bins - atoms.num_alone
    if room < 0 or (room == 0 and tokens.size):
        return
    if not tokens.size:
        yield np.arange(atoms.num_alone, dtype=np.int64)
        return
    even = min(atoms.max_samples, -(-int(samples.sum()) // room))
    rules = (
        (bin_packing.LEAST_LOADED, even),
        (bin_packing.LEAST_LOADED, atoms.max_samples),
        (bin_packing.FIRST_FIT, atoms.max_samples),
        (bin_packing.BEST_FIT, atoms.max_samples),
    )
    for rule, limit in rules:
        found = bin_packing.fit(tokens, samples, atoms.cap, max_bins=room, max_count=limit, rule=rule)
        if found is not None:
            yield atoms.with_alone(found)
    if atoms.max_samples < bin_packing.NO_LIMIT:
        found = bin_packing.level(tokens, samples, atoms.cap, num_bins=room, max_count=atoms.max_samples)
        if found is not None:
            yield atoms.with_alone(found)
    for attempt in range(num_random + 1):
        skip = RANDOM_SKIP * min(attempt, 1)
        found = bin_packing.fill(
            tokens, samples, atoms.cap, max_bins=room, max_count=atoms.max_samples, skip=skip, rng=rng
        )
        if found is not None:
            yield atoms.with_alone(found)
