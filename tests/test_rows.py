"""The rows problem: constraints, refusals and proofs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import Infeasible
from routepack_opt.models.rows import RowsProblem, ffd_rows, pack_into, solve_rows


def make(tokens, num_ranks, cap, samples=None, rank_groups=None, **constraints):
    tokens = np.array(tokens, dtype=np.int64)
    samples = np.ones_like(tokens) if samples is None else np.array(samples, dtype=np.int64)
    groups = None if rank_groups is None else np.array(rank_groups, dtype=np.int64)
    return RowsProblem(tokens, samples, num_ranks, cap, rank_groups=groups, **constraints)


def check_cells(problem, cells, rows):
    """Every constraint of the layout, re-derived from the lists."""
    tokens, samples, num_ranks = problem.tokens.tolist(), problem.samples.tolist(), problem.num_ranks
    assert len(cells) == rows * num_ranks
    assert sorted(i for cell in cells for i in cell) == list(range(len(tokens)))
    assert rows >= problem.min_rows and rows % problem.row_multiple == 0
    for cell in cells:
        assert cell == sorted(cell) and cell
        assert sum(tokens[i] for i in cell) <= problem.cap or len(cell) == 1
        if problem.max_samples_per_cell is not None:
            assert sum(samples[i] for i in cell) <= problem.max_samples_per_cell
    counts = [sum(samples[i] for cell in cells[d::num_ranks] for i in cell) for d in range(num_ranks)]
    if problem.equal_samples_per_rank:
        assert len(set(counts)) == 1
    if problem.rank_groups is not None:
        rank_of = {}
        for c, cell in enumerate(cells):
            for i in cell:
                assert rank_of.setdefault(int(problem.rank_groups[i]), c % num_ranks) == c % num_ranks
    return counts


def check_certificate(problem, result):
    """The contract's checker, in plain Python: a bounded knapsack over the cap."""
    certificate = result.certificate
    assert certificate["cap"] == problem.cap
    table = {length: weight for length, weight in certificate["table"]}
    regular = [int(t) for t in problem.tokens if t <= problem.cap]
    assert set(table) == set(regular)
    if certificate["kind"] == "count":
        assert set(table.values()) == {1}
    limit = problem.max_samples_per_cell
    budget = 0 if limit is None else limit
    best = np.zeros((budget + 1, problem.cap + 1), dtype=np.int64)
    for t, s in zip(problem.tokens.tolist(), problem.samples.tolist(), strict=True):
        s = 0 if limit is None else s
        if t <= problem.cap:
            best[s:, t:] = np.maximum(best[s:, t:], best[: budget + 1 - s, : problem.cap + 1 - t] + table[t])
    assert best.max() <= certificate["max_cell"]
    total = sum(table[t] for t in regular)
    cells = -(-total // certificate["max_cell"]) + problem.tokens.size - len(regular)
    assert certificate["cells"] == cells
    if problem.rank_groups is None:
        assert result.lower_bound == problem.rows_for(cells)
    assert (result.status == "certified") == (result.rows == result.lower_bound)


def solve(*args, **kwargs):
    problem = make(*args, **kwargs)
    result = solve_rows(problem)
    check_certificate(problem, result)
    return result, check_cells(problem, result.cells, result.rows)


def least_rows(problem):
    """By brute force; None when no row count works (bin constraints only)."""
    items = sorted(range(problem.tokens.size), key=lambda i: -problem.tokens[i])
    limit = problem.max_samples_per_cell or 10**9

    def place(k, cells, num_cells):
        if k == len(items):
            return len(cells) <= num_cells
        t, s = int(problem.tokens[items[k]]), int(problem.samples[items[k]])
        for c in range(len(cells)):
            load, held = cells[c]
            if load + t <= problem.cap and held + s <= limit:
                cells[c] = (load + t, held + s)
                if place(k + 1, cells, num_cells):
                    return True
                cells[c] = (load, held)
        return len(cells) < num_cells and place(k + 1, [*cells, (t, s)], num_cells)

    for num_bins in range(1, len(items) + 1):
        if place(0, [], num_bins):
            rows = problem.rows_for(num_bins)
            return rows if rows * problem.num_ranks <= len(items) else None
    return None


def test_eight_samples_of_seven_tokens_never_share_a_cap_of_eight():
    result, _ = solve([7] * 8, 1, 8)
    assert result.rows == 8 and result.status == "certified"


def test_oversize_atom_stands_alone_and_counts_one_cell():
    result, _ = solve([21, 3, 4], 1, 20)
    assert result.rows == 2 and [0] in result.cells and result.certificate["cells"] == 2


def test_only_oversize_atoms():
    result, _ = solve([30, 40], 2, 20)
    assert result.rows == 1 and result.status == "certified"


def test_length_equal_to_the_cap_is_fine():
    result, _ = solve([20, 20], 1, 20)
    assert result.rows == 2


def test_nine_samples_over_four_ranks_leave_no_rank_empty():
    _, counts = solve([5] * 9, 4, 100)
    assert sorted(counts) == [2, 2, 2, 3]


def test_three_samples_on_four_ranks_need_one_dummy():
    with pytest.raises(Infeasible, match=r"needs 1 dummy sample$") as caught:
        solve([1, 1, 1], 4, 10)
    assert caught.value.dummy_samples == 1


def test_three_samples_two_ranks_in_two_rows_need_one_dummy():
    with pytest.raises(Infeasible, match=r"needs 1 dummy sample$"):
        solve([1, 1, 1], 2, 10, row_multiple=2)


def test_two_samples_a_cell_and_even_rows():
    result, counts = solve([1] * 5, 2, 10, max_samples_per_cell=2, row_multiple=2)
    assert result.rows == 2 and sorted(map(len, result.cells)) == [1, 1, 1, 2]
    assert sorted(counts) == [2, 3]


def test_206_samples_differ_by_at_most_one_per_rank():
    lengths = np.random.default_rng(3).integers(1, 60, 206)
    _, counts = solve(lengths, 4, 300)
    assert max(counts) - min(counts) <= 1


def test_206_samples_cannot_be_dealt_equally_to_four_ranks():
    with pytest.raises(Infeasible, match=r"needs 2 dummy samples$"):
        solve([5] * 206, 4, 100, equal_samples_per_rank=True)


def test_rank_token_sums_of_four_and_six_caps_still_give_equal_rows():
    result, _ = solve([10] * 4 + [5, 5] * 3 + [9] * 3, 2, 10)
    assert result.rows == 5 and all(result.cells)


def test_group_above_the_sample_limit_is_refused():
    with pytest.raises(Infeasible, match="atomic group 1 holds 5 samples"):
        solve([3, 3], 1, 10, samples=[2, 5], max_samples_per_cell=4)


def test_too_few_rank_groups_name_the_dummies():
    with pytest.raises(Infeasible, match="needs 4 dummy samples"):
        solve([3] * 8, 4, 10, rank_groups=[0] * 4 + [1] * 4)


def test_rank_groups_stay_on_one_rank():
    lengths = np.random.default_rng(1).integers(1, 40, 64)
    for equal in (False, True):
        solve(lengths, 4, 100, rank_groups=np.arange(64) // 8, equal_samples_per_rank=equal)


def test_equal_counts_in_a_tight_window():
    lengths = np.random.default_rng(5).integers(200, 5000, 256)
    result, _ = solve(lengths, 8, 8192, equal_samples_per_rank=True)
    assert result.status == "certified"


def test_512_samples_at_97_percent_of_64_cells():
    rng = np.random.default_rng(11)
    lengths = np.clip(rng.lognormal(np.log(1000), 0.9, 512), 1, 8192).astype(np.int64)
    cap = int(lengths.sum() / 64 / 0.97) + 1
    result, counts = solve(np.minimum(lengths, cap), 16, cap)
    assert result.rows == 4 and result.status == "certified"
    assert max(counts) - min(counts) <= 1


def test_order_of_samples_does_not_change_the_rows():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 500, 200)
    assert solve(lengths, 4, 700)[0].rows == solve(rng.permutation(lengths), 4, 700)[0].rows


def test_same_seed_same_layout():
    problem = make(np.random.default_rng(4).integers(1, 500, 120), 4, 650)
    assert solve_rows(problem, time_limit_s=0).cells == solve_rows(problem, time_limit_s=0).cells


def test_ffd_baseline_is_feasible_and_never_better():
    rng = np.random.default_rng(6)
    for constraints in ({}, {"max_samples_per_cell": 4}, {"row_multiple": 3}, {"equal_samples_per_rank": True}):
        problem = make(rng.integers(1, 500, 120), 4, 800, **constraints)
        cells = ffd_rows(problem)
        rows = len(cells) // 4
        check_cells(problem, cells, rows)
        assert rows >= solve_rows(problem).rows


def test_extra_seeds_are_feasible_and_differ():
    problem = make(np.random.default_rng(7).integers(1, 500, 120), 4, 800)
    rows = solve_rows(problem).rows + 1
    found = [pack_into(problem, rows, seed=seed) for seed in range(6)]
    for cells in found:
        check_cells(problem, cells, rows)
    assert len({str(cells) for cells in found}) > 3
    assert pack_into(problem, 1, seed=0) is None
    assert pack_into(problem, 31, seed=0) is None


def test_sample_limit_and_cap_together_are_certified():
    # Neither 60 / 3 samples nor the volume sees that a long sample takes the place of three.
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(150), 1.0, 60), 1, 500).astype(np.int64)
    problem = make(lengths, 2, 500, max_samples_per_cell=3)
    result = solve_rows(problem, time_limit_s=5.0)
    check_cells(problem, result.cells, result.rows)
    check_certificate(problem, result)
    assert result.status == "certified"


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(6, 14),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_never_below_the_optimum_and_certified_means_equal(tokens, num_ranks, cap, limit, min_rows, row_multiple):
    problem = make(
        [min(t, cap) for t in tokens],
        num_ranks,
        cap,
        max_samples_per_cell=limit,
        min_rows=min_rows,
        row_multiple=row_multiple,
    )
    truth = least_rows(problem)
    try:
        result = solve_rows(problem)
    except Infeasible as error:
        assert truth is None and error.dummy_samples > 0
        return
    check_cells(problem, result.cells, result.rows)
    check_certificate(problem, result)
    assert truth is not None and result.lower_bound <= truth <= result.rows


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_and_equal_counts_hold_whatever_the_sizes(data):
    n = data.draw(st.integers(4, 24))
    num_ranks = data.draw(st.integers(1, 4))
    tokens = data.draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    samples = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    problem = make(
        tokens,
        num_ranks,
        30,
        samples=samples,
        max_samples_per_cell=data.draw(st.sampled_from([None, 3, 5])),
        equal_samples_per_rank=data.draw(st.booleans()),
        rank_groups=data.draw(st.sampled_from([None, [i // 3 for i in range(n)]])),
    )
    try:
        result = solve_rows(problem)
    except Infeasible:
        return
    check_cells(problem, result.cells, result.rows)
    check_certificate(problem, result)
