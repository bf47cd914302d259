"""Replication: cases of the peers, no duplicates on a rank, splits that add up."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.models.replication import check_table, keep_slots, solve_replication
from routepack_opt.models.token_split import even_split, free_split, whole_tokens

HOT = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])


@st.composite
def cases(draw):
    num_ranks = draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, 9))
    capacity = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    load = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return np.array([load], dtype=np.int64), num_ranks, capacity * num_ranks


@given(cases(), st.sampled_from(["even", "free"]))
@settings(max_examples=100, deadline=None)
def test_every_expert_has_a_slot_and_no_rank_holds_one_twice(case, split):
    load, num_ranks, num_slots = case
    result = solve_replication(load, num_ranks, num_slots, split=split)
    check_table(result.slot_expert, load.shape[1], num_ranks)
    assert result.copies.sum() == num_slots
    assert result.reached[0] >= result.bound[0] * (1 - 1e-9)
    per_expert = np.bincount(result.slot_expert[0], result.tokens[0], minlength=load.shape[1])
    assert per_expert == pytest.approx(load[0])
    whole = whole_tokens(load, result.tokens, result.slot_expert)
    assert (np.bincount(result.slot_expert[0], whole[0], minlength=load.shape[1]) == load[0]).all()
    assert (np.abs(whole - result.tokens) < 1 + 1e-6).all()
    assert (whole >= 0).all()


def test_even_split_of_the_hot_pair_example_reaches_its_optimum():
    assert solve_replication(HOT, 8, 16).reached[0] == pytest.approx(560 / 3 + 10)


def test_free_split_of_the_hot_pair_example_is_perfect():
    result = solve_replication(HOT, 8, 16, split="free")
    assert result.reached[0] == pytest.approx(181.25)
    assert result.bound[0] == 181.25


def test_one_hot_load_is_spread_over_all_ranks():
    result = solve_replication([[1000, 0, 0, 0, 0, 0, 0, 0]], 4, 16)
    assert result.reached[0] == 250


def test_256_experts_and_32_replicas_never_double_an_expert_on_a_rank():
    load = (np.random.default_rng(0).pareto(1.2, (4, 256)) * 1000).astype(np.int64)
    check_table(solve_replication(load, 32, 288).slot_expert, 256, 32)


def test_more_slots_than_expert_rank_pairs_forces_doubles():
    result = solve_replication([[30, 10]], 2, 6)
    assert result.slot_expert.tolist() == [[0, 1, 0, 0, 1, 0]]
    assert result.reached[0] == 20


def test_free_split_is_never_worse_than_even():
    load = np.random.default_rng(3).integers(0, 1000, (3, 10))
    table = solve_replication(load, 4, 16).slot_expert
    ranks = [
        part.reshape(3, 4, 4).sum(axis=2).max(axis=1) for part in (free_split(load, table, 4), even_split(load, table))
    ]
    assert (ranks[0] <= ranks[1] + 1e-6).all()


def test_keep_slots_moves_only_what_changed():
    standing = np.array([[0, 1, 2, 3, 4, 0]])
    wanted = np.array([[4, 0, 3, 1, 0, 2]])  # ranks and slots renamed, experts 1 and 3 exchanged
    kept = keep_slots(wanted, standing, 3)
    assert sorted(map(sorted, kept.reshape(3, 2).tolist())) == sorted(map(sorted, wanted.reshape(3, 2).tolist()))
    assert (kept != standing).sum() == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 0, 1, 2]], r"table\[0\]: EP rank 0 holds expert 0 twice"),
        ([[0, 1, 0, 1]], r"table\[0\]: expert 2 has no slot"),
        ([[0, 1, 2]], "3 slots do not divide over 2 ranks; the next valid number is 4"),
    ],
)
def test_a_broken_table_is_rejected(table, message):
    with pytest.raises(InvalidInput, match=message):
        check_table(table, 3, 2)


def test_too_few_slots_are_rejected():
    with pytest.raises(InvalidInput, match="6 slots cannot hold 8 experts"):
        solve_replication(HOT, 2, 6)


@pytest.mark.data
def test_real_decode_counts_with_288_slots_are_nearly_perfect(data_dir):
    counts = json.loads((data_dir / "loads" / "decode_in2000out100.json").read_text())["logical_count"]
    load = np.array(counts, dtype=np.int64)[3:]
    result = solve_replication(load, 32, 288)
    assert (result.reached / (load.sum(axis=1) / 32)).mean() <= 1.0007
    check_table(result.slot_expert, 256, 32)
