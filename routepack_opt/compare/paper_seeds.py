"""The paper's seeds and its choice among them (routepack.md section 6)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.compare.heuristics import cell_numbers
from routepack_opt.models.layout import shard_row_of_cell
from routepack_opt.models.rows import ffd_rows
from routepack_opt.models.seeds import edp_aware_pair, rank_loads_of_atoms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.cost import Score
    from routepack_opt.models.layout_search import LayoutTask


@dataclass(frozen=True, eq=False)
class Seed:
    """A layout int64 [n] (cell r*D + d of each atom) and its exact score."""

    cell_of: NDArray[np.int64]
    score: Score


def make_seeds(
    task: LayoutTask,
    evaluate: Callable[[NDArray[np.int64]], Score],
    *,
    most: int,
    width: int,
    until: float,
    rng: np.random.Generator,
) -> list[Seed]:
    """Fixed-row FFD, the better of it and its cells re-paired, then randomised trials; one per canonical form.

    Parameters
    ----------
    most
        M: two, and so many trials.
    width
        w, of the window shuffle, of best fit and of EDPAwarePair.
    until
        ``time.perf_counter()`` value; no trial starts after it.
    """
    atoms, topology, rows = task.atoms, task.topology, task.num_rows
    packed = ffd_rows(task.rows_problem)
    first = packed if packed is not None and len(packed) == len(task.cells) else task.cells
    loads = rank_loads_of_atoms(atoms, task.rank_of, topology.ep)
    layouts = [
        cell_numbers(first, atoms.num_atoms),
        edp_aware_pair(loads, first, topology, rows),
    ]
    for _ in range(most - 2):
        if time.perf_counter() > until:
            break
        cells = random_best_fit(atoms.padded, len(task.cells), task.token_cap, width, rng)
        if cells is not None:
            layouts.append(edp_aware_pair(loads, cells, topology, rows, width=width, rng=rng))
    best: dict[bytes, Seed] = {}
    for layout in layouts:
        seed = Seed(layout, evaluate(layout))
        form = canonical_form(layout, rows, topology.shards)
        if form not in best or seed.score < best[form].score:
            best[form] = seed
    return sorted(best.values(), key=lambda seed: seed.score)


def random_best_fit(
    tokens: NDArray[np.int64], num_cells: int, cap: int, width: int, rng: np.random.Generator
) -> list[list[int]] | None:
    """Window shuffle, the first items one a cell, the rest by randomised best fit; None when an item fits nowhere.

    The order comes from drawing again and again among the first ``width`` of the remaining, descending length; best
    fit draws among the first ``width`` feasible cells by decreasing occupancy, then count, then index.
    """
    remaining = np.argsort(-tokens, kind="stable").tolist()
    order = [remaining.pop(int(rng.integers(min(width, len(remaining))))) for _ in range(len(remaining))]
    cells = [[item] for item in order[:num_cells]]
    held = tokens[order[:num_cells]].copy()
    count = np.ones(num_cells, dtype=np.int64)
    index = np.arange(num_cells)
    for item in order[num_cells:]:
        feasible = np.flatnonzero(held + tokens[item] <= cap)
        if not feasible.size:
            return None
        ranked = np.lexsort((index[feasible], count[feasible], -held[feasible]))[:width]
        k = int(feasible[ranked[int(rng.integers(ranked.size))]])
        cells[k].append(item)
        held[k] += tokens[item]
        count[k] += 1
    return cells


def canonical_form(cell_of: NDArray[np.int64], num_rows: int, shards: Sequence[Sequence[int]]) -> bytes:
    """Equal for layouts that differ by the order of cells inside a shard or of rows, and for no others."""
    num_ranks = sum(map(len, shards))
    first = np.full((num_rows, num_ranks), cell_of.size, dtype=np.int64)
    np.minimum.at(first, np.divmod(cell_of, num_ranks), np.arange(cell_of.size))
    row_order = np.argsort(first.min(axis=1), kind="stable")
    number = np.empty((num_rows, num_ranks), dtype=np.int64)
    for new_row, row in enumerate(row_order):
        for ranks in shards:
            inside = np.asarray(ranks)
            number[row, inside[np.argsort(first[row, inside], kind="stable")]] = new_row * num_ranks + inside
    return number.ravel()[cell_of].tobytes()


def choose_members(
    seeds: Sequence[Seed], task: LayoutTask, count: int, *, score_weight: float, rng: np.random.Generator
) -> list[Seed]:
    """The best, then always the seed with the largest (least distance to those chosen - weighted score gap).

    The distance is the mean of how differently two layouts put atoms together in cells and in rows (Jaccard distance
    of the pairs), and of a sliced-Wasserstein sketch of their rows. Seeds are repeated in turn to fill ``count``.
    """
    best = seeds[0].score.slowest_shard
    sketches = _sketches(seeds, task, rng)
    chosen = [0]
    nearest = np.full(len(seeds), np.inf)
    while len(chosen) < min(count, len(seeds)):
        last = chosen[-1]
        distance = np.array([_distance(seeds, sketches, last, k, task.topology.dp) for k in range(len(seeds))])
        nearest = np.minimum(nearest, distance)
        gap = np.array([seed.score.slowest_shard / best - 1.0 if best > 0 else 0.0 for seed in seeds])
        value = nearest - score_weight * gap
        value[chosen] = -np.inf
        chosen.append(int(np.argmax(value)))
    return [seeds[chosen[k % len(chosen)]] for k in range(count)]


def _distance(seeds: Sequence[Seed], sketches: NDArray[np.float64], a: int, b: int, num_ranks: int) -> float:
    x, y = seeds[a].cell_of, seeds[b].cell_of
    cells, rows = _pair_distance(x, y), _pair_distance(x // num_ranks, y // num_ranks)
    sketch = float(np.abs(sketches[a] - sketches[b]).mean())
    return (cells + rows + sketch) / 3.0


def _pair_distance(x: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """1 - (pairs together in both) / (pairs together in either)."""

    def pairs(labels: NDArray[np.int64]) -> float:
        counts = np.bincount(labels)
        return float((counts * (counts - 1)).sum())

    both = pairs(x * (int(y.max()) + 1) + y)
    either = pairs(x) + pairs(y) - both
    return 1.0 - both / either if either else 0.0


def _sketches(seeds: Sequence[Seed], task: LayoutTask, rng: np.random.Generator) -> NDArray[np.float64]:
    """float64 [seeds, directions, R]: rows' features (tokens, squares, per-layer loads of each shard) on fixed
    directions, sorted, in units of each feature's spread.
    """
    atoms, topology, rows = task.atoms, task.topology, task.num_rows
    totals = atoms.demand.sum(axis=2, dtype=np.int64)[atoms.source].astype(np.float64)
    per_atom = np.column_stack((atoms.tokens, atoms.squares, totals))
    shard_row = shard_row_of_cell(topology, rows)
    features = np.zeros((len(seeds), rows * topology.num_shards, per_atom.shape[1]))
    for k, seed in enumerate(seeds):
        np.add.at(features[k], shard_row[seed.cell_of], per_atom)
    flat = features.reshape(len(seeds), rows, -1)
    spread = flat.std(axis=(0, 1))
    normal = (flat - flat.mean(axis=(0, 1))) / np.where(spread > 0, spread, 1.0)
    directions = rng.normal(size=(normal.shape[2], 16))
    directions /= np.linalg.norm(directions, axis=0)
    return np.sort(normal @ directions, axis=1).transpose(0, 2, 1)
