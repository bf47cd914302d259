"""The rules of recorded routes, each named after what goes wrong in the wild."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.routes import IngestReport, RouteWarning, parse_layer_ranges, window_from_routes

if TYPE_CHECKING:
    from routepack_opt import Window

E = 8


def rows(num_rows: int, layers: int = 2, top_k: int = 2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((num_rows, layers, E)).argsort(axis=2)[:, :, :top_k]


def build(routes: list[np.ndarray], lengths: list[int], **kwargs: object) -> tuple[Window, IngestReport]:
    report = IngestReport()
    return window_from_routes(routes, lengths, E, report=report, **kwargs), report  # type: ignore[arg-type]


def test_three_tokens_with_two_rows_or_three_with_a_zero_last_row() -> None:
    two = rows(2)
    three = np.concatenate([two, np.zeros_like(two[:1])])
    assert (build([two], [3])[0].demand == build([three], [3])[0].demand).all()


def test_real_last_row_of_len_rows_is_counted() -> None:
    window, report = build([rows(3)], [3])
    assert window.demand.sum() == 3 * 2 * 2
    assert report.num_filler_rows == 0


def test_zero_last_row_with_top_1_is_real() -> None:
    routes = np.array([[[1]], [[0]]])
    assert build([routes], [2])[0].demand[0, 0, :2].tolist() == [1, 1]


def test_last_row_that_is_zero_in_one_layer_only_is_real() -> None:
    routes = rows(3)
    routes[-1, 0] = 0
    window, report = build([routes], [3])
    assert window.demand.sum() == 12
    assert report.num_duplicate_rows == 1


def test_61_row_dump_and_58_row_dump_give_the_same_counts() -> None:
    moe = rows(5, layers=58)
    full = np.concatenate([np.zeros((5, 3, 2), dtype=int), moe], axis=1)
    layers = list(range(3, 61))
    mapped, _ = build([full], [6], moe_layers=layers)
    plain, _ = build([moe], [6], moe_layers=layers)
    guessed, report = build([full], [6])
    for window in (mapped, plain, guessed):
        assert (window.demand == build([moe], [6])[0].demand).all()
        assert window.moe_layers is not None
        assert window.moe_layers.tolist() == layers
    assert report.dense_layers == [0, 1, 2]
    assert any("0-2 are zero in every sample" in note for note in report.notes)
    mixed, _ = build([full, moe], [6, 6], moe_layers=layers)
    assert (mixed.demand[0] == mixed.demand[1]).all()
    with pytest.raises(InvalidInput, match=r"58 layers but .* has 61"):
        build([full, moe], [6, 6])


def test_dense_layers_with_a_filler_last_row() -> None:
    full = np.concatenate([np.zeros((5, 1, 2), dtype=int), rows(5)], axis=1)
    full[-1] = 0
    window, report = build([full], [5])
    assert window.num_layers == 2
    assert window.demand.sum() == 4 * 2 * 2
    assert report.num_filler_rows == 1
    assert report.num_duplicate_rows == 0


def test_moe_layers_that_do_not_fit_the_dump() -> None:
    with pytest.raises(InvalidInput, match="expected 2 layers \\(MoE only\\) or at least 10"):
        build([rows(2, layers=3)], [3], moe_layers=[3, 9])
    for wrong in ([], [1, 1], [2, 1], [-1]):
        with pytest.raises(InvalidInput, match="moe_layers"):
            build([rows(2, layers=3)], [3], moe_layers=wrong)


def test_layer_left_out_of_moe_layers_that_carries_routes_warns() -> None:
    _, report = build([rows(2, layers=3)], [3], moe_layers=[1, 2])
    assert any("layer 0 carries routes" in text for text in report.warnings)


def test_moe_layer_zero_in_some_samples_only_is_a_recording_failure() -> None:
    broken = rows(3, seed=1)
    broken[:, 1] = 0
    with pytest.raises(InvalidInput, match=r"sample 1: MoE layer 1 is all zero here but not in routes: sample 0"):
        build([rows(3), broken], [4, 4])
    with pytest.raises(InvalidInput, match=r"MoE layer 1 is all zero"):
        build([broken, broken], [4, 4], moe_layers=[0, 1])


def test_zero_layer_with_top_1_is_no_failure() -> None:
    zero = np.zeros((3, 1, 1), dtype=int)
    window, _ = build([zero + 1, zero], [4, 4])
    assert window.demand[:, 0, :2].tolist() == [[0, 3], [3, 0]]


def test_zero_in_every_layer_of_every_sample_is_refused() -> None:
    with pytest.raises(InvalidInput, match="every layer is zero"):
        build([np.zeros((3, 2, 2), dtype=int)], [4])


def test_all_missing_row_counts_nothing_and_is_reported() -> None:
    routes = rows(4)
    routes[1] = -1
    window, report = build([routes], [5])
    assert window.demand.sum() == 3 * 2 * 2
    assert report.num_missing_rows == 1
    assert any("1 missing row (all -1)" in text for text in report.warnings)
    routes[2, 0] = -1
    _, report = build([routes], [5])
    assert report.num_missing_rows == 2
    assert any("some layers only" in text for text in report.warnings)


def test_all_missing_last_row_is_filler() -> None:
    routes = rows(3)
    routes[-1] = -1
    _, report = build([routes], [3])
    assert (report.num_filler_rows, report.num_missing_rows) == (1, 0)


def test_partly_missing_row_is_corrupt() -> None:
    routes = rows(4)
    routes[2, 1, 0] = -1
    with pytest.raises(InvalidInput, match=r"sample 0: row 2, layer 1: .*partly -1"):
        build([routes], [5])


def test_id_equal_to_num_experts_asks_for_physical_ids() -> None:
    routes = rows(4)
    routes[3, 0, 1] = E
    with pytest.raises(InvalidInput, match=r"sample 1: row 3, layer 0: expert id 8 .*physical ids\?"):
        build([rows(4), routes], [5, 5])


def test_first_wrong_sample_is_named_whatever_comes_later() -> None:
    bad = rows(4)
    bad[0, 0, 0] = 99
    with pytest.raises(InvalidInput, match="sample 1: row 0"):
        build([rows(4), bad, rows(4, layers=3), rows(2)], [5, 5, 5, 9])


def test_duplicate_id_in_a_token_warns() -> None:
    routes = rows(4)
    routes[2, 1] = 5
    _, report = build([routes], [5])
    assert report.num_duplicate_rows == 1
    assert any("sample 0: row 2, layer 1" in text for text in report.warnings)
    with pytest.warns(RouteWarning, match="duplicate ids"):
        window_from_routes([routes], [5], E)


def test_more_rows_than_tokens_is_an_error() -> None:
    with pytest.raises(InvalidInput, match=r"4 route rows for 3 tokens, more rows than tokens; expected 2 or 3"):
        build([rows(4)], [3])


def test_fewer_rows_need_an_explicit_start() -> None:
    with pytest.raises(InvalidInput, match=r"2 route rows for 9 tokens; expected 8 or 9, fewer .* start_len"):
        build([rows(2)], [9])
    window, report = build([rows(2)], [9], start_lens=[6])
    assert window.lengths.tolist() == [9]
    assert report.num_unrecorded_tokens == 6
    assert build([rows(3)], [9], start_lens=[6])[0].demand.sum() == 12
    with pytest.raises(InvalidInput, match="from start_len 5; expected 3 or 4"):
        build([rows(2)], [9], start_lens=[5])
    with pytest.raises(InvalidInput, match="start_len 9 is not below length 9"):
        build([rows(2)], [9], start_lens=[9])


def test_sample_of_one_token_without_rows() -> None:
    window, _ = build([rows(0), rows(2)], [1, 3])
    assert window.demand[0].sum() == 0
    only_filler, report = build([np.zeros((1, 2, 2), dtype=int)], [1])
    assert only_filler.demand.sum() == 0
    assert any("no route was counted" in text for text in report.warnings)


def test_top_k_must_agree() -> None:
    with pytest.raises(InvalidInput, match=r"sample 1: top_k 3 but .* has 2"):
        build([rows(2), rows(2, top_k=3)], [3, 3])


def test_wrong_counts_of_samples_and_lengths() -> None:
    for lengths in ([3, 3], [0], [2.5]):
        with pytest.raises(InvalidInput, match="lengths"):
            build([rows(2)], lengths)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no samples"):
        build([], [])


def test_a_single_expert_has_no_dense_layers() -> None:
    window = window_from_routes([np.zeros((3, 2, 1), dtype=int)], [4], 1)
    assert window.demand.tolist() == [[[3], [3]]]


def test_layer_ranges() -> None:
    assert parse_layer_ranges("3-5,8") == [3, 4, 5, 8]
    for wrong in ("", "a", "5-3", "1,1", "-1", "1-", "0-99999999", "³"):
        with pytest.raises(InvalidInput, match="moe_layers"):
            parse_layer_ranges(wrong)
