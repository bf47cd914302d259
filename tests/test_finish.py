"""Final touches: nothing they do changes the score."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import random_case

from routepack_opt import Constraints, score
from routepack_opt.models.atoms import build_atoms
from routepack_opt.models.finish import even_sample_counts, keep_standing_layers, loads_by_rank, row_demand
from routepack_opt.models.layout import canonical_ranks, cells_from_assignment, shard_row_of_cell
from routepack_opt.models.placement import slots_from_ranks


def spread(counts: np.ndarray) -> int:
    return int(counts.max() - counts.min())


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_touches_leave_the_score_and_the_rules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, constrained=False)
    window, topology, cap = case.window, case.topology, 10**6
    num_rows = int(rng.integers(1, 4))
    num_cells = num_rows * topology.dp
    if window.num_samples < num_cells:
        return
    atoms = build_atoms(window, Constraints(), cap)
    cell_of = np.concatenate((np.arange(num_cells), rng.integers(0, num_cells, window.num_samples - num_cells)))
    rng.shuffle(cell_of)
    per_rank = window.num_experts // topology.ep
    rank_of, standing = (
        np.array([rng.permutation(window.num_experts) // per_rank for _ in range(window.num_layers)]) for _ in range(2)
    )

    def evaluate(cells: np.ndarray, ranks: np.ndarray) -> tuple[float, float, float]:
        layout = cells_from_assignment(atoms, cells, num_rows, topology.dp)
        return score(window, layout, slots_from_ranks(ranks, topology.ep), topology, cap, case.cost)

    before = evaluate(cell_of, rank_of)
    demand = row_demand(atoms, cell_of, shard_row_of_cell(topology, num_rows))
    kept = keep_standing_layers(demand, rank_of, standing, topology.ep)
    assert evaluate(cell_of, kept) == before
    assert all((k == s).all() or (k == r).all() for k, s, r in zip(kept, standing, rank_of, strict=True))
    limit = int(np.bincount(cell_of).max())
    evened = even_sample_counts(atoms, cell_of, kept, topology, case.cost, cap, limit)
    assert evaluate(evened, kept) == before
    counts = np.bincount(evened, minlength=num_cells)
    assert counts.min() > 0
    assert counts.max() <= limit
    by_rank = [np.bincount(cells % topology.dp, minlength=topology.dp) for cells in (cell_of, evened)]
    assert spread(by_rank[1]) <= spread(by_rank[0])
    turned = canonical_ranks(atoms, evened, topology, num_rows, True)
    assert evaluate(turned, kept) == before
    assert canonical_ranks(atoms, evened, topology, num_rows, False) is evened


def test_layers_of_equal_peaks_go_back_to_the_standing_placement() -> None:
    rows = np.array([[[3, 1, 3, 1], [9, 0, 0, 0], [2, 2, 2, 2]]])
    rank_of = np.array([[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1]])
    standing = np.array([[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]])
    kept = keep_standing_layers(rows, rank_of, standing, 2)
    np.testing.assert_array_equal(kept[0], rank_of[0])  # 4 | 4 against 6 | 2
    np.testing.assert_array_equal(kept[1:], standing[1:])


def test_loads_by_rank() -> None:
    demand = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert loads_by_rank(demand, np.array([1, 0, 1, 0]), 2).tolist() == [[6, 4], [14, 12]]


def test_sample_counts_are_evened_where_nothing_else_decides() -> None:
    rng = np.random.default_rng(0)
    case = random_case(rng, constrained=False)
    window = case.window
    atoms = build_atoms(window, Constraints(), 10**6)
    free = type(case.cost)((), 0.0)
    dp = case.topology.dp
    lopsided = np.zeros(window.num_samples, dtype=np.int64)
    lopsided[:dp] = np.arange(dp)
    ranks = np.tile(np.arange(window.num_experts) // (window.num_experts // case.topology.ep), (window.num_layers, 1))
    zero = type(atoms)(
        atoms.members,
        atoms.padded,
        atoms.tokens,
        atoms.squares,
        atoms.samples,
        np.zeros_like(atoms.demand),
        atoms.source,
        None,
    )
    evened = even_sample_counts(zero, lopsided, ranks, case.topology, free, 10**6, None)
    assert spread(np.bincount(evened % dp, minlength=dp)) <= 1
