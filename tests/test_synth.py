"""Synthetic windows: what top-k routing allows, determinism, and the published figures the presets imitate."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.cost import CostModel, rank_loads
from routepack_opt.errors import InvalidInput
from routepack_opt.synth import PRESETS, synth
from routepack_opt.synth.generate import _capped_shares
from routepack_opt.window import Window

SMALL = replace(PRESETS["flash"], name="small", num_layers=3, num_experts=16, top_k=4, num_samples=16)


def lpt_placement(window, num_ranks):
    """The paper's placement: experts by falling load, each to the open rank with the smallest load."""
    num_layers, num_experts = window.total_load.shape
    per_rank = num_experts // num_ranks
    placement = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer, loads in enumerate(window.total_load.tolist()):
        rank_load, used = [0] * num_ranks, [0] * num_ranks
        for expert in sorted(range(num_experts), key=lambda e: (-loads[e], e)):
            rank = min((p for p in range(num_ranks) if used[p] < per_rank), key=lambda p: (rank_load[p], p))
            placement[layer, expert] = rank * per_rank + used[rank]
            used[rank] += 1
            rank_load[rank] += loads[expert]
    return placement


def first_fit_decreasing(lengths, dp, cap):
    """Descending lengths into the first of R*D cells that fits, smallest R that works, dealt in order."""
    for rows in range(-(-int(lengths.sum()) // (dp * cap)), len(lengths) + 1):
        cells, used = [[] for _ in range(rows * dp)], np.zeros(rows * dp, dtype=np.int64)
        for sample in np.argsort(-lengths, kind="stable"):
            fits = np.flatnonzero(used + lengths[sample] <= cap)
            if not fits.size:
                break
            cells[fits[0]].append(int(sample))
            used[fits[0]] += lengths[sample]
        else:
            return [cells[r * dp : (r + 1) * dp] for r in range(rows)]
    raise AssertionError("a sample is longer than the cap")


def rank_cv(window, placement, num_ranks):
    """Mean over layers of population std_p / mean_p of the window's EP-rank loads."""
    by_slot = np.take_along_axis(window.total_load, np.argsort(placement, axis=1), axis=1)
    ranks = by_slot.reshape(window.num_layers, num_ranks, -1).sum(axis=2)
    return float((ranks.std(axis=1) / ranks.mean(axis=1)).mean())


def eta_ep(window, preset):
    """sum_{r,l} max_g mean_p W / sum_{r,l} max_{g,p} W after LPT and FFD, with the number of rows."""
    cells = first_fit_decreasing(window.lengths, preset.dp, preset.token_cap)
    loads = rank_loads(window, cells, lpt_placement(window, preset.ep), preset.topology)
    return float(loads.mean(axis=3).max(axis=1).sum() / loads.max(axis=(1, 3)).sum()), len(cells)


def identity(window):
    return np.tile(np.arange(window.num_experts), (window.num_layers, 1))


@pytest.mark.parametrize(("name", "cv", "eta", "rows"), [("tiny", 0.47, 0.891, 8), ("flash", 0.29, 0.844, 4)])
def test_paper_figures(name, cv, eta, rows):
    preset = PRESETS[name]
    windows = [synth(name, seed=seed) for seed in range(4)]
    found = [rank_cv(window, identity(window), preset.ep) for window in windows]
    assert np.mean(found) == pytest.approx(cv, rel=0.05)
    assert found == pytest.approx([cv] * len(found), rel=0.1)
    for window in windows:
        assert window.num_samples == 512
        assert rank_cv(window, lpt_placement(window, preset.ep), preset.ep) < 0.002
    measured = [eta_ep(window, preset) for window in windows]
    assert {found for _, found in measured} == {rows}
    assert np.mean([value for value, _ in measured]) == pytest.approx(eta, abs=0.015)
    assert [value for value, _ in measured] == pytest.approx([eta] * len(measured), abs=0.03)


def test_flash_needs_nearly_all_of_four_rows():
    preset = PRESETS["flash"]
    for seed in range(4):
        fill = synth("flash", seed=seed).lengths.sum() / (4 * preset.dp * preset.token_cap)
        assert 0.96 <= fill <= 0.98


def test_v3_expert_counts_look_like_real_decode_counts():
    load = synth("v3").total_load
    assert load.shape == (58, 256)
    mean = load.mean(axis=1)
    assert 5.6 <= (load.max(axis=1) / mean).mean() <= 8.1
    assert 0.73 <= (load.std(axis=1) / mean).mean() <= 1.07


@pytest.mark.data
def test_v3_counts_against_real_ones(data_dir):
    found = []
    for path in sorted((data_dir / "loads").glob("*.json")):
        counts = np.array(json.loads(path.read_text())["logical_count"])
        counts = counts[counts.sum(axis=1) > 0]
        found.append([(counts.max(axis=1) / counts.mean(axis=1)).mean(), rank_cv_of(counts, 8)])
    low, high = np.min(found, axis=0), np.max(found, axis=0)
    load = synth("v3", num_samples=128).total_load
    ours = [(load.max(axis=1) / load.mean(axis=1)).mean(), rank_cv_of(load, 8)]
    assert (low <= ours).all()
    assert (ours <= high).all()


def rank_cv_of(load, num_ranks):
    ranks = load.reshape(load.shape[0], num_ranks, -1).sum(axis=2)
    return float((ranks.std(axis=1) / ranks.mean(axis=1)).mean())


@pytest.mark.parametrize("name", ["tiny", "flash", "qwen3-30b"])
def test_short_lengths_follow_published_statistics(name):
    windows = [synth(name, seed=seed) for seed in range(3)]
    prompt = PRESETS[name].prompt_tokens
    lengths = np.concatenate([window.lengths for window in windows])
    assert 755 <= np.percentile(lengths - prompt, 75) <= 1130
    assert 0.75 <= np.log(np.maximum(lengths - prompt, 1)).std() <= 1.25


def test_long_answers_average_half_the_cap():
    window = synth("qwen3-30b-long")
    assert window.demand.shape == (256, 48, 128)
    assert 0.45 <= window.lengths.mean() / 32768 <= 0.5
    assert window.lengths.max() == 32768


def test_siblings_share_length_and_routing():
    window = synth("flash")
    logs = np.log(window.lengths)
    assert between_groups(logs[:, None], window.group_ids) > 0.4
    share = window.demand[:, 0].astype(float) / np.maximum(window.demand[:, 0].sum(axis=1, keepdims=True), 1)
    assert between_groups(share, window.group_ids) > 0.4


def between_groups(values, group_ids):
    """Share of the variance that lies between prompts (1/8 for independent samples)."""
    means = np.array([values[group_ids == g].mean(axis=0) for g in np.unique(group_ids)])
    return float(means.var(axis=0).sum() / values.var(axis=0).sum())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_plans_as_recommended(name):
    preset = PRESETS[name]
    window = synth(name, num_samples=24)
    assert window.meta["synth"]["preset"] == name
    assert {key: window.meta["synth"][key] for key in ("dp", "ep", "shards", "token_cap")} == {
        "dp": preset.dp, "ep": preset.ep, "shards": preset.shards, "token_cap": preset.token_cap,
    }  # fmt: skip
    assert CostModel.from_json(window.meta["synth"]["cost"]) == preset.cost
    assert preset.topology.num_shards == preset.shards
    assert preset.topology.experts_per_rank(window.num_experts) >= 1
    assert window.lengths.max() <= preset.token_cap
    assert_routable(window, preset.top_k)


def test_hybrid_cost_of_flash():
    linear, full = PRESETS["flash"].cost.stages
    assert (linear.alpha, linear.beta) == (3.5 * 24, 0.0)
    assert (full.alpha, full.beta) == pytest.approx((0.5 * 24, 7e-4 * 8192 * 24 / 8))
    assert PRESETS["tiny"].cost == CostModel.default(24, 8192)


def assert_routable(window, top_k):
    rows = window.lengths - 1
    assert window.top_k == top_k
    assert (window.demand >= 0).all()
    assert (window.demand <= rows[:, None, None]).all()
    assert (window.demand.sum(axis=2) == top_k * rows[:, None]).all()


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    top_k=st.integers(1, 15),
    mean_length=st.sampled_from([1.0, 2.5, 300.0, 8192.0]),
    concentration=st.sampled_from([0.01, 0.3, 50.0]),
)
def test_demand_is_what_top_k_routing_can_produce(count, seed, top_k, mean_length, concentration):
    skew = dict.fromkeys(("expert_concentration", "prompt_concentration", "sample_concentration"), concentration)
    preset = replace(SMALL, top_k=top_k, mean_length=mean_length, prompt_tokens=0.5 * mean_length, **skew)
    window = synth(preset, num_samples=count, seed=seed)
    assert window.num_samples == count
    assert_routable(window, top_k)
    assert (window.group_ids == np.arange(count) // 8).all()


def test_same_seed_same_window_other_seed_other_window():
    first, again, other = synth(SMALL, seed=3), synth(SMALL, seed=3), synth(SMALL, seed=4)
    assert first.sha256 == again.sha256
    assert first.sha256 != other.sha256
    assert (first.lengths != other.lengths).any()


def test_windows_of_a_preset_come_from_one_model():
    first, other = synth("flash", seed=0).total_load[0], synth("flash", seed=1).total_load[0]
    assert np.corrcoef(first, other)[0, 1] > 0.7


def test_larger_n_keeps_eight_samples_a_prompt():
    window = synth(SMALL, num_samples=200)
    assert (np.bincount(window.group_ids) == 8).all()
    assert window.lengths.mean() == pytest.approx(SMALL.mean_length, rel=0.01)


def test_saved_window_is_the_same(tmp_path):
    window = synth(SMALL)
    window.save(tmp_path / "w.npz")
    loaded = Window.load(tmp_path / "w.npz")
    assert loaded.sha256 == window.sha256
    assert loaded.meta == window.meta


def test_capped_shares_sum_to_one_below_the_cap():
    weights = np.array([[100.0, 50.0, 1.0, 1.0, 1e-30, 0.0], [1.0] * 6, [0.0] * 6])
    shares = _capped_shares(weights, 3)
    assert shares.sum(axis=1) == pytest.approx(1.0)
    assert (shares <= 1 / 3).all()
    assert (shares > 0).all()
    assert shares[1] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flush",), "preset: 'flush' is unknown; expected one of tiny, flash"),
        (("flash", 0), "num_samples: 0 is not a whole number >= 1"),
        (("flash", 2.5), "num_samples: 2.5"),
        (("flash", 8, -1), "seed: -1 is not a whole number >= 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        synth(*arguments)


@pytest.mark.parametrize(
    "change", [{"top_k": 16}, {"mean_length": 0.5}, {"mean_length": 9000.0}, {"prompt_tokens": 2e3}, {"num_layers": 0}]
)
def test_bad_presets_are_refused(change):
    with pytest.raises(InvalidInput, match=next(iter(change))):
        replace(SMALL, **change)
