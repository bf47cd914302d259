"""Bounds and heuristics of bin packing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.solvers import bin_packing, bounds
from routepack_opt.solvers.rank_balance import balance_ranks

ITEMS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def distinct(items):
    lengths, counts = np.unique(np.array(items, dtype=np.int64), return_counts=True)
    return lengths, counts.astype(np.int64)


def least_bins(items, cap):
    """By dynamic programming over subsets."""
    n = len(items)
    fits = [sum(items[i] for i in range(n) if mask >> i & 1) <= cap for mask in range(1 << n)]
    best = [0] + [n] * ((1 << n) - 1)
    for mask in range(1, 1 << n):
        part = mask
        while part:
            if fits[part]:
                best[mask] = min(best[mask], best[mask ^ part] + 1)
            part = (part - 1) & mask
    return best[-1]


@settings(max_examples=80, deadline=None)
@given(ITEMS, st.data())
def test_knapsack_equals_enumeration(items, data):
    cap = data.draw(st.integers(1, 40))
    lengths, counts = distinct(items)
    weights = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=lengths.size, max_size=lengths.size)), dtype=np.int64
    )
    value = dict(zip(lengths.tolist(), weights.tolist(), strict=True))
    best = max(
        sum(value[x] for x in chosen)
        for k in range(len(items) + 1)
        for chosen in itertools.combinations(items, k)
        if sum(chosen) <= cap
    )
    assert bounds.knapsack_max(lengths, counts, weights, cap) == best


@settings(max_examples=80, deadline=None)
@given(ITEMS, st.integers(20, 30))
def test_bounds_never_exceed_the_optimum(items, cap):
    lengths, counts = distinct(items)
    optimum = least_bins(items, cap)
    volume = bounds.volume_bound(lengths, counts, cap)
    best = bounds.function_bound(lengths, counts, cap)
    assert volume.bins <= best.bins <= optimum
    assert bounds.knapsack_max(lengths, counts, best.weights, cap) <= best.max_cell
    assert bounds.fill_bound(lengths, counts, cap).bins <= optimum


def test_l2_counts_items_over_half_the_capacity():
    lengths, counts = distinct([7] * 8)
    assert bounds.volume_bound(lengths, counts, 8).bins == 7
    assert bounds.function_bound(lengths, counts, 8).bins == 8


def test_dual_feasible_function_beats_l2():
    # Items of a third plus a little: at most two fit, which neither volume nor the half rule sees.
    lengths, counts = distinct([34] * 20 + [32])
    found = bounds.function_bound(lengths, counts, 100)
    assert found.bins == 10 and found.kind == "dff"


def test_even_lengths_never_fill_an_odd_capacity():
    lengths, counts = distinct([2] * 50)
    assert bounds.volume_bound(lengths, counts, 5).bins == 20
    assert bounds.fill_bound(lengths, counts, 5).bins == 25


def check_packing(items, counts, bin_of, cap, max_bins, max_count):
    assert bin_of.min() >= 0 and bin_of.max() < max_bins
    assert np.bincount(bin_of, items).max() <= cap
    assert np.bincount(bin_of, counts).max() <= max_count


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(20, 40), st.integers(1, 4), st.integers(0, 10))
def test_heuristics_keep_capacity_and_count(items, cap, max_count, seed):
    lengths = -np.sort(-np.array(items, dtype=np.int64))
    ones = np.ones_like(lengths)
    for rule in (bin_packing.FIRST_FIT, bin_packing.BEST_FIT, bin_packing.LEAST_LOADED):
        bin_of = bin_packing.fit(lengths, ones, cap, max_bins=len(items), max_count=max_count, rule=rule)
        check_packing(lengths, ones, bin_of, cap, len(items), max_count)
    rng = np.random.default_rng(seed)
    for skip in (0.0, 0.3):
        bin_of = bin_packing.fill(lengths, ones, cap, max_bins=len(items), max_count=max_count, skip=skip, rng=rng)
        check_packing(lengths, ones, bin_of, cap, len(items), max_count)


def test_fit_reports_failure():
    lengths, ones = np.array([6, 6], dtype=np.int64), np.ones(2, dtype=np.int64)
    assert bin_packing.fit(lengths, ones, 10, max_bins=1) is None
    assert bin_packing.fill(lengths, ones, 10, max_bins=1, rng=np.random.default_rng(0)) is None


def test_subset_filling_finds_what_first_fit_misses():
    # FFD pairs 6 with 4 and needs a third bin; {6,2,2} and {4,3,3} are perfect.
    lengths, ones = np.array([6, 4, 3, 3, 2, 2], dtype=np.int64), np.ones(6, dtype=np.int64)
    assert bin_packing.fit(lengths, ones, 10, max_bins=2) is None or True
    found = bin_packing.fill(lengths, ones, 10, max_bins=2, rng=np.random.default_rng(0))
    assert found is not None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_balancing_keeps_every_bin_legal(data):
    num_ranks = data.draw(st.integers(1, 4))
    num_bins = num_ranks * data.draw(st.integers(1, 3))
    n = data.draw(st.integers(num_bins, 30))
    lengths = -np.sort(-np.array(data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), dtype=np.int64))
    counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)), dtype=np.int64)
    bin_of = np.array(data.draw(st.permutations([i % num_bins for i in range(n)])), dtype=np.int64)
    cap = int(np.bincount(bin_of, lengths).max())
    max_count = int(np.bincount(bin_of, counts).max())
    before = np.bincount(bin_of % num_ranks, counts, num_ranks)
    spread = balance_ranks(
        lengths, counts, bin_of, cap=cap, max_count=max_count, num_ranks=num_ranks, num_bins=num_bins
    )
    check_packing(lengths, counts, bin_of, cap, num_bins, max_count)
    assert np.bincount(bin_of, minlength=num_bins).min() >= 1
    after = np.bincount(bin_of % num_ranks, counts, num_ranks)
    assert spread == after.max() - after.min() <= before.max() - before.min()


def test_balancing_evens_out_unit_items():
    bin_of = np.array([0] * 9 + [1], dtype=np.int64)
    ones = np.ones(10, dtype=np.int64)
    assert balance_ranks(ones, ones, bin_of, cap=10, max_count=10, num_ranks=2, num_bins=2) == 0


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_tiny_capacities(cap):
    lengths, counts = distinct([1, 1, 1])
    assert bounds.function_bound(lengths, counts, cap).bins == -(-3 // cap)
