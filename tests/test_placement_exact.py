"""Solvers against brute force, and against one another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import brute_force

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import contiguous_ranks
from routepack_opt.models.placement import PlacementResult, placement_bounds, rank_loads, solve_placement
from routepack_opt.models.placement_exact import BACKENDS, prove_layer, prove_placement, solver_version


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.lists(st.integers(0, 40), min_size=9, max_size=9))
@settings(max_examples=12, deadline=None)
def test_solvers_agree_with_brute_force(backend, load):
    array = np.array(load, dtype=np.int64)
    proof = prove_layer(array, 3, time_limit_s=10, backend=backend)
    optimum = brute_force(array, 3)
    assert proof.optimal
    assert proof.reached == proof.bound == optimum
    assert rank_loads(array[None], proof.rank_of[None], 3).max() == optimum
    assert (np.bincount(proof.rank_of) == 3).all()


def open_layer():
    """A layer whose optimum is above every bound of the ladder."""
    rng = np.random.default_rng(0)
    while True:
        load = rng.integers(5, 30, (1, 9))
        optimum = brute_force(load[0], 3)
        if placement_bounds(load, 3)[0][0] < optimum:
            return load, optimum


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gap_is_closed_and_marked_as_the_solvers_word(backend):
    load, optimum = open_layer()
    both = np.concatenate([load, np.full((1, 9), 7)])
    result = prove_placement(both, 3, solve_placement(both, 3), time_limit_s=20, backend=backend)
    assert result.reached[0] == result.bound[0] == optimum
    assert result.kind[0] == "solver" and result.kind[1] == "mean"


def test_a_bad_incumbent_is_improved_and_no_time_changes_nothing():
    load, optimum = open_layer()
    rank_of = contiguous_ranks(1, 9, 3)
    bound, kind = placement_bounds(load, 3)
    start = PlacementResult(rank_of, rank_loads(load, rank_of, 3).max(axis=1), bound, kind)
    assert prove_placement(load, 3, start, time_limit_s=20).reached[0] == optimum
    untouched = prove_placement(load, 3, start, time_limit_s=0)
    assert (untouched.rank_of == rank_of).all() and untouched.kind == kind


def test_backends_are_named_with_their_versions():
    assert solver_version("cp-sat").startswith("ortools CP-SAT 9.")
    assert solver_version("highs").startswith("HiGHS in scipy ")
    load, _ = open_layer()
    with pytest.raises(InvalidInput, match="backend: 'x' is unknown"):
        prove_placement(load, 3, solve_placement(load, 3), time_limit_s=1, backend="x")
