"""Window: validation at the door, identity, files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import Window
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import write_npz

if TYPE_CHECKING:
    from pathlib import Path

ONES = np.ones((2, 1, 3), dtype=int)


@pytest.mark.parametrize(
    ("lengths", "demand", "message"),
    [
        ([], np.zeros((0, 1, 3)), "lengths: the window has no samples"),
        ([1, 0], ONES, r"lengths\[1\]: 0 is below 1"),
        ([1, -5], ONES, r"lengths\[1\]: -5 is below 1"),
        ([1, 2**31], ONES, r"lengths\[1\]: 2147483648 is above 2147483647"),
        ([1.0, 2.5], ONES, r"lengths\[1\]: 2.5 is not an exact integer"),
        ([1.0, np.nan], ONES, r"lengths\[1\]: not a finite number"),
        ([[1, 2]], ONES, "lengths: expected 1 dimension"),
        (["a", "b"], ONES, "lengths: expected integers"),
        ([True, False], ONES, "lengths: expected integers"),
        ([1, 2, 3], ONES, "demand: has 2 samples but lengths has 3"),
        ([1, 2], np.ones((2, 3)), "demand: expected 3 dimensions"),
        ([1, 2], np.ones((2, 0, 3)), "no layers or no experts"),
        ([1, 2], np.ones((2, 1, 0)), "no layers or no experts"),
        ([1, 2], -ONES, r"demand\[0,0,0\]: -1 is below 0"),
        ([1, 2], ONES * 2**31, r"demand\[0,0,0\]: 2147483648 is above"),
        ([1, 2], [[[1, 2]], [[1]]], "demand: not a rectangular array"),
        ([1, 2**70], ONES, "lengths"),
    ],
)
def test_wrong_values_are_named_with_their_index(lengths: Any, demand: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Window(lengths, demand)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"sample_ids": ["a"]}, "sample_ids: 1 names for 2 samples"),
        ({"group_ids": [1, 2, 3]}, "group_ids: 3 entries, expected 2"),
        ({"group_ids": [0.5, 1]}, r"group_ids\[0\]"),
        ({"moe_layers": [1, 2]}, "moe_layers: 2 entries, expected 1"),
        ({"top_k": 0}, "top_k: 0 is below 1"),
        ({"counts": "guessed"}, "counts: 'guessed' is unknown"),
    ],
)
def test_wrong_extras_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Window([1, 2], ONES, **extra)


def test_integers_of_any_width_are_counted_not_wrapped() -> None:
    for dtype in (np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64):
        window = Window(np.array([3, 200], dtype=dtype), (ONES * 200).astype(dtype))
        assert window.lengths.dtype == np.int64
        assert window.demand.dtype == np.int32
        assert window.lengths.tolist() == [3, 200]
        assert window.total_load.tolist() == [[400, 400, 400]]


def test_samples_and_layers_without_demand_are_legal() -> None:
    window = Window([5, 6], np.zeros((2, 3, 4), dtype=int))
    assert (window.num_samples, window.num_layers, window.num_experts) == (2, 3, 4)
    assert window.total_load.sum() == 0


def test_loads_are_summed_in_64_bits() -> None:
    window = Window([1] * 8, np.full((8, 1, 2), 2**31 - 1))
    assert window.total_load.dtype == np.int64
    assert window.total_load.tolist() == [[8 * (2**31 - 1)] * 2]


def test_the_identity_is_the_documented_digest() -> None:
    rng = np.random.default_rng(0)
    lengths, demand = rng.integers(1, 9, 600), rng.integers(0, 9, (600, 2, 3))
    expected = hashlib.sha256(lengths.astype("<i8").tobytes() + demand.astype("<i4").tobytes()).hexdigest()
    assert Window(lengths, demand).sha256 == expected
    assert Window(lengths[::-1], demand).sha256 != expected
    strided = np.zeros((600, 2, 6), dtype=int)
    strided[:, :, ::2] = demand
    assert Window(lengths, strided[:, :, ::2]).sha256 == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    num_samples, num_layers, num_experts = (data.draw(st.integers(1, 5)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)
    window = Window(
        rng.integers(1, 2**31, num_samples),
        rng.integers(0, 2**31, (num_samples, num_layers, num_experts)),
        sample_ids=data.draw(st.none() | st.lists(names, min_size=num_samples, max_size=num_samples)),
        group_ids=data.draw(
            st.none() | st.lists(st.integers(-(2**62), 2**62), min_size=num_samples, max_size=num_samples)
        ),
        moe_layers=data.draw(st.none() | st.just(list(range(3, 3 + num_layers)))),
        top_k=data.draw(st.none() | st.integers(1, 9)),
        counts=data.draw(st.sampled_from(["recorded", "predicted"])),
        meta=data.draw(st.dictionaries(names, st.integers() | names | st.none(), max_size=3)),
    )
    path = tmp_path_factory.mktemp("window") / "w.npz"
    window.save(path)
    again = Window.load(path)
    assert again.sha256 == window.sha256
    for name in ("lengths", "demand", "group_ids", "moe_layers"):
        before, after = getattr(window, name), getattr(again, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)
    assert (again.sample_ids, again.top_k, again.counts) == (window.sample_ids, window.top_k, window.counts)
    assert again.meta == window.meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": np.array("routepack.window/9")}, "field 'format': found 'routepack.window/9'"),
        ({"lengths": None}, "field 'lengths' is missing"),
        ({"demand": None}, "field 'demand' is missing"),
        ({"lengths": np.array([1.0, 2.0])}, "field 'lengths': dtype float64"),
        ({"lengths": np.array([1, 0])}, r"field lengths\[1\]: 0 is below 1"),
        ({"demand": -ONES}, r"field demand\[0,0,0\]"),
        ({"top_k": np.array([1, 2])}, "field 'top_k'"),
        ({"sample_ids": np.array([1, 2])}, "field 'sample_ids'"),
        ({"meta": np.array("[1]")}, "field 'meta'"),
        ({"meta": np.array("{")}, "field 'meta'"),
    ],
)
def test_wrong_files_name_the_file_and_the_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {
        "format": np.array("routepack.window/1"), "lengths": np.array([1, 2]), "demand": ONES, "meta": np.array("{}"),
        **change,
    }  # fmt: skip
    path = tmp_path / "w.npz"
    write_npz(path, {name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(FormatError, match=message) as caught:
        Window.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 4
