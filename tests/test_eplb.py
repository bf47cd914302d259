"""Drop-in balancers: shapes and promises of the originals, and what they get wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput, TopologyError
from routepack_opt.integrations.eplb import (
    adopt_table,
    rebalance_experts,
    rebalance_experts_sglang,
    rebalance_experts_vllm,
)
from routepack_opt.models.replication import check_table
from routepack_opt.models.token_split import even_split

WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def rank_max(weight, table, num_ranks):
    load = even_split(np.asarray(weight), np.asarray(table))
    return load.reshape(len(load), num_ranks, -1).sum(axis=2).max(axis=1)


def check_maps(phy2log, log2phy, count, num_experts):
    for layer in range(len(phy2log)):
        for expert in range(num_experts):
            slots = [int(s) for s in log2phy[layer][expert] if s >= 0]
            assert len(slots) == count[layer][expert]
            assert all(phy2log[layer][s] == expert for s in slots)
    assert (np.asarray(count).sum(axis=1) == np.asarray(phy2log).shape[1]).all()
    assert np.asarray(log2phy).shape[2] == np.asarray(count).max()


@pytest.mark.parametrize(("groups", "nodes"), [(4, 2), (1, 1), (3, 2)])
def test_deepseek_example_shapes_dtypes_and_maps(groups, nodes):
    phy2log, log2phy, count = rebalance_experts(WEIGHT, 16, groups, nodes, 8)
    assert phy2log.shape == (2, 16) and count.shape == (2, 12)
    assert phy2log.dtype == log2phy.dtype == count.dtype == np.int64
    check_maps(phy2log, log2phy, count, 12)
    check_table(phy2log, 12, 8)


def test_torch_tensors_come_back_as_int64_cpu_tensors():
    torch = pytest.importorskip("torch")
    results = rebalance_experts(torch.tensor(WEIGHT, dtype=torch.bfloat16), 16, 4, 2, 8)
    assert all(r.dtype == torch.int64 and r.device.type == "cpu" for r in results)
    assert rebalance_experts_vllm(torch.tensor(WEIGHT), 16, 4, 2, 8).shape == (2, 16)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(16, 4, 2, 8), (12, 1, 1, 4), (24, 4, 4, 8), (12, 4, 2, 4)]))
@settings(max_examples=40, deadline=None)
def test_groups_stay_on_one_node_and_every_expert_has_a_slot(seed, shape):
    num_slots, groups, nodes, ranks = shape
    weight = np.random.default_rng(seed).integers(0, 200, (2, 12))
    phy2log, log2phy, count = rebalance_experts(weight, num_slots, groups, nodes, ranks)
    check_maps(phy2log, log2phy, count, 12)
    node = np.arange(num_slots) // (num_slots // nodes)
    for layer in range(2):
        for group in range(groups):
            on = np.isin(phy2log[layer], np.arange(group * 12 // groups, (group + 1) * 12 // groups))
            assert groups == 1 or len(set(node[on])) == 1


def test_one_hot_load_is_perfectly_spread():
    weight = [[1000, 0, 0, 0, 0, 0, 0, 0]]
    phy2log, _, _ = rebalance_experts(np.array(weight), 16, 1, 1, 4)
    assert rank_max(weight, phy2log, 4)[0] == 250


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, r"weight\[0, 1\]: nan"), (-2.0, r"weight\[0, 1\]: -2.0 is negative")]
)
def test_nan_and_negative_loads_are_rejected(value, message):
    with pytest.raises(InvalidInput, match=message):
        rebalance_experts(np.array([[1.0, value, 3.0, 4.0]]), 4, 1, 1, 2)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(TopologyError, match="num_ranks: 3 does not divide 16 slots"):
        rebalance_experts(WEIGHT, 16, 4, 1, 3)
    with pytest.raises(InvalidInput, match="8 slots cannot hold 12 experts"):
        rebalance_experts(WEIGHT, 8, 1, 1, 8)


@given(st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_fractional_loads_balance_like_whole_ones(scale, seed):
    weight = np.random.default_rng(seed).integers(1, 1000, (1, 8)) * scale
    phy2log, _, _ = rebalance_experts(weight, 8, 1, 1, 4)
    assert rank_max(weight, phy2log, 4)[0] >= weight.sum() / 4 * (1 - 1e-9)
    check_table(phy2log, 8, 4)


@pytest.mark.parametrize("num_slots", [12, 16])
@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (4, 2)])
def test_vllm_keeps_slots_and_an_unchanged_load_moves_nothing(num_slots, groups, nodes):
    first = rebalance_experts_vllm(WEIGHT, num_slots, groups, nodes, 4)
    again = rebalance_experts_vllm(WEIGHT, num_slots, groups, nodes, 4, old_global_expert_indices=first)
    assert (rank_max(WEIGHT, again, 4) <= rank_max(WEIGHT, first, 4) + 1e-9).all()
    assert (again == first).mean() > 0.9
    other = rebalance_experts_vllm(WEIGHT[:, ::-1].copy(), num_slots, groups, nodes, 4, old_global_expert_indices=first)
    fresh = rebalance_experts_vllm(WEIGHT[:, ::-1].copy(), num_slots, groups, nodes, 4)
    assert (other == first).mean() >= (fresh == first).mean()
    resized = rebalance_experts_vllm(WEIGHT, 24, groups, nodes, 4, old_global_expert_indices=first)
    assert resized.shape == (2, 24)


def test_sglang_sums_steps():
    steps = np.stack([WEIGHT, WEIGHT[:, ::-1]])
    phy2log, log2phy, count = rebalance_experts_sglang(steps, 16, 2, None, 1, "deepseek")
    check_maps(phy2log, log2phy, count, 12)
    flat = rebalance_experts_sglang(steps.sum(axis=0), 16, 2, None, 1)
    assert (flat[0] == phy2log).all()


def test_a_new_table_with_a_duplicate_expert_on_a_rank_is_rejected_and_the_standing_one_kept(caplog):
    standing = np.array([[0, 1, 2, 0]])
    assert (adopt_table([[0, 0, 1, 2]], standing, 3, 2) == standing).all()
    assert "EP rank 0 holds expert 0 twice" in caplog.text
    assert (adopt_table([[2, 1, 0, 2]], standing, 3, 2) == [[2, 1, 0, 2]]).all()


def test_same_input_same_table():
    weight = np.random.default_rng(0).integers(0, 999, (3, 32))
    assert (rebalance_experts(weight, 40, 1, 1, 8)[0] == rebalance_experts(weight, 40, 1, 1, 8)[0]).all()


def test_one_hot_half_precision_loads_are_no_overflow():
    weight = np.zeros((1, 8), dtype=np.float16)
    weight[0, 3] = 60000
    assert (rebalance_experts(weight, 8, 1, 1, 4)[2] == 1).all()
    steps = np.stack([weight] * 3)  # 180000 is beyond float16
    assert rebalance_experts_sglang(steps, 16, 4, 1, 1)[2][0, 3] == 4


def test_more_slots_than_a_nodes_ranks_can_hold_apart_are_not_refused():
    table, _, count = rebalance_experts(WEIGHT, 40, 4, 4, 8)  # 3 experts and 10 slots on the 2 ranks of a node
    assert table.shape == (2, 40) and count.min() >= 2


def test_groups_that_no_node_can_keep_are_ignored_as_in_the_original():
    assert rebalance_experts(WEIGHT, 12, 5, 2, 4)[0].shape == (2, 12)  # 5 groups on 2 nodes: one level


def test_steps_are_checked_before_they_are_summed():
    steps = np.full((3, 1, 4), 5)
    steps[0, 0, 2] = -1
    with pytest.raises(InvalidInput, match=r"\[0, 0, 2\]: -1 is negative"):
        rebalance_experts_sglang(steps, 4, 2, 1, 1)
    with pytest.raises(InvalidInput, match="scale the loads down"):
        rebalance_experts_sglang(np.full((4, 1, 4), 1 << 62), 4, 2, 1, 1)  # the sum wraps to 0
    for odd in (np.full((2, 1, 4), "a"), np.full((2, 1, 4), None), np.zeros((0, 1, 4))):
        with pytest.raises(InvalidInput):
            rebalance_experts_sglang(odd, 4, 2, 1, 1)


def test_empty_and_foreign_slots_of_the_old_table_keep_nothing():
    old = rebalance_experts_vllm(WEIGHT, 16, 1, 1, 4)
    for bad in (-1, 99):
        torn = old.copy()
        torn[0, 0] = bad
        new = rebalance_experts_vllm(WEIGHT, 16, 1, 1, 4, torn)
        assert (new != torn).sum() == 1
    for odd in ("abc", [[1], [1, 2]], np.full((2, 16), np.nan)):
        with pytest.raises(InvalidInput, match="old_global_expert_indices"):
            rebalance_experts_vllm(WEIGHT, 16, 1, 1, 4, odd)


@pytest.mark.parametrize("slots", [16.0, "16", None])
def test_slots_that_are_no_whole_number_are_one_line(slots):
    with pytest.raises(InvalidInput, match="not a whole number"):
        rebalance_experts(WEIGHT, slots, 1, 1, 4)
