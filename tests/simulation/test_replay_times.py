"""Replay: kernel times add up to the cost model where kernels cost what it says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_time_cases import CAP, COST, FormulaTimer, small_plan, small_shape, small_window

import routepack_opt as rp
from routepack_opt.cost import row_shard_costs, score_of
from routepack_opt.errors import FormatError, InvalidInput, TopologyError
from routepack_opt.simulation.kernel_shape import gqa_shape, model_kernel_shape, scaled, synth_shape
from routepack_opt.simulation.layouts import Layout, comparison_layouts, plan_layout
from routepack_opt.simulation.measurements import measurements_json, read_measurements, sweep_kernels
from routepack_opt.simulation.replay import replay
from routepack_opt.simulation.timing import Measured, measure, spread_layers
from routepack_opt.simulation.work import AttentionKernel, ExpertKernel, layout_work, slot_counts
from routepack_opt.synth import PRESETS


def replay_formula(window: rp.Window, layouts: list[Layout], cost: rp.CostModel, **options: object):
    """One layer's attention costs a share of the stage, so that all layers cost the whole of it."""
    stage = cost.stages[0]
    layers = window.num_layers
    timer = FormulaTimer(stage.alpha / layers, stage.beta / layers, float(cost.expert_weight))
    return replay(window, layouts, small_shape(layers), timer, repeats=2, **options)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(4, 2, 2), (4, 4, 1), (2, 2, 1), (6, 4, 3)]))
def test_replay_of_the_formula_is_the_exact_evaluator(seed: int, sizes: tuple[int, int, int]) -> None:
    window = small_window(seed)
    dp, ep, shards = sizes
    rng = np.random.default_rng(seed)
    order = rng.permutation(window.num_samples)
    cells = [[sorted(part.tolist()) for part in np.array_split(half, dp)] for half in np.array_split(order, 2)]
    slots = np.stack([rng.permutation(window.num_experts) for _ in range(window.num_layers)])
    topology = rp.Topology(dp=dp, ep=ep, shards=shards)
    cost = rp.CostModel((rp.Stage("full", 3.0, 6.0),))  # multiples of L and powers of two: exact in binary
    result = replay_formula(window, [Layout("random", topology, cells, slots)], cost)
    expected = row_shard_costs(window, cells, slots, topology, CAP, cost)
    (step,) = result.step_times
    np.testing.assert_array_equal(step.costs_s, expected)
    assert step.step_s == score_of(expected, "shard").slowest_shard


def test_row_sync_waits_for_the_slowest_shard_of_every_row() -> None:
    window = small_window()
    plan = small_plan(window)
    result = replay_formula(window, [plan_layout(plan, window, "plan")], COST, sync="row")
    costs = result.step_times[0].costs_s
    assert result.step_times[0].step_s == pytest.approx(costs.max(axis=1).sum())


def test_every_distinct_kernel_is_run_once_a_round() -> None:
    window = small_window()
    layout = plan_layout(small_plan(window), window, "plan")
    timer = FormulaTimer(1.0, 1.0)
    result = replay(window, [layout, layout], small_shape(), timer, repeats=3, warmup=1)
    assert len(timer.calls) == 4 * len(result.measured)
    assert set(timer.calls) == set(result.measured)
    first, second = result.step_times
    assert first.step_s == second.step_s


def test_slots_get_the_demand_of_their_experts() -> None:
    window = small_window()
    layout = plan_layout(small_plan(window), window, "plan")
    counts = slot_counts(window, layout)
    assert counts.sum() == window.demand.sum()
    r, g, layer, expert = 0, 1, 2, 5
    samples = [i for d in layout.topology.shards[g] for i in layout.cells[r][d]]
    slot = layout.logical_to_slot[layer, expert]
    assert counts[r, g, layer, slot] == window.demand[samples, layer, expert].sum()


def test_sampled_layers_are_scaled_and_said() -> None:
    window = small_window(num_layers=6)
    layout = plan_layout(small_plan(window), window, "plan")
    timer = FormulaTimer(1.0, 1.0)
    result = replay(window, [layout], small_shape(6), timer, layers=[1, 4])
    whole = replay(window, [layout], small_shape(6), timer)
    work = layout_work(window, layout, [1, 4])
    assert result.step_times[0].num_measured_layers == 2
    assert any("2 of 6 MoE layers" in note for note in result.notes)
    assert not whole.notes
    peaks = [max(k.tokens for k in layer) for layer in work.expert_kernels[0][0]]
    assert result.step_times[0].experts_s[0, 0] == pytest.approx(3 * sum(peaks) / CAP)


def test_a_time_budget_of_nothing_takes_one_layer() -> None:
    window = small_window(num_layers=6)
    layout = plan_layout(small_plan(window), window, "plan")
    result = replay(window, [layout], small_shape(6), FormulaTimer(1.0, 1.0), budget_s=0.0)
    assert result.step_times[0].num_measured_layers == 1
    assert any("rounds" in note for note in result.notes)
    assert all(len(m.runs_s) == 1 for m in result.measured.values())


def test_a_time_budget_that_cannot_be_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    window = small_window()
    layout = plan_layout(small_plan(window), window, "plan")
    ticks = iter(range(0, 1000, 108))
    monkeypatch.setattr("routepack_opt.simulation.replay.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    result = replay(window, [layout], small_shape(), FormulaTimer(1.0, 1.0), budget_s=3.0)
    assert "time budget: 108 s instead of 3; attention and one MoE layer take so long" in result.notes


@given(st.integers(1, 60), st.integers(1, 80))
def test_spread_layers_are_distinct_and_in_range(num_layers: int, count: int) -> None:
    layers = spread_layers(num_layers, count)
    assert layers == sorted(set(layers))
    assert len(layers) == min(num_layers, count)
    assert layers[0] >= 0 and layers[-1] < num_layers


def test_measure_shuffles_rounds_and_drops_the_warmup() -> None:
    kernels = [ExpertKernel((k,)) for k in range(20)]
    order: list[ExpertKernel] = []

    class Counting:
        def time_s(self, kernel: ExpertKernel) -> float:
            order.append(kernel)
            return float(len(order))

    result = measure(kernels, Counting(), repeats=2, warmup=1, seed=3)
    assert all(min(m.runs_s) > 20 and len(m.runs_s) == 2 for m in result.values())
    assert order[:20] != order[20:40]
    assert sorted(order[:20], key=lambda k: k.counts) == kernels


def test_median_and_minimum() -> None:
    runs = Measured((3.0, 1.0, 2.0))
    assert runs.value_s("median") == 2.0
    assert runs.value_s("min") == 1.0


def test_baseline_and_reorder_keep_experts_at_home() -> None:
    window = small_window()
    plan = small_plan(window)
    baseline, reorder = comparison_layouts(plan, window, budget_s=0.05)
    home = np.tile(np.arange(window.num_experts), (window.num_layers, 1))
    for layout in (baseline, reorder):
        np.testing.assert_array_equal(layout.logical_to_slot, home)
        assert sorted(i for row in layout.cells for cell in row for i in cell) == list(range(window.num_samples))
    scores = [rp.score(window, one.cells, home, plan.topology, CAP, COST).slowest_shard for one in (baseline, reorder)]
    assert len(reorder.cells) < len(baseline.cells) or scores[1] <= scores[0]


def test_a_plan_of_another_window_is_refused() -> None:
    plan = small_plan(small_window(0))
    with pytest.raises(InvalidInput, match="another window"):
        plan_layout(plan, small_window(1), "plan", "plan.json")
    with pytest.raises(InvalidInput, match="samples, layers, experts"):
        plan_layout(plan, small_window(0, num_layers=2), "plan", "plan.json")


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3", "hybrid-kda-mla", "gpt-oss-120b", "mixtral-8x7b"])
def test_kernel_sizes_agree_with_the_cost_of_the_model(model: str) -> None:
    kernels = {stage.name: stage for stage in model_kernel_shape(model).cost(8192).stages}
    stages = rp.CostModel.for_model(model, token_cap=8192).stages
    assert set(kernels) == {stage.name for stage in stages}
    for stage in stages:  # projections are rounded to whole columns
        assert kernels[stage.name].alpha == pytest.approx(stage.alpha, rel=0.01)
        assert kernels[stage.name].beta == pytest.approx(stage.beta, rel=1e-9)


def test_synthetic_presets_have_about_the_published_parameters() -> None:
    for name, total in (("tiny", 7.9e9), ("flash", 124e9)):
        preset = PRESETS[name]
        shape = synth_shape(preset)
        experts = preset.num_layers * preset.num_experts * shape.expert_parameters
        assert experts == pytest.approx(total, rel=0.1)


def test_scaled_sizes_stay_usable() -> None:
    shape = scaled(model_kernel_shape("qwen3-30b-a3b"), 0.05)
    (block,) = shape.blocks
    assert block.num_heads % block.num_kv_heads == 0
    assert shape.hidden % 8 == 0 and shape.expert_width >= 8
    assert scaled(shape, 1.0) is shape
    for wrong in (0.0, -1.0, 2.0):
        with pytest.raises(InvalidInput, match="scale"):
            scaled(shape, wrong)


def test_scaling_with_lengths_keeps_the_proportions_of_a_step() -> None:
    whole = synth_shape(PRESETS["tiny"])
    small = scaled(whole, 0.125)
    cells = (8192, 8192 * 1000), (1024, 1024 * 125)  # lengths at an eighth too
    parts = [
        shape.attention_madds(shape.blocks[0], *cell) / (8 * cell[0] * shape.expert_parameters)
        for shape, cell in zip((whole, small), cells, strict=True)
    ]
    assert parts[0] == pytest.approx(parts[1], rel=1e-9)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(InvalidInput, match="head_dim"):
        gqa_shape("x", hidden=8, expert_width=8, heads=1, head_dim=0, num_layers=1)


def test_ep_that_does_not_divide_is_refused() -> None:
    window = small_window()
    layout = Layout("x", rp.Topology(dp=3, ep=3), [[[0], [1], [2]]], np.tile(np.arange(8), (3, 1)))
    with pytest.raises(TopologyError, match="do not divide"):
        layout_work(window, layout)


def test_measurements_survive_the_file(tmp_path) -> None:
    window = small_window()
    layout = plan_layout(small_plan(window), window, "plan")
    extra = sweep_kernels(1, CAP, 4, 100)
    result = replay(window, [layout], small_shape(), FormulaTimer(1.0, 2.0), extra=extra)
    assert set(extra) <= set(result.measured)
    about = {"device": "formula", "dtype": "float64", "backward": True, "date": "2026-11-29"}
    value = measurements_json(
        result.measured, small_shape(), num_moe_layers=3, token_cap=CAP, statistic="median", about=about
    )
    rp.files.write_json(tmp_path / "m.json", value)
    read = read_measurements(tmp_path / "m.json")
    assert read.token_cap == CAP and read.backward and (read.hidden, read.expert_width) == (16, 16)
    assert len(read.experts) + len(read.attention["full"]) == len(result.measured)
    assert read.block_layers == {"full": 3.0}
    for change, word in (
        ({"format": "x"}, "format"),
        ({"backward": None}, "backward"),
        ({"token_cap": 0}, "token_cap"),
        ({"experts": [{"tokens": 1, "active": 1, "seconds": -1.0}]}, r"experts\[0\].seconds"),
        ({"attention": [{"block": "nope"}]}, r"attention\[0\].block"),
        ({"attention": 3}, "attention"),
        ({"shape": None}, "shape"),
    ):
        rp.files.write_json(tmp_path / "bad.json", {**value, **change})
        with pytest.raises(FormatError, match=word):
            read_measurements(tmp_path / "bad.json")


def test_sweep_covers_sizes_and_numbers_of_active_experts() -> None:
    kernels = sweep_kernels(2, 64, 4, 80)
    attention = [k for k in kernels if isinstance(k, AttentionKernel)]
    experts = [k for k in kernels if isinstance(k, ExpertKernel)]
    assert {k.block for k in attention} == {0, 1}
    assert max(k.tokens for k in attention) == 64
    assert {k.num_active for k in experts} == {1, 2, 4}
    assert all(len(k.counts) == 4 for k in experts)
