"""Simulate: traffic is conserved, links only ever help, and a step adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_time_cases import CAP, small_plan, small_shape, small_window

import routepack_opt as rp
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.simulation.cluster import Cluster, load_cluster
from routepack_opt.simulation.layouts import Layout, plan_layout
from routepack_opt.simulation.simulate import Assumptions, pipeline_seconds, simulate, simulated_json
from routepack_opt.simulation.step_model import StepModel
from routepack_opt.simulation.traffic import (
    dispatch_counts,
    exchange_seconds,
    gpu_bytes,
    moved_traffic,
    shard_gpus,
)

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = Cluster("test", 1e12, 1e11, 1e10, 1e9, 1e-6, 2)
SHEET = """
gpu: {mem_bw: 1000, mem_bw_empirical_scaling_factor: 0.8, bfloat16_tc_flops: 5000}
node: {num_gpus_per_node: 4, inter_node_bw: 10, intra_node_bw: 100, p2p_latency: 0.5}
"""


def layout_of(window: rp.Window, dp: int = 4, ep: int = 2, shards: int = 2) -> Layout:
    return plan_layout(small_plan(window, dp=dp, ep=ep, shards=shards), window, "plan")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([(4, 2, 2), (4, 4, 1), (2, 4, 1), (8, 4, 1), (4, 8, 1)]))
def test_bytes_in_equal_bytes_out_equal_demand(seed: int, sizes: tuple[int, int, int]) -> None:
    window = small_window(seed)
    layout = layout_of(window, *sizes)
    total = 0.0
    gpus_of = shard_gpus(layout.topology, 2)
    for gpus, counts in zip(gpus_of, dispatch_counts(window, layout), strict=True):
        assert gpus.from_dp.sum(axis=1) == pytest.approx(1.0) and gpus.to_ep.sum(axis=1) == pytest.approx(1.0)
        traffic = gpu_bytes(counts, gpus, 32.0)
        assert traffic.sum(axis=-1).sum() == pytest.approx(traffic.sum(axis=-2).sum())
        np.testing.assert_allclose(traffic.sum(axis=(-1, -2)), 32.0 * counts.sum(axis=(-1, -2)))
        total += traffic.sum()
    assert total == pytest.approx(32.0 * window.demand.sum())


def test_dispatch_is_the_demand_of_a_cell_by_rank() -> None:
    window = small_window()
    layout = layout_of(window)
    counts = dispatch_counts(window, layout)
    r, g, layer, j, p = 0, 1, 2, 1, 0
    samples = list(layout.cells[r][layout.topology.shards[g][j]])
    experts = np.flatnonzero(layout.logical_to_slot[layer] // 4 == p)
    assert counts[g][r, layer, j, p] == window.demand[samples][:, layer, experts].sum()


def test_ep_1_has_no_exchange() -> None:
    window = small_window()
    result = simulate(window, layout_of(window, dp=2, ep=1, shards=2), small_shape(), CLUSTER)
    assert result.exchanged_bytes == 0 and not result.exchange_s.any()


def test_no_traffic_takes_no_time() -> None:
    (gpus,) = shard_gpus(rp.Topology(dp=4, ep=4), 2)
    assert exchange_seconds(np.zeros((4, 4)), gpus, CLUSTER) == 0
    assert exchange_seconds(np.eye(4) * 1e12, gpus, CLUSTER) == 0


def test_the_busiest_direction_counts() -> None:
    (gpus,) = shard_gpus(rp.Topology(dp=4, ep=4), 2)
    traffic = np.zeros((4, 4))
    traffic[0, 1] = 1e10  # one second inside the node
    assert exchange_seconds(traffic, gpus, CLUSTER) == pytest.approx(1.0 + 1e-6)
    traffic[0, 2] = traffic[1, 2] = traffic[3, 2] = 1e9  # GPU 2 receives two seconds from the other node
    assert exchange_seconds(traffic, gpus, CLUSTER) == pytest.approx(2.0 + 1e-6)


@pytest.mark.parametrize("name", ["flops_per_s", "memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s"])
def test_faster_hardware_is_never_slower(name: str) -> None:
    window = small_window()
    layout = layout_of(window, dp=4, ep=4, shards=1)
    home = np.tile(np.arange(8), (3, 1))
    steps = [
        simulate(
            window,
            layout,
            small_shape(),
            replace(CLUSTER, **{name: getattr(CLUSTER, name) * factor}),
            Assumptions(reduce_gradients=True),
            standing_slots=home,
        ).step_s
        for factor in (0.01, 0.1, 1.0, 10.0)
    ]
    assert steps == sorted(steps, reverse=True)


def test_more_gpus_a_node_is_never_slower() -> None:
    window = small_window()
    layout = layout_of(window, dp=4, ep=4, shards=1)
    steps = [simulate(window, layout, small_shape(), replace(CLUSTER, gpus_per_node=n)).step_s for n in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)


def test_a_step_is_the_sum_of_its_parts() -> None:
    window = small_window()
    layout = layout_of(window)
    home = np.tile(np.arange(8), (3, 1))
    result = simulate(window, layout, small_shape(), CLUSTER, Assumptions(reduce_gradients=True), standing_slots=home)
    rows = result.attention_s + result.experts_s + result.exchange_s
    assert result.step_s == pytest.approx(rows.sum(axis=0).max() + result.moves_s + result.gradients_s)
    assert result.bubble_s == pytest.approx(0.0, abs=1e-12)
    value = simulated_json(result, 100)
    assert value["simulated"] is True and value["tokens_per_s"] == pytest.approx(100 / result.step_s)


def test_row_sync_is_never_faster() -> None:
    window = small_window()
    layout = layout_of(window)
    steps = [simulate(window, layout, small_shape(), CLUSTER, sync=sync).step_s for sync in ("shard", "row")]
    assert steps[0] <= steps[1]


def test_pipeline_bubble() -> None:
    rows = np.full(6, 4.0)
    assert pipeline_seconds(rows, 1) == 24.0
    assert pipeline_seconds(rows, 4) == pytest.approx((6 + 3) * 1.0)  # R + S - 1 slots of 4 / S seconds
    assert pipeline_seconds(np.array([1.0, 3.0]), 2) == pytest.approx(2.0 + 1.5)


def test_moved_experts_cost_their_bytes() -> None:
    window = small_window()
    layout = layout_of(window, dp=4, ep=4, shards=1)
    home = np.tile(np.arange(8), (3, 1))
    still = replace(layout, logical_to_slot=home)
    swapped = home.copy()
    swapped[1, [0, 2]] = [2, 0]  # experts 0 and 2 change places: ranks 0 and 1
    both = [
        simulate(window, replace(still, logical_to_slot=s), small_shape(), CLUSTER, standing_slots=home)
        for s in (home, swapped)
    ]
    assert both[0].moves_s == 0 and both[0].moved_bytes == 0
    expert_bytes = 14.0 * small_shape().expert_parameters
    assert both[1].moved_bytes == 2 * expert_bytes
    assert both[1].moves_s == pytest.approx(expert_bytes / CLUSTER.intra_bytes_per_s + CLUSTER.latency_s)
    hidden = simulate(
        window, replace(still, logical_to_slot=swapped), small_shape(), CLUSTER, Assumptions(overlap=1.0),
        standing_slots=home,
    )  # fmt: skip
    assert hidden.moves_s == 0 and hidden.moved_bytes == 2 * expert_bytes
    (gpus,) = shard_gpus(layout.topology, 2)
    traffic = moved_traffic(swapped // 2, home // 2, gpus, expert_bytes)
    assert traffic.sum() == 2 * expert_bytes and traffic.trace() == 0


def test_measured_times_are_used_as_they_are() -> None:
    window = small_window()
    layout = layout_of(window)
    measured = StepModel({"full": (0.0, 3.0 / CAP, 0.0)}, (0.0, 0.0, 1.0 / CAP), 16, 16, True)
    result = simulate(window, layout, small_shape(), CLUSTER, measured=measured)
    cost = rp.CostModel((rp.Stage("full", 9.0, 0.0),))
    score = rp.score(window, layout.cells, layout.logical_to_slot, layout.topology, CAP, cost)
    assert (result.attention_s + result.experts_s).sum(axis=0).max() == pytest.approx(score.slowest_shard)
    forward = simulate(window, layout, small_shape(), CLUSTER, measured=replace(measured, backward=False))
    np.testing.assert_allclose(forward.attention_s, 3 * result.attention_s)


@pytest.mark.parametrize(
    "wrong", [{"efficiency": 0.0}, {"overlap": 2.0}, {"backward": -1.0}, {"pipeline": 0}, {"state_bytes": float("nan")}]
)
def test_assumptions_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Assumptions(**wrong)


def test_sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timings").mkdir()
    path = tmp_path / "timings" / "mine.yaml"
    path.write_text(SHEET)
    expected = Cluster("mine", 5000.0, 800.0, 100.0, 10.0, 0.5, 4)
    assert load_cluster(str(path)) == expected
    monkeypatch.setenv("ROUTEPACK_DATA", str(tmp_path))
    assert load_cluster("mine") == expected
    with pytest.raises(InvalidInput, match=r"known sheet \(mine\)"):
        load_cluster("other")
    for old, new, word in (
        ("num_gpus_per_node: 4", "num_gpus_per_node: 0", "num_gpus_per_node"),
        ("inter_node_bw: 10,", "inter_node_bw: -1,", "inter_node_bw"),
        ("bfloat16_tc_flops: 5000", "bfloat16_tc_flops: .nan", "bfloat16_tc_flops"),
        ("mem_bw: 1000,", "", "mem_bw"),
        ("node:", "nodes:", "'node'"),
        ("gpu: {", "gpu: [{", "YAML"),
        (SHEET, "- 1", "'gpu' and 'node'"),
        ("mem_bw: 1000", "mem_bw: !!python/object/apply:os.system ['true']", "YAML"),
    ):
        path.write_text(SHEET.replace(old, new))
        with pytest.raises(FormatError, match=word):
            load_cluster(str(path))


@pytest.mark.data
@pytest.mark.parametrize("name", ["a100_sxm", "b200_sxm", "gb200", "h100_sxm", "h200_sxm"])
def test_published_sheets_are_read(data_dir: Path, name: str) -> None:
    cluster = load_cluster(str(data_dir / "timings" / f"{name}.yaml"))
    assert cluster.name == name and cluster.intra_bytes_per_s >= cluster.inter_bytes_per_s


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mem_bw": 10**400}, r"gpu\.mem_bw.* is not a finite number"),  # larger than any float
        ({"p2p_latency": False}, "p2p_latency"),
    ],
)
def test_numbers_a_sheet_may_not_have(tmp_path: Path, change: dict[str, object], word: str) -> None:
    values = {"bfloat16_tc_flops": 1e15, "mem_bw": 1e12, "num_gpus_per_node": 8, "intra_node_bw": 1e11}
    values |= {"inter_node_bw": 1e10, "p2p_latency": 0} | change
    gpu = {name: values.pop(name) for name in ("bfloat16_tc_flops", "mem_bw")}
    path = tmp_path / "sheet.yaml"
    path.write_text(json.dumps({"gpu": gpu, "node": values}))  # JSON is YAML
    with pytest.raises(FormatError, match=word):
        load_cluster(str(path))


def test_a_sheet_that_is_a_folder_is_not_called_yaml(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read") as caught:
        load_cluster(str(tmp_path))
    assert "YAML" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_a_step_without_end_is_refused() -> None:
    window = small_window()
    cluster = replace(CLUSTER, intra_bytes_per_s=5e-324, gpus_per_node=4)
    with pytest.raises(InvalidInput, match="not a finite time"):
        simulate(window, layout_of(window), small_shape(), cluster)


def test_more_stages_than_layers_are_refused() -> None:
    window = small_window()
    with pytest.raises(InvalidInput, match="pipeline: 4 stages for 3 layers"):
        simulate(window, layout_of(window), small_shape(), CLUSTER, Assumptions(pipeline=4))
