"""Two-level placement: nodes, and routing groups that stay whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput, TopologyError
from routepack_opt.models.grouped_placement import group_slots, solve_group_placement, solve_node_placement
from routepack_opt.models.placement import rank_loads, solve_placement


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8, 16]))
@settings(max_examples=40, deadline=None)
def test_16_experts_in_4_groups_router_row_mode_keeps_groups_whole(seed, num_ranks):
    load = np.random.default_rng(seed).integers(0, 100, (2, 16))
    result = solve_group_placement(load, num_ranks, 4)
    slots = group_slots(result.rank_of, num_ranks, 4)
    assert (np.sort(slots, axis=1) == np.arange(16)).all()
    assert (slots // (16 // num_ranks) == result.rank_of).all()
    for group in range(4):
        assert len(set((slots[0] // 4)[group * 4 : group * 4 + 4])) == 1
    assert (result.bound <= result.reached).all()
    assert (result.reached == rank_loads(load, result.rank_of, num_ranks).max(axis=1)).all()
    assert (result.reached >= solve_placement(load, num_ranks).bound).all()


def test_group_placement_is_optimal_for_two_experts_a_rank():
    load = np.array([[9, 1, 5, 4, 7, 7, 1, 1]])
    result = solve_group_placement(load, 4, 2)
    best = max(
        min(max(g[a] + g[b], g[c] + g[d]) for a, b, c, d in itertools.permutations(range(4)))
        for g in load.reshape(2, 4)
    )
    assert result.reached[0] == result.bound[0] == best


def test_dispatcher_mode_may_tear_groups_and_router_row_mode_says_so():
    load = np.array([[8, 8, 8, 8, 1, 1, 1, 1]])
    torn = solve_placement(load, 2).rank_of
    with pytest.raises(InvalidInput, match="routing group 0 does not keep a block"):
        group_slots(torn, 2, 2)


def test_groups_and_ranks_that_do_not_divide_are_refused():
    with pytest.raises(TopologyError, match="3 routing groups and 2 EP ranks"):
        solve_group_placement(np.ones((1, 12), dtype=np.int64), 2, 3)


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_nodes_hold_whole_groups_and_are_level(seed, num_groups):
    load = np.random.default_rng(seed).integers(0, 100, (2, 16))
    result = solve_node_placement(load, 4, 2, num_groups=num_groups)
    node = result.rank_of // 2
    if num_groups:
        size = 16 // num_groups
        assert (node.reshape(2, num_groups, size) == node.reshape(2, num_groups, size)[:, :, :1]).all()
    assert (np.bincount(node[0]) == 8).all()
    assert (np.bincount(result.rank_of[0]) == 4).all()
    assert (result.reached >= result.bound).all()
    again = solve_node_placement(load, 4, 2, num_groups=num_groups, standing=result.rank_of)
    assert (again.reached <= result.reached).all()


def test_uniform_load_moves_nothing_between_or_inside_nodes():
    load = np.full((2, 16), 7)
    standing = np.arange(16)[::-1][None].repeat(2, axis=0) // 4
    assert (solve_node_placement(load, 4, 2, standing=standing).rank_of == standing).all()
    identity = np.arange(16)[None].repeat(2, axis=0) // 4
    assert (solve_group_placement(load, 4, 4).rank_of == identity).all()
