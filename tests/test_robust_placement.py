"""Placement over several windows: mean + z sigma."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.models.placement import solve_placement
from routepack_opt.models.robust_placement import rank_risk, solve_robust_placement


@given(st.integers(0, 2**32 - 1), st.floats(0, 4))
@settings(max_examples=40, deadline=None)
def test_search_agrees_with_the_exact_evaluator_and_is_never_worse_than_the_mean_placement(seed, z):
    windows = np.random.default_rng(seed).integers(0, 100, (5, 2, 8))
    result = solve_robust_placement(windows, 4, num_sigmas=z)
    assert (np.bincount(result.rank_of[0]) == 2).all()
    assert rank_risk(windows, result.rank_of, 4, z).max(axis=1) == pytest.approx(result.reached)
    mean_only = solve_placement(windows.sum(axis=0), 4).rank_of
    assert (result.reached <= rank_risk(windows, mean_only, 4, z).max(axis=1) * (1 + 1e-9)).all()
    assert (result.bound <= result.reached * (1 + 1e-9)).all()


def test_experts_that_rise_together_are_kept_apart():
    windows = np.array([[[10, 10, 0, 0]], [[0, 0, 10, 10]]])  # 0 and 1 are hot together, then 2 and 3
    rank_of = solve_robust_placement(windows, 2, num_sigmas=2).rank_of[0]
    assert rank_of[0] != rank_of[1] and rank_of[2] != rank_of[3]


def test_small_cases_reach_the_brute_force_optimum():
    for seed in range(10):
        windows = np.random.default_rng(seed).integers(0, 100, (3, 1, 6))
        best = min(
            rank_risk(windows, np.array([p]), 3, 1.0).max() for p in set(itertools.permutations([0, 0, 1, 1, 2, 2]))
        )
        assert solve_robust_placement(windows, 3).reached[0] == pytest.approx(best)


def test_bad_windows_are_refused():
    with pytest.raises(InvalidInput, match="num_sigmas"):
        solve_robust_placement(np.ones((2, 1, 4), dtype=int), 2, num_sigmas=float("nan"))
    with pytest.raises(InvalidInput, match=r"windows\[0,0,1\]: -1"):
        solve_robust_placement(np.array([[[1, -1]]]), 2)
