"""count_experts and the kernel behind it: equal to naive counting, never wrapping an id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack_opt as rp
from routepack_opt.errors import InvalidInput
from routepack_opt.routes import IngestReport, window_from_routes

DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)


def naive(routes: np.ndarray, num_experts: int) -> np.ndarray:
    rows = routes.astype(object)
    counts = np.zeros((routes.shape[1], num_experts), dtype=np.int32)
    for row, layer, k in np.ndindex(routes.shape):
        if rows[row, layer, k] != -1:
            counts[layer, rows[row, layer, k]] += 1
    return counts


def random_routes(rng: np.random.Generator, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """Distinct ids per (row, layer); never all zero in a layer because top_k > 1 ids differ."""
    return rng.random((rows, layers, experts)).argsort(axis=2)[:, :, :top_k]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_counts_equal_naive_counting(dtype: type, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 100))
    top_k = data.draw(st.integers(1, min(8, experts)))
    rows, layers = data.draw(st.integers(0, 150)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    routes = random_routes(rng, rows, layers, top_k, experts).astype(dtype)
    if np.iinfo(dtype).min < 0 and data.draw(st.booleans()):
        routes[rng.random((rows, layers)) < 0.2] = -1
    assert (rp.count_experts(routes, experts) == naive(routes, experts)).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.int64, np.uint32, np.uint64])
def test_id_300_of_384_experts_is_counted_exactly(dtype: type) -> None:
    counts = rp.count_experts(np.array([[[300, 1]], [[300, 44]]], dtype=dtype), 384)
    assert counts[0, 300] == 2
    assert counts[0, 44] == 1
    assert counts.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_a_dtype_too_narrow_for_384_experts_is_rejected(dtype: type) -> None:
    wrapped = np.array([[[300 % 256, 1]]]).astype(dtype)
    with pytest.raises(InvalidInput, match=r"dtype u?int8 holds ids up to .* num_experts is 384"):
        rp.count_experts(wrapped, 384)


def test_256_experts_fill_uint8_exactly() -> None:
    assert rp.count_experts(np.array([[[255, 0]]], dtype=np.uint8), 256)[0, 255] == 1


@pytest.mark.parametrize("bad", [4, 5, 255, 2**40])
def test_id_of_num_experts_or_more_is_rejected(bad: int) -> None:
    with pytest.raises(
        InvalidInput, match=rf"row 1, layer 0: expert id {bad} is not below num_experts 4; physical ids\?"
    ):
        rp.count_experts(np.array([[[0, 1]], [[2, bad]]], dtype=np.int64), 4)


def test_partly_missing_and_negative_rows_are_corrupt() -> None:
    with pytest.raises(InvalidInput, match=r"row 0, layer 1: .*partly -1"):
        rp.count_experts(np.array([[[0, 1], [-1, 2]]]), 4)
    with pytest.raises(InvalidInput, match=r"row 0, layer 0: expert id -7 is negative"):
        rp.count_experts(np.array([[[-7, -7]]]), 4)


def test_wrapped_minus_one_of_unsigned_ids_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="wrapped -1"):
        rp.count_experts(np.full((1, 1, 2), 65535, dtype=np.uint16), 64)


def test_shapes_dtypes_and_layouts() -> None:
    routes = random_routes(np.random.default_rng(0), 9, 3, 2, 7)
    want = naive(routes, 7)
    for same in (np.asfortranarray(routes), routes.astype(">i4"), np.repeat(routes, 2, axis=0)[::2], routes.tolist()):
        assert (rp.count_experts(same, 7) == want).all()
    for wrong in (routes[0], routes.astype(float), routes.astype(bool), "ids", None, [[[1], [2, 3]]]):
        with pytest.raises(InvalidInput):
            rp.count_experts(wrong, 7)
    for experts in (0, -1, 1.5, True, 2**40):
        with pytest.raises(InvalidInput, match="num_experts"):
            rp.count_experts(routes, experts)


def test_torch_tensors_of_every_integer_type() -> None:
    torch = pytest.importorskip("torch")
    routes = random_routes(np.random.default_rng(1), 5, 2, 3, 9)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16):
        tensor = torch.from_numpy(routes.astype(str(dtype).removeprefix("torch.")))
        assert (rp.count_experts(tensor, 9) == naive(routes, 9)).all()
    with pytest.raises(InvalidInput):
        rp.count_experts(torch.ones(2, 2, 2), 9)
    with pytest.raises(InvalidInput):
        rp.count_experts(torch.ones(2, 2, 2, dtype=torch.bfloat16), 9)


def test_count_experts_with_length_drops_a_filler_row() -> None:
    routes = np.array([[[1, 2]], [[3, 0]], [[0, 0]]])
    assert rp.count_experts(routes, 4).sum() == 6
    assert (rp.count_experts(routes, 4, length=3) == rp.count_experts(routes[:2], 4)).all()
    assert (rp.count_experts(routes[:2], 4, length=13, start_len=10) == rp.count_experts(routes[:2], 4)).all()
    with pytest.raises(InvalidInput, match="start_len"):
        rp.count_experts(routes, 4, start_len=1)


def test_count_experts_selects_moe_layers() -> None:
    routes = random_routes(np.random.default_rng(2), 6, 5, 2, 4)
    assert (rp.count_experts(routes, 4, moe_layers=[1, 4]) == naive(routes, 4)[[1, 4]]).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3))
def test_windows_keep_order_whatever_the_threads(seed: int, num_samples: int, workers: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 30, num_samples)
    routes = [random_routes(rng, int(n) - 1, 2, 2, 5) for n in lengths]
    window = window_from_routes(routes, lengths, 5, max_workers=workers)
    assert (window.lengths == lengths).all()
    assert (window.demand == np.stack([naive(r, 5) for r in routes])).all()
    assert window.top_k == 2
    assert (rp.Window.from_routes(routes, lengths, 5).demand == window.demand).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, -1]))
def test_len_rows_with_filler_equal_len_minus_one_rows(seed: int, fill: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, 4)
    short = [random_routes(rng, int(n) - 1, 3, 2, 6) for n in lengths]
    full = [np.concatenate([r, np.full((1, 3, 2), fill)]) for r in short]
    report = IngestReport()
    assert (
        window_from_routes(full, lengths, 6, report=report).demand == window_from_routes(short, lengths, 6).demand
    ).all()
    assert report.num_filler_rows == 4


def test_counts_stay_exact_above_16_bits() -> None:
    routes = np.zeros((70_000, 1, 2), dtype=np.uint8)
    routes[:, :, 1] = 1
    assert rp.count_experts(routes, 2).tolist() == [[70_000, 70_000]]
