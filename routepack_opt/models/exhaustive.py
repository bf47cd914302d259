"""Tiny windows: every layout with every placement, so that the answer is the optimum and not merely a good one.

Annealing keeps a tiny window's few moves in a trap (swaps alone, when R * D = N); trying everything takes milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routepack_opt.solvers.annealing.chain import ChainProblem

_MAX_LAYOUTS = 20_000  # classes of equal layouts
_MAX_PLACEMENTS = 1_000  # of one layer
_MAX_ENTRIES = 1_000_000  # row-shard costs evaluated: about ten milliseconds
_SAME = 1.0 + 1e-12  # sums in another order than the exact evaluator's


def exhaustive(
    problem: ChainProblem, *, cells_may_move: bool, rank_groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The best layout and placement of a window small enough to try them all.

    Parameters
    ----------
    cells_may_move
        Whether whole cells may change places between the DP ranks of a shard, see ``LayoutTask``.
    rank_groups
        int64 [n]; atoms with equal value share a DP rank.

    Returns
    -------
    ``cell_of`` int64 [n] and ``rank_of`` int64 [L, E], lexicographically best up to rounding (with one shard and many
    layers: the least slowest shard), ties going to the standing placement; None when the window is too large.
    """
    placements = [_placements(problem, layer) for layer in range(problem.demand.shape[1])]
    if any(choices is None for choices in placements):
        return None
    layouts = _layouts(problem, cells_may_move, rank_groups)
    if layouts is None:
        return None
    num_x = problem.num_rows * len(problem.shards)
    choices_of = [choices for choices in placements if choices is not None]
    num_choices = [len(choices) for choices in choices_of]
    entries = layouts.shape[0] * num_x
    if entries * max(problem.demand[0].size, problem.num_expert_ranks * sum(num_choices)) > 4 * _MAX_ENTRIES:
        return None
    joint = entries * math.prod(num_choices) <= _MAX_ENTRIES
    if not joint and len(problem.shards) > 1:
        return None
    members = _members(problem, layouts)
    attention = _attention(problem, layouts)
    peaks = _peaks(problem, members, choices_of)
    layout, picks = (_best_joint if joint else _best_by_layer)(problem, attention, peaks)
    rank_of = np.stack([choices[pick] for choices, pick in zip(choices_of, picks, strict=True)])
    return layouts[layout].copy(), rank_of


def _layouts(
    problem: ChainProblem, cells_may_move: bool, rank_groups: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    """int64 [S, n], feasible cell numbers, one of each class of equal layouts; None when there are too many, or none.

    Atom by atom, longest first. Rows are alike, and so are shards of one size and the cells of a row-shard (or the
    ranks of a shard, where cells may not move): of those still empty only the first may be opened.
    """
    num_atoms, num_rows, num_ranks = problem.padded.size, problem.num_rows, problem.num_ranks
    num_cells = num_rows * num_ranks
    per_shard = num_rows if cells_may_move else 1
    sizes = Counter(map(len, problem.shards))
    classes = math.lgamma(num_rows + 1) + sum(
        times * per_shard * math.lgamma(size + 1) + math.lgamma(times + 1) for size, times in sizes.items()
    )
    if num_atoms * math.log(num_cells) - classes > math.log(8 * _MAX_LAYOUTS):
        return None
    order = np.argsort(-problem.padded, kind="stable")
    cells = np.zeros((1, num_atoms), dtype=np.int64)
    padded = np.zeros((1, num_cells), dtype=np.int64)
    samples = np.zeros((1, num_cells), dtype=np.int64)
    for done, atom in enumerate(order.tolist()):
        fits = _may_open(problem, samples > 0, cells_may_move)
        fits |= (samples > 0) & (padded + problem.padded[atom] <= problem.cap)
        if problem.max_samples:
            fits &= samples + problem.samples[atom] <= problem.max_samples
        if problem.equal_samples:
            by_rank = samples.reshape(-1, num_rows, num_ranks).sum(axis=1) + problem.samples[atom]
            fits &= np.tile(by_rank * num_ranks <= problem.samples.sum(), (1, num_rows))
        if rank_groups is not None:
            mates = order[:done][rank_groups[order[:done]] == rank_groups[atom]]
            if mates.size:
                fits &= cells[:, mates[:1]] % num_ranks == np.arange(num_cells) % num_ranks
        parent, cell = np.nonzero(fits)
        cells, padded, samples = cells[parent], padded[parent], samples[parent]
        index = np.arange(parent.size)
        cells[:, atom] = cell
        padded[index, cell] += problem.padded[atom]
        samples[index, cell] += problem.samples[atom]
        enough = (samples == 0).sum(axis=1) < num_atoms - done
        cells, padded, samples = cells[enough], padded[enough], samples[enough]
        if not 0 < cells.shape[0] <= _MAX_LAYOUTS:
            return None
    return cells


def _may_open(problem: ChainProblem, full: NDArray[np.bool_], cells_may_move: bool) -> NDArray[np.bool_]:
    """bool [S, B], empty cells that may take the next atom."""
    shape = (-1, problem.num_rows, problem.num_ranks)
    full = full.reshape(shape)
    open_rows = full.any(axis=2).sum(axis=1)
    result = ~full & (np.arange(problem.num_rows)[:, None] <= open_rows[:, None, None])
    last_of_size: dict[int, list[int]] = {}
    for shard in problem.shards:
        ranks = list(shard)
        before = last_of_size.get(len(ranks))
        if before is not None:
            result[:, :, ranks] &= full[:, :, before].any(axis=(1, 2), keepdims=True)
        last_of_size[len(ranks)] = ranks
        taken = full[:, :, ranks] if cells_may_move else full[:, :, ranks].any(axis=1, keepdims=True)
        result[:, :, ranks] &= np.arange(len(ranks)) <= taken.sum(axis=2, keepdims=True)
    return np.asarray(result.reshape(full.shape[0], -1))


def _placements(problem: ChainProblem, layer: int) -> NDArray[np.int64] | None:
    """int64 [K, E], EP ranks; the standing one first. Without a move budget rank names do not matter."""
    num_experts, num_ranks = problem.demand.shape[2], problem.num_expert_ranks
    per_rank = num_experts // num_ranks
    budget = int(problem.move_budget[layer])
    home = problem.home[layer]
    if budget == 0 or num_ranks == 1:
        return np.asarray(home[None])
    count = math.factorial(num_experts) // math.factorial(per_rank) ** num_ranks
    count //= math.factorial(num_ranks) if budget < 0 else 1
    if count > _MAX_PLACEMENTS:
        return None
    choices = np.array(list(_deals(num_experts, num_ranks, per_rank, named=budget >= 0)), dtype=np.int64)
    if budget >= 0:
        away = (choices != home).sum(axis=1)
        return np.asarray(choices[np.argsort(away, kind="stable")][: int((away <= budget).sum())])
    same = (choices[:, :, None] == choices[:, None, :]) == (home[:, None] == home)
    standing = same.all(axis=(1, 2))
    return np.asarray(choices[np.argsort(~standing, kind="stable")])


def _deals(num_experts: int, num_ranks: int, per_rank: int, *, named: bool) -> Iterator[tuple[int, ...]]:
    """Every way to give each rank ``per_rank`` experts; unnamed: ranks open in order of their first expert."""

    def extend(ranks: tuple[int, ...], used: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(ranks) == num_experts:
            yield ranks
            return
        for rank in range(num_ranks):
            if used[rank] < per_rank:
                yield from extend((*ranks, rank), (*used[:rank], used[rank] + 1, *used[rank + 1 :]))
            if not named and used[rank] == 0:
                break

    return extend((), (0,) * num_ranks)


def _members(problem: ChainProblem, layouts: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [S, X, n], 1 where the atom runs in row-shard r * G + g."""
    shard_of_rank = np.empty(problem.num_ranks, dtype=np.int64)
    for shard, ranks in enumerate(problem.shards):
        shard_of_rank[list(ranks)] = shard
    row, rank = np.divmod(layouts, problem.num_ranks)
    shard_row = row * len(problem.shards) + shard_of_rank[rank]
    num_x = problem.num_rows * len(problem.shards)
    return np.asarray(shard_row[:, None, :] == np.arange(num_x)[:, None], dtype=np.float64)


def _attention(problem: ChainProblem, layouts: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [S, X], slowest cell of each stage, summed."""
    num_cells = problem.num_rows * problem.num_ranks
    inside = layouts[:, :, None] == np.arange(num_cells)
    shape = (-1, problem.num_rows, problem.num_ranks)
    tokens = (inside * problem.tokens[:, None]).sum(axis=1).reshape(shape) / problem.cap
    squares = (inside * problem.squares[:, None]).sum(axis=1).reshape(shape) / problem.cap**2
    result = np.zeros((layouts.shape[0], problem.num_rows, len(problem.shards)))
    for alpha, beta in zip(problem.alpha, problem.beta, strict=True):
        cost = alpha * tokens + beta * squares
        for shard, ranks in enumerate(problem.shards):
            result[:, :, shard] += cost[:, :, list(ranks)].max(axis=2)
    return np.asarray(result.reshape(layouts.shape[0], -1))


def _peaks(
    problem: ChainProblem, members: NDArray[np.float64], choices_of: list[NDArray[np.int64]]
) -> list[NDArray[np.float64]]:
    """Per layer float64 [S, X, K]: expert cost of the layer for each placement. Sums stay exact below 2^53."""
    result = []
    for layer, choices in enumerate(choices_of):
        demand = members @ problem.demand[problem.rows_of_atoms, layer, :].astype(np.float64)  # [S, X, E]
        placed = (choices[:, None, :] == np.arange(problem.num_expert_ranks)[:, None]).astype(np.float64)  # [K, P, E]
        loads = demand @ placed.reshape(-1, placed.shape[2]).T
        peaks = loads.reshape(*loads.shape[:2], *placed.shape[:2]).max(axis=3)
        result.append(peaks * problem.gamma[layer] / problem.cap)
    return result


def _best_by_layer(
    problem: ChainProblem, attention: NDArray[np.float64], peaks: list[NDArray[np.float64]]
) -> tuple[int, list[int]]:
    """One shard: the layers of a layout decide for themselves."""
    del problem
    totals = [layer.sum(axis=1) for layer in peaks]  # [S, K]
    slowest = attention.sum(axis=1) + sum(total.min(axis=1) for total in totals)
    layout = int(np.argmin(slowest))
    return layout, [int(np.argmax(total[layout] <= total[layout].min() * _SAME)) for total in totals]


def _best_joint(
    problem: ChainProblem, attention: NDArray[np.float64], peaks: list[NDArray[np.float64]]
) -> tuple[int, list[int]]:
    """Every layout with every combination of placements, lexicographically."""
    num_shards = len(problem.shards)
    best: tuple[float, float, float] | None = None
    answer: tuple[int, list[int]] = (0, [0] * len(peaks))
    for picks in itertools.product(*(range(layer.shape[2]) for layer in peaks)):
        costs = attention + sum(layer[:, :, pick] for layer, pick in zip(peaks, picks, strict=True))
        costs = costs.reshape(-1, problem.num_rows, num_shards)
        slowest = costs.max(axis=2).sum(axis=1) if problem.sync == "row" else costs.sum(axis=1).max(axis=1)
        if best is not None and slowest.min() > best[0] * _SAME:
            continue
        near = np.flatnonzero(slowest <= slowest.min() * _SAME)
        rest = np.stack((costs[near].sum(axis=(1, 2)), costs[near].max(axis=(1, 2))))
        near_total = np.flatnonzero(rest[0] <= rest[0].min() * _SAME)
        k = int(near_total[np.argmin(rest[1, near_total])])
        found = (float(slowest[near[k]]), float(rest[0, k]), float(rest[1, k]))
        if best is None or _clearly_less(found, best):
            best, answer = found, (int(near[k]), list(picks))
    return answer


def _clearly_less(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    """Lexicographic, rounding taken for equality."""
    for a, b in zip(left, right, strict=True):
        if a * _SAME < b:
            return True
        if b * _SAME < a:
            return False
    return False
