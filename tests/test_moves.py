"""Moves: relabelling is optimal, slots are kept where experts stay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import (
    contiguous_ranks,
    list_transfers,
    num_moved,
    relabel_ranks,
    schedule_moves,
    slots_from_ranks,
    transfer_seconds,
)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 3), (2, 3), (3, 4), (4, 2)]))
@settings(max_examples=60, deadline=None)
def test_relabelling_moves_the_fewest_experts_of_all_rank_permutations(seed, shape):
    capacity, num_ranks = shape
    rng = np.random.default_rng(seed)
    standing = contiguous_ranks(1, capacity * num_ranks, num_ranks)
    rank_of = rng.permuted(standing, axis=1)
    relabelled = relabel_ranks(rank_of, standing, num_ranks)
    best = min(int(num_moved(np.array(p)[rank_of], standing)[0]) for p in itertools.permutations(range(num_ranks)))
    assert num_moved(relabelled, standing)[0] == best
    same_group = rank_of[0][:, None] == rank_of[0]
    assert (same_group == (relabelled[0][:, None] == relabelled[0])).all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_slots_are_a_permutation_on_the_right_rank_and_kept_by_experts_that_stay(seed):
    rng = np.random.default_rng(seed)
    standing_slots = rng.permuted(np.tile(np.arange(12), (3, 1)), axis=1)
    rank_of = rng.permuted(contiguous_ranks(3, 12, 4), axis=1)
    slots = slots_from_ranks(rank_of, 4, standing_slots)
    assert (np.sort(slots, axis=1) == np.arange(12)).all()
    assert (slots // 3 == rank_of).all()
    stays = standing_slots // 3 == rank_of
    assert (slots[stays] == standing_slots[stays]).all()


def test_identity_ranks_give_identity_slots():
    assert slots_from_ranks(contiguous_ranks(2, 8, 4), 4).tolist() == [list(range(8))] * 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_rounds_are_conflict_free_and_as_few_as_the_busiest_rank_needs(seed, num_ranks, count):
    rng = np.random.default_rng(seed)
    transfers = np.concatenate(
        [np.arange(2 * count).reshape(-1, 2), rng.integers(0, num_ranks, (count, 2))], axis=1
    ).astype(np.int64)
    rounds = schedule_moves(transfers, num_ranks)
    for part in rounds:
        assert len(set(part[:, 2])) == len(part) == len(set(part[:, 3]))
    assert sorted(map(tuple, np.concatenate([transfers[:0], *rounds]))) == sorted(map(tuple, transfers))
    if count:
        assert len(rounds) == max(np.bincount(transfers[:, 2]).max(), np.bincount(transfers[:, 3]).max())


def test_transfers_name_layer_expert_source_and_target():
    standing = contiguous_ranks(2, 4, 2)
    rank_of = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    assert list_transfers(rank_of, standing).tolist() == [[1, 1, 0, 1], [1, 2, 1, 0]]


def test_transfer_times_follow_the_layer_and_the_link():
    transfers = np.array([[0, 5, 0, 1], [1, 6, 1, 0], [1, 7, 1, 1]])
    links = np.array([[1.0, 2.0], [4.0, 8.0]])
    assert transfer_seconds(transfers, [16.0, 32.0], links).tolist() == [8.0, 8.0, 4.0]
    assert transfer_seconds(transfers, 16, 4.0).tolist() == [4.0] * 3
    assert transfer_seconds(transfers[:0], 16, 4.0).tolist() == []


@pytest.mark.parametrize(
    ("sizes", "links", "named"),
    [
        (0.0, 1.0, "expert_bytes"),
        ([1.0], 1.0, "expert_bytes"),
        (1.0, [[1.0]], "bytes_per_s"),
        (1.0, -1.0, "bytes_per_s"),
    ],
)
def test_sizes_and_bandwidths_that_do_not_fit_are_refused(sizes, links, named):
    with pytest.raises(InvalidInput, match=named):
        transfer_seconds(np.array([[1, 0, 1, 0]]), sizes, links)


def test_long_transfers_share_rounds():
    # ranks 0 and 1 each send a short and a long expert; in table order every round would hold a long one
    transfers = np.array([[0, 0, 0, 2], [1, 1, 0, 3], [1, 2, 1, 2], [0, 3, 1, 3]])
    seconds = transfer_seconds(transfers, [1.0, 10.0], 1.0)
    rounds = schedule_moves(transfers, 4, seconds=seconds)
    times = [max(seconds[np.flatnonzero((transfers == row).all(axis=1))[0]] for row in part) for part in rounds]
    assert sorted(times) == [1.0, 10.0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_times_change_the_order_of_rounds_not_their_number(seed):
    rng = np.random.default_rng(seed)
    transfers = np.concatenate([np.arange(60).reshape(-1, 2), rng.integers(0, 5, (30, 2))], axis=1)
    rounds = schedule_moves(transfers, 5, seconds=rng.uniform(1.0, 9.0, 30))
    assert len(rounds) == len(schedule_moves(transfers, 5))
    for part in rounds:
        assert len(set(part[:, 2])) == len(part) == len(set(part[:, 3]))
