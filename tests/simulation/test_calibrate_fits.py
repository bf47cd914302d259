"""Calibrate: planted parameters come back, published times give the published line, bad files one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import routepack_opt as rp
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.model_shapes import model_shape
from routepack_opt.simulation.calibrate import Calibration, LinearFit, calibrate, cost_model, fit_terms
from routepack_opt.simulation.measurements import Measurements
from routepack_opt.simulation.step_model import StepModel
from routepack_opt.simulation.timing_tables import read_kernel_grid, read_layer_csv, read_timings

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = (31e-6, 6e-6, 0.02e-6)
ATTENTION = (50e-6, 0.5e-6, 3e-10)


def planted(noise: float = 0.0, seed: int = 0, **changes: object) -> Measurements:
    rng = np.random.default_rng(seed)
    tokens, active = rng.integers(1, 60_000, 60), rng.integers(1, 17, 60)
    experts = EXPERTS[0] + EXPERTS[1] * active + EXPERTS[2] * tokens
    lengths = rng.integers(100, 8192, 40)
    squares = lengths**2 / rng.integers(1, 9, 40)
    attention = ATTENTION[0] + ATTENTION[1] * lengths + ATTENTION[2] * squares
    jitter = [1 + noise * rng.standard_normal(n) for n in (60, 40)]
    fields = {
        "source": "planted",
        "experts": np.column_stack([tokens, active, experts * jitter[0]]),
        "attention": {"full": np.column_stack([lengths, squares, attention * jitter[1]])},
        "block_layers": {"full": 24.0},
        "token_cap": 8192,
        "hidden": 64,
        "expert_width": 32,
        "backward": True,
    }
    return Measurements(**{**fields, **changes})


def test_planted_parameters_come_back() -> None:
    fits = calibrate([planted()])
    assert fits.experts is not None
    assert [fits.experts.terms[n] for n in ("constant", "active", "token")] == pytest.approx(EXPERTS, rel=1e-6)
    attention = fits.attention["full"]
    assert [attention.terms[n] for n in ("constant", "token", "square")] == pytest.approx(ATTENTION, rel=1e-6)
    assert fits.experts.r2 == pytest.approx(1.0) and fits.experts.worst_share < 1e-6


def test_noise_is_averaged_out() -> None:
    fits = calibrate([planted(0.02, seed) for seed in range(8)])
    assert fits.experts is not None and fits.experts.num_measurements == 480
    assert fits.experts.terms["token"] == pytest.approx(EXPERTS[2], rel=0.03)
    assert 0.9 < fits.experts.r2 < 1.0


def test_cost_is_in_units_of_an_assignment() -> None:
    cost = cost_model(calibrate([planted()]), 8192)
    (stage,) = cost.stages
    assert (stage.name, cost.expert_weight) == ("full", 1.0)
    assert stage.alpha == pytest.approx(24 * ATTENTION[1] / EXPERTS[2], rel=1e-6)
    assert stage.beta == pytest.approx(24 * ATTENTION[2] * 8192 / EXPERTS[2], rel=1e-6)
    # seconds of a cell and of a rank are in that proportion
    tokens, squares, load = 5000, 9_000_000, 40_000
    seconds = 24 * (ATTENTION[1] * tokens + ATTENTION[2] * squares), EXPERTS[2] * load
    scored = stage.alpha * tokens / 8192 + stage.beta * squares / 8192**2, load / 8192
    assert scored[0] / scored[1] == pytest.approx(seconds[0] / seconds[1], rel=1e-6)


def test_blocks_of_one_kind_are_one_stage() -> None:
    m = planted()
    both = planted(
        attention={"full": m.attention["full"], "full-2": m.attention["full"]},
        block_layers={"full": 24.0, "full-2": 2.0},
    )
    (stage,) = cost_model(calibrate([both]), 8192).stages
    assert stage.alpha == pytest.approx(26 * ATTENTION[1] / EXPERTS[2], rel=1e-6)


def test_terms_are_never_negative() -> None:
    features = np.array([[1.0, 10], [2, 8], [3, 6], [4, 5], [5, 1]])
    fit = fit_terms(features, np.array([1.0, 2, 3, 4, 5]), ("a", "b"), "x")
    assert min(fit.terms.values()) >= 0


def test_equal_active_experts_are_left_to_the_constant() -> None:
    m = planted()
    experts = m.experts.copy()
    experts[:, 1] = 16
    experts[:, 2] = EXPERTS[0] + 16 * EXPERTS[1] + EXPERTS[2] * experts[:, 0]
    fits = calibrate([planted(experts=experts)])
    assert fits.experts is not None and fits.experts.dropped == ("active",)
    assert fits.experts.terms["constant"] == pytest.approx(EXPERTS[0] + 16 * EXPERTS[1], rel=1e-6)
    assert any("active experts" in note for note in fits.notes)


@pytest.mark.parametrize(
    ("features", "seconds", "word"),
    [
        ([[1.0, 2], [3, 4]], [1.0, 2], "at least 3"),
        ([[1.0, 2], [1, 2], [1, 2], [3, 4]], [1.0, 2, 3, 4], "at least 3"),
        ([[1.0, 2], [2, 4], [3, 6], [4, 8]], [1.0, 2, 3, 4], "too alike"),
        ([[1.0, 2], [2, 1], [3, 5], [4, 8]], [1.0, -2, 3, 4], "negative"),
        ([[1.0, 2], [2, 1], [3, np.nan], [4, 8]], [1.0, 2, 3, 4], "finite"),
        ([[1.0, 2], [2, 1], [3, 5], [4, 8]], [1.0, np.inf, 3, 4], "finite"),
    ],
)
def test_measurements_that_cannot_be_fitted(features: list[list[float]], seconds: list[float], word: str) -> None:
    with pytest.raises(InvalidInput, match=word) as caught:
        fit_terms(np.array(features), np.array(seconds), ("token", "square"), "x")
    assert "\n" not in str(caught.value)


def test_files_that_do_not_belong_together() -> None:
    with pytest.raises(InvalidInput, match="hidden differs"):
        calibrate([planted(), planted(hidden=128)])
    with pytest.raises(InvalidInput, match="backward differs"):
        calibrate([planted(), planted(backward=False)])
    with pytest.raises(InvalidInput, match="layers in different files"):
        calibrate([planted(), planted(block_layers={"full": 12.0})])
    with pytest.raises(InvalidInput, match="none given"):
        calibrate([])


def test_cost_needs_experts_and_attention() -> None:
    only_experts = planted(attention={}, block_layers={})
    with pytest.raises(InvalidInput, match="no attention times"):
        cost_model(calibrate([only_experts]), 8192)
    stages = (rp.Stage("full", 1.0, 2.0),)
    assert cost_model(calibrate([only_experts]), 8192, stages=stages).stages == stages
    with pytest.raises(InvalidInput, match="no expert times"):
        cost_model(calibrate([planted(experts=np.zeros((0, 3)))]), 8192)
    flat = LinearFit({"constant": 1.0, "active": 0.0, "token": 0.0}, 1.0, 0.0, 0.0, 60)
    nothing = Calibration(flat, {}, {}, 1, 1, 1, True, ())
    with pytest.raises(InvalidInput, match="is 0"):
        cost_model(nothing, 8192, stages=stages)


def test_step_time_survives_the_file(tmp_path: Path) -> None:
    model = StepModel.from_calibration(calibrate([planted()]))
    rp.files.write_json(tmp_path / "s.json", model.to_json())
    assert StepModel.load(tmp_path / "s.json") == model
    model.check_sizes(64, 32, "s.json")
    with pytest.raises(InvalidInput, match="'hidden': measured at 64"):
        model.check_sizes(128, 32, "s.json")
    for change, word in (
        ({"format": 1}, "format"),
        ({"blocks": []}, "blocks"),
        ({"blocks": {"full": {"constant_s": 0, "token_s": -1, "square_s": 0}}}, "token_s"),
        ({"experts": {"constant_s": 0}}, "active_s"),
        ({"backward": 1}, "backward"),
        ({"hidden": "x"}, "hidden"),
    ):
        rp.files.write_json(tmp_path / "bad.json", {**model.to_json(), **change})
        with pytest.raises(FormatError, match=word):
            StepModel.load(tmp_path / "bad.json")


def test_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("tokens,activated_experts,time_us\n1,8,50\n2,16,60\n")
    read = read_layer_csv(path, top_k=8)
    np.testing.assert_allclose(read.experts, [[8, 8, 50e-6], [16, 16, 60e-6]])
    for text, word in (
        ("tokens,time_us\n1,2\n", "activated_experts"),
        ("tokens,activated_experts,time_us\n1,8,nan\n", "line 2, column 'time_us'"),
        ("tokens,activated_experts,time_us\n1,8,5\n1,-8,5\n", "line 3, column 'activated_experts'"),
        ("tokens,activated_experts,time_us\n1,8\n", "time_us"),
        ("", "missing"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=word):
            read_layer_csv(path)
    with pytest.raises(InvalidInput, match="suffix"):
        read_timings(tmp_path / "x.txt")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(FormatError, match="parquet"):
        read_timings(tmp_path / "x.parquet", model_shape("olmoe"))
    with pytest.raises(InvalidInput, match="--model"):
        read_timings(tmp_path / "x.parquet")


@pytest.mark.data
def test_qwen3_layer_times_give_the_published_line(data_dir: Path) -> None:
    read = read_timings(data_dir / "timings" / "qwen3_30b_a3b_rtx_pro_6000.csv")
    fit = calibrate([read]).experts
    assert fit is not None
    assert 1e6 * fit.terms["constant"] == pytest.approx(31.6, abs=0.1)
    assert 1e6 * fit.terms["active"] == pytest.approx(5.96, abs=0.01)
    assert 1e6 * fit.terms["token"] == pytest.approx(0.182, abs=0.001)
    assert fit.r2 == pytest.approx(0.984, abs=0.001)


@pytest.mark.data
def test_h200_grid_gives_whole_layers_only(data_dir: Path) -> None:
    path = data_dir / "timings" / "h200_sxm_sglang_0.5.14_moe_perf.parquet"
    read = read_kernel_grid(path, model_shape("qwen3-30b-a3b"))
    assert len(read.experts) == 27  # one row a token count: no power law, no other EP size, one dtype
    assert set(read.experts[:, 1]) <= set(range(1, 129))
    fit = calibrate([read]).experts
    assert fit is not None and fit.r2 > 0.98
    assert 1e6 * fit.terms["active"] == pytest.approx(1.87, abs=0.05)
    with pytest.raises(InvalidInput, match="no bfloat16 rows"):
        read_kernel_grid(path, model_shape("olmoe"))


HEADER = "tokens,activated_experts,time_us\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (HEADER, "holds no measurement"),
        (HEADER + "1,1,1,1\n", "line 2: more values than the 3 columns"),
        (HEADER + "1,1," + "9" * 200_000 + "\n", "line 2: not valid CSV"),
    ],
)
def test_csv_files_that_are_none(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=word):
        calibrate([read_timings(path)])


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"block": ["full"], "tokens": 1, "squares": 1, "seconds": 1}, "is not in block_layers"),
        ({"block": "full", "tokens": 10**400, "squares": 1, "seconds": 1}, r"attention\[0\]\.tokens"),
    ],
)
def test_json_values_no_python_container_or_float_takes(tmp_path: Path, entry: dict[str, object], word: str) -> None:
    path = tmp_path / "m.json"
    shape = {"shape": {"hidden": 8, "expert_width": 8}, "block_layers": {"full": 1}, "token_cap": 64}
    value = {"format": "routepack.measurements/1", "backward": True, **shape, "attention": [entry], "experts": []}
    path.write_text(json.dumps(value))
    with pytest.raises(FormatError, match=word):
        read_timings(path)
