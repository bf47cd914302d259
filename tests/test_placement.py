"""Placement: exact LPT, bounds against brute force, local search, standing placements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput, TopologyError
from routepack_opt.models import placement_bounds as bounds
from routepack_opt.models.moves import contiguous_ranks, num_moved
from routepack_opt.models.placement import (
    fewest_moves,
    lpt,
    placement_bounds,
    placement_summary,
    rank_loads,
    solve_placement,
)


def brute_force(load: np.ndarray, num_ranks: int) -> int:
    """Smallest largest rank load of one layer, by branching over the rank of the lowest expert left."""
    capacity = len(load) // num_ranks

    def best(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        head, tail = left[0], left[1:]
        value = None
        for mates in itertools.combinations(tail, capacity - 1):
            own = int(load[head]) + sum(int(load[m]) for m in mates)
            rest = best(tuple(e for e in tail if e not in mates))
            value = max(own, rest) if value is None else min(value, max(own, rest))
        return value

    return best(tuple(range(len(load))))


def reference_lpt(load: np.ndarray, num_ranks: int) -> list[int]:
    capacity = len(load) // num_ranks
    rank_load, count, rank_of = [0] * num_ranks, [0] * num_ranks, [0] * len(load)
    for e in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        p = min((p for p in range(num_ranks) if count[p] < capacity), key=lambda p: (rank_load[p], p))
        rank_of[e], rank_load[p], count[p] = p, rank_load[p] + int(load[e]), count[p] + 1
    return rank_of


shapes = st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (3, 3), (1, 4), (4, 1)])


@st.composite
def layers(draw, high=60):
    capacity, num_ranks = draw(shapes)
    values = st.one_of(st.integers(0, high), st.integers(0, 3))
    load = draw(st.lists(values, min_size=capacity * num_ranks, max_size=capacity * num_ranks))
    return np.array([load], dtype=np.int64), num_ranks


@given(layers())
@settings(max_examples=150, deadline=None)
def test_bounds_never_exceed_the_optimum_and_search_never_undercuts_it(layer):
    load, num_ranks = layer
    optimum = brute_force(load[0], num_ranks)
    bound, kind = placement_bounds(load, num_ranks)
    assert bound[0] <= optimum
    result = solve_placement(load, num_ranks)
    assert optimum <= result.reached[0] == rank_loads(load, result.rank_of, num_ranks).max()
    assert (np.bincount(result.rank_of[0], minlength=num_ranks) == load.shape[1] // num_ranks).all()
    if load.shape[1] == 2 * num_ranks:
        assert bound[0] == optimum, "pairing is exact for two experts a rank"
    assert kind[0] in bounds.KINDS


@given(layers())
@settings(max_examples=100, deadline=None)
def test_lpt_is_exactly_the_papers(layer):
    load, num_ranks = layer
    assert lpt(load, num_ranks)[0].tolist() == reference_lpt(load[0], num_ranks)


@given(layers(high=2**50), st.integers(0, 10), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_max_moved_is_kept_and_the_standing_placement_is_never_made_worse(layer, shift, share):
    load, num_ranks = layer
    standing = np.roll(contiguous_ranks(1, load.shape[1], num_ranks), shift, axis=1)
    result = solve_placement(load, num_ranks, standing=standing, max_moved=share)
    assert num_moved(result.rank_of, standing)[0] <= share * load.shape[1] + 1e-9
    assert result.reached[0] <= rank_loads(load, standing, num_ranks).max()
    assert result.reached[0] == rank_loads(load, result.rank_of, num_ranks).max()


def test_cardinality_bound_sees_one_expert_too_many():
    falling = np.array([[10, 10, 10, 1, 1, 1]], dtype=np.int64)
    assert bounds.cardinality_bound(falling, 2)[0] == 21
    assert placement_bounds(falling, 2)[0][0] == 21


def test_hot_pigeonhole_bound_sees_two_hot_ones_that_cannot_both_sit_alone():
    falling = np.array([[20, 20, 20, 20, 5, 5, 5, 5, 5, 5, 5, 5]], dtype=np.int64)
    assert bounds.hot_pigeonhole_bound(falling, 4)[0] == 30
    falling = np.array([[10, 9, 6, 5, 4, 4]], dtype=np.int64)
    assert bounds.hot_pigeonhole_bound(falling, 3)[0] == brute_force(falling[0], 3) == 14


@pytest.mark.parametrize("row", [[0] * 8, [7] * 8])
def test_all_zero_or_uniform_layer_moves_no_expert(row):
    load = np.array([row], dtype=np.int64)
    result = solve_placement(load, 4)
    assert (result.rank_of == contiguous_ranks(1, 8, 4)).all()
    standing = contiguous_ranks(1, 8, 4)[:, [3, 1, 2, 0, 7, 5, 6, 4]]
    assert (solve_placement(load, 4, standing=standing).rank_of == standing).all()


@pytest.mark.parametrize(
    ("value", "message"), [(float("nan"), r"load\[0, 2\]: nan"), (-1, r"load\[0,2\]: -1 is below 0"), (1.5, "float64")]
)
def test_nan_negative_and_float_loads_are_rejected(value, message):
    with pytest.raises(InvalidInput, match=message):
        solve_placement(np.array([[1, 2, value, 4]]), 2)


def test_experts_that_do_not_divide_over_ranks_name_the_next_valid_count():
    with pytest.raises(TopologyError, match=r"E = 256 .* P = 3 .* next valid P is 4"):
        solve_placement(np.ones((1, 256), dtype=np.int64), 3)


def test_a_standing_placement_with_a_crowded_rank_is_rejected():
    with pytest.raises(InvalidInput, match=r"standing\[0\]: EP rank 0 holds 3 experts; expected 2"):
        solve_placement(np.ones((1, 4), dtype=np.int64), 2, standing=[[0, 0, 0, 1]])


def test_same_input_and_seed_give_the_same_placement():
    load = np.random.default_rng(0).integers(0, 1000, (6, 32))
    one, two = solve_placement(load, 8, seed=3), solve_placement(load, 8, seed=3)
    assert (one.rank_of == two.rank_of).all()


def test_fewest_moves_stops_at_the_wanted_balance_and_moves_less_than_a_full_solve():
    load = (np.random.default_rng(1).pareto(1.5, (8, 64)) * 1000).astype(np.int64).clip(0, 15000)
    standing = contiguous_ranks(8, 64, 8)
    near = fewest_moves(load, 8, standing, within=0.05)
    assert (near.reached <= near.bound * 1.05).all()
    assert num_moved(near.rank_of, standing).mean() < 0.5 * num_moved(solve_placement(load, 8).rank_of, standing).mean()
    again = fewest_moves(load, 8, near.rank_of, within=0.05)
    assert (again.rank_of == near.rank_of).all(), "a layer within the wanted balance stays as it is"


def test_more_moves_never_balance_worse_on_average():
    load = (np.random.default_rng(2).pareto(1.5, (8, 64)) * 1000).astype(np.int64).clip(0, 15000)
    reached = [solve_placement(load, 8, max_moved=share).reached.sum() for share in (0.0, 0.1, 0.2, 0.4, 1.0)]
    assert reached == sorted(reached, reverse=True)
    assert reached[0] == rank_loads(load, contiguous_ranks(8, 64, 8), 8).max(axis=1).sum()


@pytest.mark.data
def test_real_decode_counts_are_balanced_to_the_proved_bound(data_dir):
    import json

    counts = np.array(
        json.loads((data_dir / "loads" / "decode_in2000out100.json").read_text())["logical_count"], dtype=np.int64
    )
    load = counts[counts.sum(axis=1) > 0]
    result = solve_placement(load, 32)
    mean = load.sum(axis=1) / 32
    assert (result.reached / mean).mean() <= 1.0577
    assert ((result.reached - result.bound) / result.bound).mean() <= 2e-4
    near = fewest_moves(load, 32, contiguous_ranks(58, 256, 32), within=0.01)
    assert (near.reached <= near.bound * 1.01).mean() > 0.95
    assert num_moved(near.rank_of, contiguous_ranks(58, 256, 32)).mean() <= 0.2 * 256


@pytest.mark.data
def test_makespan_optima_are_never_undercut_and_nearly_always_reached(data_dir):
    import gzip
    import json

    misses = total = 0
    for name in ("frangioni", "schreiber"):
        with gzip.open(data_dir / "makespan" / f"{name}.jsonl.gz", "rt") as lines:
            for line in lines:
                case = json.loads(line)
                weights, m, opt = case["p"], case["m"], case["opt"]
                if opt is None or len(weights) % m or len(weights) // m < 4 or len(weights) > 320:
                    continue
                result = solve_placement([weights], m)
                assert result.reached[0] >= opt
                total += 1
                misses += result.reached[0] > opt * 1.0005
    assert misses <= 0.05 * total


@given(layers(high=2**40))
@settings(max_examples=100, deadline=None)
def test_the_checker_proves_the_same_bounds(layer):
    from routepack_opt.verify.placement import rank_load_bound

    load, num_ranks = layer
    assert placement_bounds(load, num_ranks)[0][0] == rank_load_bound(load[0].tolist(), num_ranks)


def test_two_experts_a_rank_are_paired_optimally():
    load = np.random.default_rng(5).integers(0, 1000, (4, 64))
    result = solve_placement(load, 32)
    assert (result.reached == result.bound).all()


def test_summary_averages_loaded_layers_only():
    load = np.array([[0, 0, 0, 0], [6, 2, 2, 2]])
    result = solve_placement(load, 2)
    moved = num_moved(result.rank_of, contiguous_ranks(2, 4, 2))
    summary = placement_summary(load, 2, result.reached, result.bound, result.kind, moved)
    assert summary["max_over_mean"] == summary["bound_over_mean"] == 8 / 6
    assert summary["gap"] == summary["moved"] == 0
    assert summary["layers"][0]["max_over_mean"] == 1.0
    assert summary["layers"][1]["kind"] == "largest"


@pytest.mark.parametrize("load", [None, 3, "a", [[1], [1, 2]], [], [[]], [1, 2]])
def test_loads_that_are_no_table_are_refused(load):
    with pytest.raises(InvalidInput, match="load"):
        solve_placement(load, 1)
