"""Column generation, its certificates, and the exact rungs above it."""

from __future__ import annotations

import gzip
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.models.rows import RowsProblem, solve_rows
from routepack_opt.solvers import bin_decision, bin_packing, bounds, pricing
from routepack_opt.solvers.bin_decision import decide, distinct_lengths
from routepack_opt.solvers.bin_exchange import exchange
from routepack_opt.solvers.bin_reduction import fix_bins
from routepack_opt.solvers.column_generation import ColumnGeneration, patterns_of
from routepack_opt.solvers.highs import cover_with_patterns
from routepack_opt.solvers.pattern_enumeration import enumerate_patterns

ITEMS = st.lists(st.integers(1, 20), min_size=1, max_size=9)


def decreasing(items):
    return -np.sort(-np.array(items, dtype=np.int64))


def least_bins(items, cap):
    """By branching: each item into every open bin or a new one."""
    best = [len(items)]

    def place(k, loads):
        if len(loads) >= best[0]:
            return
        if k == len(items):
            best[0] = len(loads)
            return
        for load in sorted(set(loads)):
            if load + items[k] <= cap:
                b = loads.index(load)
                place(k + 1, [*loads[:b], load + items[k], *loads[b + 1 :]])
        place(k + 1, [*loads, items[k]])

    place(0, [])
    return best[0]


def root_of(items, cap):
    lengths = decreasing(items)
    distinct, counts = distinct_lengths(lengths)
    types = np.searchsorted(-distinct, -lengths)
    alone = patterns_of(np.arange(lengths.size), types, distinct.size)
    return ColumnGeneration(distinct, counts, cap, alone)


def answer(items, cap, goal, seconds=2.0):
    lengths = decreasing(items)
    ones = np.ones(lengths.size, dtype=np.int64)
    deadline = time.perf_counter() + seconds
    rng = np.random.default_rng(0)
    return decide(lengths, ones, cap, goal, max_count=bin_packing.NO_LIMIT, deadline_s=deadline, rng=rng)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(20, 40), st.data())
def test_pricing_equals_enumeration(items, cap, data):
    lengths, counts = distinct_lengths(decreasing(items))
    prices = np.array(data.draw(st.lists(st.integers(0, 8), min_size=lengths.size, max_size=lengths.size))) / 8.0
    pricer = pricing.Pricer(lengths, counts, cap)
    best = bounds.knapsack_max(lengths, counts, (prices * 8).astype(np.int64), cap) / 8.0
    assert pricer.price(prices) == pytest.approx(best)
    columns = pricer.columns(prices, max_columns=50, max_use=50)
    assert (columns.num > 0) == (best > 1.0)
    for j in range(columns.num):
        span = slice(columns.starts[j], columns.starts[j + 1])
        index, copies = columns.index[span], columns.value[span]
        assert (lengths[index] * copies).sum() <= cap
        assert (copies <= counts[index]).all() and len(set(index.tolist())) == index.size
        assert (prices[index] * copies).sum() > 1.0


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(20, 40))
def test_dual_certificate_never_exceeds_the_optimum(items, cap):
    root = root_of(items, cap)
    outcome = root.generate(goal=10**6, deadline_s=time.perf_counter() + 10, max_rounds=1000)
    certificate = root.certificate()
    optimum = least_bins(decreasing(items).tolist(), cap)
    assert certificate.bins <= optimum
    assert certificate.bins >= np.ceil(root.best_bound - 1e-4)
    assert certificate.bins >= bounds.volume_bound(certificate.lengths, root.counts[::-1].copy(), cap).bins
    assert outcome.value >= root.best_bound - 1e-6


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(20, 40))
def test_fixed_bins_keep_the_optimum(items, cap):
    lengths = decreasing(items)
    fixed, left = fix_bins(lengths, cap)
    used = sorted([i for b in fixed for i in b] + left.tolist())
    assert used == list(range(lengths.size))
    assert all(lengths[b].sum() <= cap for b in fixed)
    rest = least_bins(lengths[left].tolist(), cap) if left.size else 0
    assert len(fixed) + rest == least_bins(lengths.tolist(), cap)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(20, 40))
def test_decision_is_right_on_both_sides_of_the_optimum(items, cap):
    optimum = least_bins(decreasing(items).tolist(), cap)
    packed = answer(items, cap, optimum)
    assert packed.bin_of is not None and packed.bin_of.max() < optimum
    assert np.bincount(packed.bin_of, decreasing(items)).max() <= cap
    if optimum > 1:
        refused = answer(items, cap, optimum - 1)
        assert refused.bin_of is None
        if refused.refutation is not None:
            assert refused.refutation.bins == optimum


@settings(max_examples=40, deadline=None)
@given(ITEMS, st.integers(20, 40), st.integers(0, 3))
def test_enumeration_keeps_every_pattern_a_packing_needs(items, cap, extra):
    lengths, counts = distinct_lengths(decreasing(items))
    optimum = least_bins(decreasing(items).tolist(), cap)
    goal = optimum + extra
    columns = enumerate_patterns(lengths, counts, lengths, cap, max_cell=cap, goal=goal)
    said, used = cover_with_patterns(columns, counts, goal, 10.0)
    assert said == "found" and used.sum() <= goal
    if optimum > 1:
        columns = enumerate_patterns(lengths, counts, lengths, cap, max_cell=cap, goal=optimum - 1)
        assert columns.num == 0 or cover_with_patterns(columns, counts, optimum - 1, 10.0)[0] == "impossible"


def test_column_generation_beats_every_dual_feasible_function():
    # 44 + 34 leaves room for nothing longer than 22: volume says 2, three bins are needed and only prices see it.
    items = [6, 6, 6, 5, 5, 5, 4, 4]
    cap = 14
    optimum = least_bins(items, cap)
    result = solve_rows(RowsProblem(np.array(items), np.ones(8, dtype=np.int64), 1, cap), time_limit_s=2.0)
    assert result.rows == optimum


def test_padded_lengths_are_decided_in_units_of_the_padding():
    items, cap = [64 * x for x in (7, 7, 7, 6, 6, 5, 5, 5, 3)], 64 * 14 + 63
    optimum = least_bins(decreasing(items).tolist(), cap)
    assert answer(items, cap, optimum).bin_of is not None
    refused = answer(items, cap, optimum - 1).refutation
    assert refused is None or (refused.cap == cap and set(refused.lengths.tolist()) == set(items))


def test_triplets_with_no_slack_at_all():
    rng = np.random.default_rng(3)
    items = []
    for _ in range(20):
        a, b = int(rng.integers(260, 400)), int(rng.integers(260, 330))
        items += [a, b, 1000 - a - b]
    found = answer(items, 1000, 20, seconds=20.0)
    assert found.bin_of is not None
    assert (np.bincount(found.bin_of, decreasing(items)) == 1000).all()


def test_exchange_reaches_a_goal_filling_misses():
    rng = np.random.default_rng(0)
    lengths = decreasing(np.clip(rng.lognormal(np.log(3000) - 0.18, 0.6, 256), 1, 8192).astype(np.int64))
    ones = np.ones(256, dtype=np.int64)
    goal = 93
    start = bin_packing.fill(lengths, ones, 8192, max_bins=256, goal=goal, max_count=4, rng=rng)
    assert start.max() >= goal
    found = exchange(
        lengths, ones, start, 8192, num_bins=goal, max_count=4, rng=rng, max_rounds=20, steps_per_round=200
    )
    assert found is not None and found.max() < goal
    assert np.bincount(found, lengths).max() <= 8192 and np.bincount(found).max() <= 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exchange_keeps_capacity_and_sample_limit(data):
    n = data.draw(st.integers(6, 30))
    lengths = decreasing(data.draw(st.lists(st.integers(1, 30), min_size=n, max_size=n)))
    counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)), dtype=np.int64)
    cap, limit = data.draw(st.integers(30, 50)), data.draw(st.sampled_from([3, 4, 6, bin_packing.NO_LIMIT]))
    start = bin_packing.fit(lengths, counts, cap, max_bins=n, max_count=limit)
    goal = int(start.max())  # one bin less than first fit
    rng = np.random.default_rng(0)
    found = exchange(
        lengths, counts, start, cap, num_bins=goal, max_count=limit, rng=rng, max_rounds=1, steps_per_round=60
    )
    if found is not None:
        assert found.max() < goal
        assert np.bincount(found, lengths).max() <= cap and np.bincount(found, counts).max() <= limit


def test_sample_limit_is_kept_by_the_exact_rungs():
    rng = np.random.default_rng(1)
    tokens = rng.integers(100, 3000, 200)
    problem = RowsProblem(tokens, np.ones(200, dtype=np.int64), 4, 8192, max_samples_per_cell=5)
    result = solve_rows(problem, time_limit_s=2.0)
    assert max(len(cell) for cell in result.cells) <= 5


def test_same_seed_same_work_same_packing():
    lengths = decreasing(np.random.default_rng(5).integers(200, 700, 90))
    ones = np.ones(90, dtype=np.int64)
    packs = [
        bin_decision.quick_pack(lengths, ones, 1000, 45, max_count=9, rng=np.random.default_rng(1), steps=100, starts=2)
        for _ in range(2)
    ]
    assert (packs[0] is None and packs[1] is None) or (packs[0] == packs[1]).all()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "step"), [("falkenauer_u", 20), ("falkenauer_t", 40), ("scholl_1", 120), ("scholl_2", 80), ("hard28", 14)]
)
def test_bpplib_never_below_the_best_known(data_dir, name, step):
    with gzip.open(data_dir / "binpacking" / f"{name}.jsonl.gz", "rt") as lines:
        cases = [json.loads(line) for line in lines][::step]
    for case in cases:
        weights = np.array(case["weights"], dtype=np.int64)
        problem = RowsProblem(weights, np.ones_like(weights), 1, int(case["capacity"]))
        result = solve_rows(problem, time_limit_s=1.0)
        assert case["best_lb"] <= result.rows
        assert result.lower_bound <= case["best_ub"]
        assert all(sum(case["weights"][i] for i in cell) <= case["capacity"] for cell in result.cells)
