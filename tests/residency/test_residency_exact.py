"""Exact residency of one window: both engines agree with brute force, and the bounds stay below."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from pathlib import Path  # noqa: TC003 - a fixture's annotation

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import random_demand, random_layout

from routepack_opt.errors import InvalidInput
from routepack_opt.models.residency import layout_bound
from routepack_opt.models.residency_exact import ENGINES, solve_window_exact
from routepack_opt.models.residency_fixed import assignment_bound
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import Scene, scene_of
from routepack_opt.residency.mapping.mapping import RULES, assign
from routepack_opt.residency.simulator.layout import Layout
from routepack_opt.residency.simulator.stage import StageModel

MIB = 2**20
# Two chiplets that share a small fast memory and a large slow one behind a router; arithmetic and streaming balanced.
TINY = """
name = "tiny"
[compute]
chiplets = 2
mesh = [1, 2]
cores = 1
clock_ghz = 1.0
mac_per_cycle = 64
utilisation = 1.0
mac_energy_pj = 0.5
[mesh_link]
bandwidth_gbs = 0.5
latency_ns = 3.0
energy_pj_per_byte = 1.0
[[router]]
name = "io"
attach = ["c0"]
bandwidth_gbs = 4.0
latency_ns = 5.0
energy_pj_per_byte = 1.0
[[tier]]
name = "sram"
capacity_mib = {sram}
bandwidth_gbs = 20.0
banks = 4
latency_ns = 50.0
energy_pj_per_byte = 1.0
regions = [{{ chiplets = [0] }}, {{ chiplets = [1] }}]
[[tier]]
name = "dram"
capacity_mib = 64.0
bandwidth_gbs = 3.0
banks = 2
latency_ns = 200.0
energy_pj_per_byte = 10.0
regions = [{{ node = "io", chiplets = [0, 1] }}]
[residency]
budget_copies = {copies}
r_max = 2
activation_reserve = 0.0
metadata_reserve_kib = 0.0
[power]
idle_w = 1.0
budget_w = 100.0
"""


@lru_cache
def tiny_package(folder: Path, sram: float, copies: float) -> Package:
    path = folder / f"tiny-{sram}-{copies}.toml"
    path.write_text(TINY.format(sram=sram, copies=copies))
    return Package.load(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


def tiny_scene(folder: Path, num_layers: int, num_experts: int, sram: float, copies: float) -> Scene:
    return scene_of(
        tiny_package(folder, sram, copies), num_layers=num_layers, num_experts=num_experts, top_k=1,
        expert_bytes=1.0 * MIB, hidden=64, expert_width=32,
    )  # fmt: skip


def brute_force(scene: Scene, demand: np.ndarray) -> float:
    """Least routed time: every map from groups to (tier, chiplet), and a place for each expert without tokens."""
    model, region_of = StageModel(scene), scene.hardware.region_of
    places = [(t, c) for t in range(scene.num_tiers) for c in range(scene.num_chiplets)]
    front: dict[tuple[int, ...], float] = {(0,) * scene.hardware.num_regions: 0.0}
    for layer in range(scene.num_layers):
        only = np.zeros_like(demand)
        only[layer] = demand[layer]
        best: dict[tuple[int, ...], float] = {}
        groups = [(e, c) for e in range(scene.num_experts) for c in range(scene.num_chiplets) if demand[layer, e, c]]
        idle = [e for e in range(scene.num_experts) if not demand[layer, e].any()]
        for chosen in itertools.product(places, repeat=len(groups) + len(idle)):
            layout, slots = Layout(scene), np.full(demand.shape, -1, dtype=np.int8)
            legal = True
            for (e, c), place in zip([*groups, *((e, -1) for e in idle)], chosen, strict=True):
                slot = layout.find(layer, e, *place)
                if slot < 0:
                    legal = layout.count[layer, e] < scene.r_max
                    if not legal:
                        break
                    slot = layout.add(layer, e, *place)
                if c >= 0:
                    slots[layer, e, c] = slot
            if not legal:
                continue
            held = tuple((layout.region_bytes / MIB).astype(int).tolist())
            if best.get(held, np.inf) > 0:
                seconds = model.evaluate(layout, only, slots).routed_s
                best[held] = min(best.get(held, np.inf), seconds)
        grown: dict[tuple[int, ...], float] = {}
        for (one, a), (two, b) in itertools.product(front.items(), best.items()):
            key = tuple(x + y for x, y in zip(one, two, strict=True))
            grown[key] = min(grown.get(key, np.inf), a + b)
        front = grown
    room, budget = scene.region_room / MIB, scene.budget_bytes / MIB
    assert region_of.min() >= 0
    return min(t for held, t in front.items() if (np.array(held) <= room).all() and sum(held) <= budget)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("num_layers", "num_experts", "sram", "copies", "seed"),
    [(1, 2, 1.0, 1.0, 0), (1, 3, 1.0, 1.4, 1), (1, 3, 2.0, 2.0, 2), (2, 2, 1.0, 1.3, 3), (2, 2, 2.0, 2.0, 4)],
)
def test_both_engines_find_the_optimum_of_brute_force(
    folder: Path, engine: str, num_layers: int, num_experts: int, sram: float, copies: float, seed: int
) -> None:
    scene = tiny_scene(folder, num_layers, num_experts, sram, copies)
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, 40, (num_layers, num_experts, 2)).astype(np.int32)
    if seed % 2:
        demand[0, 0] = 0
    expected = brute_force(scene, demand)
    exact = solve_window_exact(scene, demand, engine=engine, time_limit_s=60)  # type: ignore[arg-type]
    assert exact.status == "optimal"
    assert exact.solver == {"cp-sat": "CP-SAT", "highs": "HiGHS"}[engine] and exact.version
    assert exact.layout is not None and exact.slots is not None
    exact.layout.check()
    assert exact.objective_s <= expected * (1 + 1e-5)
    assert exact.objective_s >= expected * (1 - 1e-12)
    assert exact.bound_s <= expected
    assert exact.objective_s - exact.bound_s <= (exact.rounding + 1e-5) * expected
    bound = layout_bound(scene, demand)
    assert 0 < bound.bound_s <= expected


@given(seed=st.integers(0, 2**32 - 1), copies=st.sampled_from([1.0, 1.5, 2.0]))
@settings(max_examples=10, deadline=None)
def test_no_assignment_is_below_the_bounds_of_a_given_layout(folder: Path, seed: int, copies: float) -> None:
    rng = np.random.default_rng(seed)
    scene = tiny_scene(folder, 2, 4, 2.0, copies)
    demand, layout = random_demand(scene, rng, 60), random_layout(scene, rng, copies)
    model = StageModel(scene)
    best = np.inf
    for rule in RULES:
        best = min(best, model.evaluate(layout, demand, assign(model.tables, layout, demand, rule)).routed_s)
    slots = [
        np.where(demand > 0, rng.integers(0, 9, demand.shape) % layout.count[:, :, None], -1).astype(np.int8)
        for _ in range(20)
    ]
    best = min(best, *(model.evaluate(layout, demand, s).routed_s for s in slots))
    exact = solve_window_exact(scene, demand, layout=layout, engine="highs", time_limit_s=30)
    loose = assignment_bound(scene, layout, demand)
    assert exact.status == "optimal"
    assert loose.bound_s <= exact.objective_s <= best * (1 + exact.rounding)
    assert layout_bound(scene, demand).bound_s <= exact.objective_s
    single = layout.primaries()
    only = model.evaluate(single, demand, assign(model.tables, single, demand, "primary")).routed_s
    assert assignment_bound(scene, single, demand).bound_s == pytest.approx(only, rel=1e-6)


@pytest.mark.parametrize("name", ["paper", "gpu-host-nvme", "cxl"])
def test_assignment_bound_is_below_every_rule_on_the_presets(name: str) -> None:
    scene = scene_of(Package.load(name), num_layers=2, num_experts=10, top_k=3, expert_bytes=30.0 * MIB)
    rng, model = np.random.default_rng(5), StageModel(scene)
    for tokens in (0, 4, 400):
        layout, demand = random_layout(scene, rng), random_demand(scene, rng, tokens)
        bound = assignment_bound(scene, layout, demand).bound_s
        for rule in RULES:
            assert bound <= model.evaluate(layout, demand, assign(model.tables, layout, demand, rule)).routed_s


def test_an_unknown_engine_is_refused(folder: Path) -> None:
    scene = tiny_scene(folder, 1, 2, 1.0, 1.0)
    with pytest.raises(InvalidInput, match="expected one of cp-sat, highs"):
        solve_window_exact(scene, np.ones((1, 2, 2), dtype=np.int32), engine="scip")  # type: ignore[arg-type]


def test_nothing_to_do_takes_no_time(folder: Path) -> None:
    scene = tiny_scene(folder, 2, 3, 1.0, 1.0)
    for engine in ENGINES:
        exact = solve_window_exact(scene, np.zeros((2, 3, 2), dtype=np.int32), engine=engine)  # type: ignore[arg-type]
        assert exact.status == "optimal" and exact.objective_s == exact.bound_s == 0.0


def test_report_of_policies_is_never_below_the_bounds() -> None:
    from routepack_opt.models.residency_gaps import bound_report
    from routepack_opt.residency.control.policy_registry import find_policies
    from routepack_opt.residency.traces.windows import synthetic_workload

    scene = scene_of(Package.load("paper"), num_layers=2, num_experts=8, top_k=2, expert_bytes=30.0 * MIB)
    workload = synthetic_workload(
        "mixtral-8x7b", "decode", scene.num_chiplets, num_layers=2, num_experts=8, top_k=2, num_windows=20, seed=1
    )
    report = bound_report(scene, workload, find_policies(["static", "look-ahead"]), num_windows=3, with_assignment=True)
    assert report.windows.tolist() == [2, 10, 19]
    for gap in report.policies:
        assert (gap.gaps >= 0).all() and gap.gap <= gap.gaps.max() + 1e-12
        assert gap.assignment_s is not None and (gap.assignment_s <= gap.routed_s).all()
        np.testing.assert_allclose(gap.routed_s, report.bound_s * (1 + gap.gaps))


def test_command_prints_bounds_and_distances(capsys: pytest.CaptureFixture[str]) -> None:
    from routepack_opt.cli import main

    arguments = ["residency", "bound", "--model", "dbrx", "--phase", "decode", "--windows", "10", "--bounds", "2"]
    assert main([*arguments, "--policies", "static", "--layers", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["windows"] == [0, 9] and document["synthetic"]
    (policy,) = document["policies"]
    assert all(t >= b > 0 for t, b in zip(policy["routed_s"], document["bound_s"], strict=True))
    assert main([*arguments, "--policies", "static", "--layers", "1", "--assignment", "-q"]) == 0
    text = capsys.readouterr().out
    assert "Scope: dbrx on paper" in text and "over best assignment" in text
    assert main([*arguments, "--policies", "nonesuch"]) == 4
    assert "'nonesuch' is unknown" in capsys.readouterr().err
