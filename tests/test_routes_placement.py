"""pad_routes and remap_routes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack_opt as rp
from routepack_opt.errors import InvalidInput


def random_placement(rng: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    return rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)


def check_pads(routes: np.ndarray, slots: np.ndarray, num_ranks: int) -> None:
    num_rows, layers, top_k = routes.shape
    experts = slots.shape[1]
    load = np.zeros((layers, num_ranks), dtype=int)
    for row in range(num_rows):
        for layer in range(layers):
            assert len(set(routes[row, layer].tolist())) == top_k
            np.add.at(load[layer], slots[layer, routes[row, layer]] // (experts // num_ranks), 1)
        assert (load.max(axis=1) - load.min(axis=1) <= 1).all()


def test_66_pad_tokens_are_spread_evenly() -> None:
    identity = np.tile(np.arange(64), (3, 1))
    check_pads(rp.pad_routes(66, 3, 6, 64, num_ranks=8), identity, 8)
    slots = random_placement(np.random.default_rng(0), 3, 64)
    check_pads(rp.pad_routes(66, 3, 6, 64, num_ranks=8, logical_to_slot=slots), slots, 8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_prefix_is_even_under_any_placement(data: st.DataObject) -> None:
    num_ranks, per_rank = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    experts = num_ranks * per_rank
    top_k, layers = data.draw(st.integers(1, min(experts, 8))), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slots = random_placement(rng, layers, experts)
    routes = rp.pad_routes(
        data.draw(st.integers(0, 40)), layers, top_k, experts, num_ranks=num_ranks, logical_to_slot=slots
    )
    check_pads(routes, slots, num_ranks)


def test_pads_of_consecutive_samples_continue() -> None:
    whole = rp.pad_routes(10, 2, 3, 8, num_ranks=4)
    parts = [rp.pad_routes(4, 2, 3, 8, num_ranks=4), rp.pad_routes(6, 2, 3, 8, num_ranks=4, first_row=4)]
    assert (whole == np.concatenate(parts)).all()
    assert rp.pad_routes(1, 2, 3, 8, num_ranks=4, dtype=np.uint8).dtype == np.uint8


def test_wrong_pads_are_refused() -> None:
    good: dict = {"num_rows": 4, "num_layers": 2, "top_k": 2, "num_experts": 8, "num_ranks": 4}
    for change in (
        {"num_rows": -1}, {"num_layers": 0}, {"top_k": 9}, {"num_ranks": 3}, {"num_experts": 0}, {"first_row": -1},
        {"dtype": float}, {"num_experts": 512, "dtype": np.uint8}, {"logical_to_slot": np.zeros((2, 8), int)},
        {"logical_to_slot": np.arange(8)[None]},
    ):  # fmt: skip
        with pytest.raises(InvalidInput):
            rp.pad_routes(**(good | change))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_remap_is_a_bijection_per_layer_no_new_duplicates(data: st.DataObject) -> None:
    experts, layers = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slots = random_placement(rng, layers, experts)
    dtype = data.draw(st.sampled_from([np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64]))
    routes = rng.integers(0, experts, (12, layers, 3)).astype(dtype)
    mapped = rp.remap_routes(routes, slots)
    assert mapped.dtype == dtype
    assert (rp.remap_routes(mapped, np.argsort(slots, axis=1)) == routes).all()
    for row, layer in np.ndindex(12, layers):
        assert len(set(mapped[row, layer].tolist())) == len(set(routes[row, layer].tolist()))
        assert mapped[row, layer].tolist() == slots[layer, routes[row, layer].astype(int)].tolist()


def test_remap_keeps_missing_rows_and_dense_layers() -> None:
    slots = np.array([[1, 0, 2], [2, 1, 0]])
    routes = np.array([[[0, 0], [0, 1], [0, 1]], [[0, 0], [-1, -1], [2, 0]]])
    mapped = rp.remap_routes(routes, slots, moe_layers=[1, 2])
    assert mapped.tolist() == [[[0, 0], [1, 0], [2, 1]], [[0, 0], [-1, -1], [0, 2]]]
    assert (rp.remap_routes(routes[:, 1:], slots, moe_layers=[1, 2]) == mapped[:, 1:]).all()


def test_remap_refuses_what_is_not_a_placement() -> None:
    routes = np.array([[[0, 1]]])
    for slots in ([[0, 0]], [[0, 2]], [0, 1], [[0, 1], [1, 0]], [[0.5, 1]]):
        with pytest.raises(InvalidInput):
            rp.remap_routes(routes, slots)
    with pytest.raises(InvalidInput, match=r"routes\[0,0,1\]: id 1"):
        rp.remap_routes(routes, [[0]])
    with pytest.raises(InvalidInput):
        rp.remap_routes(np.array([[[0, 1]]], dtype=np.uint8), [np.arange(300)])
