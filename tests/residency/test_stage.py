"""The stage-level kernels against the slow reference, and edits scored without a trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import naive_stages, random_demand, random_layout

from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import Scene, build_scene, scene_of
from routepack_opt.residency.mapping.mapping import FAST, RULES, assign
from routepack_opt.residency.simulator.stage import MigrationTraffic, StageModel

SCENES = {
    name: scene_of(
        Package.load(name), num_layers=2, num_experts=12, top_k=3, expert_bytes=np.array([16.5, 30.0]) * 2**20
    )
    for name in ("paper", "gpu-host-nvme", "cxl")
}


def random_traffic(scene: Scene, rng: np.random.Generator) -> MigrationTraffic:
    hardware = scene.hardware
    links = rng.integers(0, 2**24, hardware.num_links).astype(float)
    return MigrationTraffic(links, rng.integers(0, 2**24, hardware.num_regions).astype(float))


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("rule", RULES)
def test_window_agrees_with_the_slow_reference(name: str, rule: str) -> None:
    scene, rng = SCENES[name], np.random.default_rng(3)
    model = StageModel(scene)
    for tokens in (0, 5, 300):
        layout, demand = random_layout(scene, rng), random_demand(scene, rng, tokens)
        slots = assign(model.tables, layout, demand, rule)
        for traffic in (None, random_traffic(scene, rng)):
            result = model.evaluate(layout, demand, slots, traffic)
            share = traffic or MigrationTraffic(
                np.zeros(scene.hardware.num_links), np.zeros(scene.hardware.num_regions)
            )
            for layer in range(2):
                stages = naive_stages(scene, layout, demand, slots, layer, share.links / 2, share.regions / 2)
                np.testing.assert_allclose(result.stages[layer], stages, rtol=1e-12, atol=0)
                gate, dispatch, queue, memory, compute, gather, combine = stages
                expected = gate + dispatch + queue + max(memory, compute) + gather + combine
                assert result.layer_s[layer] == pytest.approx(expected, rel=1e-12)
            assert result.routed_s == pytest.approx(result.layer_s.sum())


def test_no_traffic_takes_no_time() -> None:
    scene = build_scene("paper", "deepseek-v2-lite")
    layout = random_layout(scene, np.random.default_rng(0))
    model = StageModel(scene)
    demand = np.zeros((scene.num_layers, 64, 16), dtype=np.int32)
    result = model.evaluate(layout, demand, assign(model.tables, layout, demand))
    assert not result.stages.any() and result.routed_s == 0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_scored_edits_agree_with_a_full_evaluation_and_leave_no_trace(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = SCENES["paper"]
    model = StageModel(scene)
    layout, demand = random_layout(scene, rng), random_demand(scene, rng, 200)
    base = model.evaluate(layout, demand, assign(model.tables, layout, demand), random_traffic(scene, rng))
    before = [values.copy() for values in base.state]
    edits = []
    for _ in range(10):
        layer, expert = int(rng.integers(2)), int(rng.integers(12))
        changed = layout.copy()
        tier, chiplet = int(rng.integers(3)), int(rng.integers(16))
        if not changed.why_not_add(layer, expert, tier, chiplet):
            changed.add(layer, expert, tier, chiplet)
        elif changed.count[layer, expert] > 1:
            changed.remove(layer, expert, *changed.replicas(layer, expert)[0])
        edits.append((layer, expert, changed))
    layers, experts = np.array([e[0] for e in edits]), np.array([e[1] for e in edits])
    tiers = np.array([changed.tier[layer, e] for layer, e, changed in edits])
    chiplets = np.array([changed.chiplet[layer, e] for layer, e, changed in edits])
    times = model.score_edits(layout, demand, base, layers, experts, tiers, chiplets)
    for values, old in zip(base.state, before, strict=True):
        np.testing.assert_array_equal(values, old)
    for (layer, expert, changed), time_s in zip(edits, times, strict=True):
        # the edited expert is mapped on the loads of all others: the same as mapping it last
        others = [e for e in range(12) if e != expert]
        order_demand = demand.copy()
        slots = base.slots.copy()
        slots[layer, expert] = last_mapped(model, changed, order_demand, slots, layer, expert, others)
        again = model.evaluate(changed, demand, slots)
        expected = model.evaluate(changed, demand, slots, MigrationTraffic(
            base.state.migration_links * 2, base.state.migration_regions * 2))  # fmt: skip
        assert time_s == expected.layer_s[layer] >= again.layer_s[layer]


def last_mapped(model, layout, demand, slots, layer, expert, others):  # type: ignore[no-untyped-def]
    """The fast rule for one expert in plain Python, after ``others`` are counted."""
    hardware, scene = model.scene.hardware, model.scene
    tokens, bank = np.zeros(scene.num_chiplets), np.zeros(hardware.num_regions)
    size = scene.expert_bytes[layer]
    for e in others:
        used = set()
        replicas = layout.replicas(layer, e)
        for c in range(scene.num_chiplets):
            if demand[layer, e, c]:
                replica = replicas[slots[layer, e, c]]
                tokens[replica.chiplet] += demand[layer, e, c]
                used.add(replica)
        for tier, chiplet in used:
            bank[hardware.region_of[tier, chiplet]] += size
    used = set()
    result = np.full(scene.num_chiplets, -1)
    for c in range(scene.num_chiplets):
        n = demand[layer, expert, c]
        if not n:
            continue
        costs = []
        for tier, d in layout.replicas(layer, expert):
            g, node = hardware.region_of[tier, d], hardware.memory_node[tier, d]
            data, latency, inverse = n * scene.token_bytes, hardware.route_latency_s, hardware.route_inverse_bandwidth
            compute = (tokens[d] + n) * scene.expert_ops / hardware.chiplet_ops[d]
            path = latency[c, d] + latency[d, c] + data * (inverse[c, d] + inverse[d, c])
            busy, stream = bank[g] / hardware.region_bandwidth[g], 0.0
            if (tier, d) not in used:
                busy += size / hardware.region_bandwidth[g]
                stream = size * (1 / hardware.region_bandwidth[g] + inverse[node, d])
            cost = compute + path + busy + stream
            costs.append(cost)
        best = int(np.argmin(costs))
        result[c] = best
        replica = layout.replicas(layer, expert)[best]
        tokens[replica.chiplet] += n
        if replica not in used:
            used.add(replica)
            bank[hardware.region_of[replica.tier, replica.chiplet]] += size
    return result


def test_fast_map_prefers_what_streams_already_and_never_leaves_a_group_unserved() -> None:
    scene, rng = SCENES["paper"], np.random.default_rng(1)
    model = StageModel(scene)
    layout, demand = random_layout(scene, rng), random_demand(scene, rng, 100)
    for weights in (FAST, FAST.__class__(peak=1.0, block_groups=3, forced_first=False)):
        slots = assign(model.tables, layout, demand, weights)
        assert ((slots >= 0) == (demand > 0)).all()
        assert (slots < layout.count[:, :, None]).all()
    calm = FAST.__class__(queue=0, path=0, bank=0, streaming=1)
    slots = assign(model.tables, layout, demand, calm)
    used = [len(set(group[group >= 0])) for group in slots.reshape(24, -1)]
    assert max(used) == 1


def test_fast_map_on_even_loads_beats_the_simple_rules() -> None:
    scene = build_scene("paper", "deepseek-moe-16b")
    rng = np.random.default_rng(2)
    model = StageModel(scene)
    layout, demand = random_layout(scene, rng), random_demand(scene, rng, 512)
    times = {
        rule: model.evaluate(layout, demand, assign(model.tables, layout, demand, rule)).routed_s for rule in RULES
    }
    assert times["fast"] < min(times["nearest"], times["round-robin"])
