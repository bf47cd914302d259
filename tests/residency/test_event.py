"""Event-level simulator: conservation laws, lower bounds, causal order, and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import random_demand, random_layout

from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import Scene, scene_of
from routepack_opt.residency.mapping.mapping import RULES, assign
from routepack_opt.residency.simulator.event import EventModel
from routepack_opt.residency.simulator.layout import Layout
from routepack_opt.residency.simulator.stage import MigrationTraffic, StageModel

SCENES = {
    name: scene_of(
        Package.load(name), num_layers=2, num_experts=12, top_k=3, expert_bytes=np.array([16.5, 30.0]) * 2**20
    )
    for name in ("paper", "gpu-host-nvme", "cxl")
}


def traffic_of(scene: Scene, rng: np.random.Generator) -> MigrationTraffic:
    hardware = scene.hardware
    links = rng.integers(0, 2**26, hardware.num_links).astype(float)
    return MigrationTraffic(links, rng.integers(0, 2**26, hardware.num_regions).astype(float))


@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(sorted(SCENES)),
    rule=st.sampled_from(RULES),
    tokens=st.sampled_from([0, 1, 40, 700]),
    num_blocks=st.integers(1, 4),
    migrates=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_conservation_and_lower_bounds(
    seed: int, name: str, rule: str, tokens: int, num_blocks: int, migrates: bool
) -> None:
    rng, scene = np.random.default_rng(seed), SCENES[name]
    hardware, stage, event = scene.hardware, StageModel(scene), EventModel(scene, num_blocks)
    layout, demand = random_layout(scene, rng), random_demand(scene, rng, tokens)
    slots = assign(stage.tables, layout, demand, rule)
    traffic = traffic_of(scene, rng) if migrates else None
    result, base = event.simulate(layout, demand, slots, traffic), stage.evaluate(layout, demand, slots, traffic)
    totals, state = result.totals, base.state
    # bytes in = bytes out: every byte that the assignment asks of a link or a bank passes exactly once
    asked = (state.dispatch_links + state.gather_links + state.memory_links).sum(axis=0)
    np.testing.assert_array_equal(totals.link_bytes, asked)
    np.testing.assert_array_equal(totals.region_bytes, state.region_bytes.sum(axis=0))
    # every group is computed once and comes home once
    np.testing.assert_array_equal(totals.computed, state.chiplet_tokens.sum(axis=0))
    np.testing.assert_array_equal(totals.returned, demand.sum(axis=(0, 1)))
    # time is never negative, the stages of the last group add up to the layer
    assert (result.stages >= 0).all()
    np.testing.assert_allclose(result.stages.sum(axis=1), result.layer_s, rtol=1e-9, atol=1e-18)
    moved_links = traffic.links / 2 if traffic else np.zeros(hardware.num_links)
    moved_regions = traffic.regions / 2 if traffic else np.zeros(hardware.num_regions)
    for layer in range(2):
        links = state.dispatch_links[layer] + state.gather_links[layer] + state.memory_links[layer] + moved_links
        regions = state.region_bytes[layer] + moved_regions
        bounds = [
            (links / hardware.link_bandwidth).max(),
            (state.chiplet_tokens[layer] * scene.expert_ops / hardware.chiplet_ops).max(),
            max((r / b + s for r, b, s in zip(regions, hardware.region_bandwidth, hardware.region_latency_s,
                                              strict=True) if r), default=0.0),
        ]  # fmt: skip
        assert result.layer_s[layer] >= max(bounds) * (1 - 1e-12)
    if tokens == 0 and traffic is None:
        assert not result.stages.any() and result.routed_s == 0


@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_each_group_is_served_exactly_once_in_causal_order(seed: int, num_blocks: int) -> None:
    rng, scene = np.random.default_rng(seed), SCENES["paper"]
    event = EventModel(scene, num_blocks)
    layout, demand = random_layout(scene, rng), random_demand(scene, rng, 60)
    demand[0] = 0  # the scratch is that of the last layer
    slots = assign(event.tables, layout, demand)
    event.simulate(layout, demand, slots)
    num, s = event.num_groups(demand), event.scratch
    assert sorted(s.order[:num]) == list(range(num))
    served = np.zeros_like(demand[1])
    np.add.at(served, (s.expert[:num], s.source[:num]), s.tokens[:num])
    np.testing.assert_array_equal(served, demand[1])
    assert (s.target[:num] == layout.chiplet[1, s.expert[:num], s.slot[:num]]).all()
    for earlier, later in ((s.ready, s.arrived), (s.arrived, s.started), (s.started, s.done), (s.done, s.back)):
        assert (earlier[:num] <= later[:num]).all()
    assert (s.back[:num] < s.end[:num]).all() and (s.ready[:num] > 0).all()


def test_one_group_takes_the_sum_of_its_stages() -> None:
    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=1, top_k=1, expert_bytes=2.0**24)
    hardware, event = scene.hardware, EventModel(scene)
    layout = Layout.from_replicas(scene, [(0, 0, 1, 5)])  # HBM behind io0, executed by chiplet 5
    demand = np.zeros((1, 1, 16), dtype=np.int32)
    demand[0, 0, 2] = 10
    result = event.simulate(layout, demand, np.zeros((1, 1, 16), dtype=np.int8))
    gate, dispatch, queue, memory, compute, gather, combine = result.stages[0]
    data = 10 * scene.token_bytes
    route = hardware.route_latency_s[2, 5] + data * hardware.route_inverse_bandwidth[2, 5]
    assert gate == pytest.approx(10 * scene.gate_ops / hardware.chiplet_ops[0] + 1e-6)
    assert dispatch == pytest.approx(route) and gather == pytest.approx(route)
    assert queue == 0
    assert compute == pytest.approx(10 * scene.expert_ops / hardware.chiplet_ops[5])
    assert compute + memory == pytest.approx(100e-9 + 2**24 / 115e9)  # the bank is slower than its links
    assert combine == pytest.approx(10 * 2048 / hardware.chiplet_ops[2])


def test_weights_are_read_once_and_banks_serve_one_read_at_a_time() -> None:
    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=2, top_k=1, expert_bytes=2.0**24)
    event = EventModel(scene)
    demand = np.ones((1, 2, 16), dtype=np.int32)
    slots = np.zeros((1, 2, 16), dtype=np.int8)
    same = event.simulate(Layout.from_replicas(scene, [(0, 0, 1, 0), (0, 1, 1, 1)]), demand, slots)
    apart = event.simulate(Layout.from_replicas(scene, [(0, 0, 1, 0), (0, 1, 1, 2)]), demand, slots)
    assert same.totals.region_bytes.sum() == apart.totals.region_bytes.sum() == 2 * 2**24
    assert same.routed_s > 1.8 * apart.routed_s
