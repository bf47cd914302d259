"""Bounds of the residency problem are below every layout and assignment, and close to good ones."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import random_demand, random_layout

from routepack_opt.errors import Infeasible, InvalidInput
from routepack_opt.models import residency_bounds as floors
from routepack_opt.models.residency import layout_bound
from routepack_opt.models.residency_choice import Options, choice_bound
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.package_file import parse_package
from routepack_opt.residency.machine.scene import Scene, scene_of
from routepack_opt.residency.mapping.mapping import RULES, MapWeights, assign
from routepack_opt.residency.simulator.layout import Layout
from routepack_opt.residency.simulator.stage import StageModel

MIB = 2**20
SCENES = {
    "paper": scene_of(
        Package.load("paper"), num_layers=2, num_experts=12, top_k=3, expert_bytes=np.array([16.5, 30.0]) * MIB
    ),
    "paper-few": scene_of(Package.load("paper"), num_layers=3, num_experts=5, top_k=2, expert_bytes=200.0 * MIB),
    "gpu-host-nvme": scene_of(
        Package.load("gpu-host-nvme"), num_layers=2, num_experts=9, top_k=3, expert_bytes=30.0 * MIB
    ),
    "cxl": scene_of(Package.load("cxl"), num_layers=2, num_experts=9, top_k=3, expert_bytes=30.0 * MIB),
}
GREEDY = MapWeights(peak=4.0)


def random_slots(layout, demand, rng):  # type: ignore[no-untyped-def]
    slots = rng.integers(0, 2**30, demand.shape) % layout.count[:, :, None]
    return np.where(demand > 0, slots, -1).astype(np.int8)


@pytest.mark.parametrize("name", SCENES)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.sampled_from([0, 3, 40, 2000]))
@settings(max_examples=15, deadline=None)
def test_no_layout_and_assignment_is_below_the_bound(name: str, seed: int, tokens: int) -> None:
    scene, rng = SCENES[name], np.random.default_rng(seed)
    demand = random_demand(scene, rng, tokens)
    bound = layout_bound(scene, demand)
    model = StageModel(scene)
    layouts = [random_layout(scene, rng, copies) for copies in (1.0, 1.3)]
    layouts.append(popularity_layout(scene, demand.astype(np.float64)))
    for layout in layouts:
        assignments = [assign(model.tables, layout, demand, rule) for rule in (*RULES, GREEDY)]
        for slots in (*assignments, random_slots(layout, demand, rng)):
            assert bound.bound_s <= model.evaluate(layout, demand, slots).routed_s


def test_zero_demand_has_bound_zero_and_bad_demand_is_refused() -> None:
    scene = SCENES["paper"]
    shape = (2, 12, scene.num_chiplets)
    assert layout_bound(scene, np.zeros(shape, dtype=np.int32)).bound_s == 0.0
    with pytest.raises(InvalidInput, match=r"expected integers \(2, 12, 16\)"):
        layout_bound(scene, np.zeros((1, 12, 16), dtype=np.int32))
    demand = np.zeros(shape, dtype=np.int32)
    demand[1, 3, 2] = -4
    with pytest.raises(InvalidInput, match=r"demand\[1, 3, 2\]: -4 tokens"):
        layout_bound(scene, demand)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_choice_bound_is_below_the_best_choice_and_meets_it_without_limits(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    layers = [
        Options(rng.random(n), rng.integers(0, 5, (n, 2)).astype(float)) for n in rng.integers(1, 6, rng.integers(1, 4))
    ]
    capacity = rng.integers(0, 9, 2).astype(float)
    best, free = np.inf, 0.0
    for choice in itertools.product(*(range(len(layer.cost)) for layer in layers)):
        used = sum((layer.use[k] for layer, k in zip(layers, choice, strict=True)), np.zeros(2))
        if (used <= capacity).all():
            best = min(best, sum(layer.cost[k] for layer, k in zip(layers, choice, strict=True)))
    free = sum(layer.cost.min() for layer in layers)
    result = choice_bound(layers, capacity)
    assert result.bound <= best
    assert (result.prices >= 0).all()
    assert choice_bound(layers, np.full(2, np.inf)).bound == pytest.approx(free, rel=1e-8)


def least_peak(loads: list[int], num_chiplets: int, extra: int) -> int:
    """Least largest chiplet load over whole-number splits with at most len(loads) + extra pieces: enumeration."""
    best = sum(loads)

    def pieces(load: int, most: int, largest: int) -> list[list[int]]:
        if most == 1:
            return [[load]] if load <= largest else []
        out = [[load]] if load <= largest else []
        for first in range(min(largest, load - 1), 0, -1):
            out += [[first, *rest] for rest in pieces(load - first, most - 1, first)]
        return out

    def place(rest: list[list[int]], used: list[int]) -> None:
        nonlocal best
        if max(used) >= best:
            return
        if not rest:
            best = max(used)
            return
        group, *others = rest
        for targets in itertools.combinations(range(num_chiplets), min(len(group), num_chiplets)):
            for order in set(itertools.permutations(group)):
                grown = list(used)
                for chiplet, size in zip(targets, order, strict=False):
                    grown[chiplet] += size
                place(others, grown)

    def split(k: int, left: int, chosen: list[list[int]]) -> None:
        if k == len(loads):
            place(chosen, [0] * num_chiplets)
            return
        for part in pieces(loads[k], left + 1, loads[k]):
            if len(part) <= num_chiplets:
                split(k + 1, left - len(part) + 1, [*chosen, part])

    split(0, extra, [])
    return best


@pytest.mark.parametrize("loads", [[5, 4, 3], [7, 1], [6, 5, 5, 2], [9], [4, 4, 4, 4], [6, 3, 3, 1, 1]])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_compute_floor_is_below_the_least_peak(loads: list[int], extra: int) -> None:
    scene = tiny_scene(len(loads))
    demand = np.zeros((len(loads), scene.num_chiplets), dtype=np.int32)
    for e, load in enumerate(loads):
        demand[e] = np.bincount(np.arange(load) % scene.num_chiplets, minlength=scene.num_chiplets)
    token_s = scene.expert_ops / scene.hardware.chiplet_ops[0]
    peak = least_peak(loads, scene.num_chiplets, extra) * token_s
    floor = floors.compute_floor(scene, demand, extra)
    assert floor[extra] <= peak * (1 + 1e-12)
    assert floor[extra] >= 0.74 * peak


def tiny_scene(num_experts: int, num_layers: int = 1) -> Scene:
    return scene_of(
        Package.load("cxl"), num_layers=num_layers, num_experts=num_experts, top_k=1, expert_bytes=30.0 * MIB
    )


def test_tier_floor_spreads_over_unequal_room() -> None:
    scene = SCENES["paper"]
    floor = floors.tier_floors(scene, 0, 20)[0]  # SRAM: four regions of three experts of 16.5 MiB
    seconds = 5e-9 + np.ceil(np.arange(1, 13) / 4) * 16.5 * MIB / 2e12
    np.testing.assert_allclose(floor.memory_s, np.append(0.0, seconds), rtol=1e-12)
    np.testing.assert_allclose(floor.queue_s[1:], np.ceil(np.arange(1, 13) / 4) * 5e-9, rtol=1e-12)


def chain(num_chiplets: int, capacity_mib: float = 100.0, link_gbs: float = 0.01) -> Package:
    """Chiplets in a row with slow links, each with a memory of its own."""
    regions = ", ".join(f"{{chiplets = [{c}]}}" for c in range(num_chiplets))
    return parse_package(
        f"""
name = "chain"
[compute]
chiplets = {num_chiplets}
mesh = [1, {num_chiplets}]
cores = 4
clock_ghz = 10.0
[mesh_link]
bandwidth_gbs = {link_gbs}
latency_ns = 1
[[tier]]
name = "own"
capacity_mib = {capacity_mib}
bandwidth_gbs = 1000.0
latency_ns = 1
energy_pj_per_byte = 1
regions = [{regions}]
[residency]
activation_reserve = 0
metadata_reserve_kib = 0
""",
        "chain",
    )


@pytest.mark.parametrize("num_chiplets", [2, 3, 4])
def test_bound_was_above_layouts_with_more_extra_replicas_than_chiplets(num_chiplets: int) -> None:
    # Every expert on every chiplet: nothing travels, with far more extra replicas than chiplets.
    sizes = {"num_layers": 1, "num_experts": 8, "top_k": 1, "expert_bytes": 1024.0, "hidden": 512, "expert_width": 256}
    scene = scene_of(chain(num_chiplets), budget_copies=4.0, **sizes)
    demand = np.full((1, 8, num_chiplets), 100, dtype=np.int32)
    layout = Layout.from_replicas(scene, [(0, e, 0, c) for e in range(8) for c in range(num_chiplets)])
    model = StageModel(scene)
    routed_s = model.evaluate(layout, demand, assign(model.tables, layout, demand, "nearest")).routed_s
    assert 0.99 * routed_s < layout_bound(scene, demand).bound_s <= routed_s


def test_bound_of_regions_too_small_for_a_whole_copy_was_a_traceback() -> None:
    sizes = {"num_layers": 2, "num_experts": 3, "top_k": 1, "expert_bytes": np.array([2.0, 1.0]) * MIB}
    scene = scene_of(chain(2, capacity_mib=5.0), budget_copies=1.0, **sizes)
    shrunk = dataclasses.replace(scene, region_room=np.array([3.5, 5.5]) * MIB, budget_bytes=9.0 * MIB)
    assert layout_bound(shrunk, np.ones((2, 3, 2), dtype=np.int32)).bound_s > 0
    object.__setattr__(shrunk, "region_room", np.array([1.9, 3.0]) * MIB)
    with pytest.raises(Infeasible, match="layer 0: the regions hold fewer whole experts"):
        layout_bound(shrunk, np.ones((2, 3, 2), dtype=np.int32))
