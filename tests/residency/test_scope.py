"""Scope and scene: what fits, what is said about it, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.moe_models import PAPER_MODELS, MoeModel
from routepack_opt.residency.machine.package_file import parse_package
from routepack_opt.residency.machine.scene import build_scene, scene_of
from routepack_opt.residency.machine.scope import experts_held

if TYPE_CHECKING:
    from routepack_opt.residency.machine.package import Package

TINY = """
name = "tiny"
[compute]
chiplets = 2
mesh = [1, 2]
cores = 1
clock_ghz = 1.0
[mesh_link]
bandwidth_gbs = 10
latency_ns = 1
[[tier]]
name = "near"
capacity_mib = 1
bandwidth_gbs = 100
latency_ns = 10
energy_pj_per_byte = 1
regions = [{{ chiplets = [0] }}, {{ chiplets = [1] }}]
[[tier]]
name = "far"
capacity_mib = {far}
bandwidth_gbs = 10
latency_ns = 100
energy_pj_per_byte = 100
regions = [{{ node = "c0", chiplets = [0, 1] }}]
"""
MODEL = MoeModel("toy", 256, 512, 3, 4, 2, 0, 0, 0)  # 0.75 MiB an expert


def tiny(far: float) -> Package:
    return parse_package(TINY.format(far=far), "tiny.toml")


@pytest.mark.parametrize("name", PAPER_MODELS)
@pytest.mark.parametrize("rule", ["layers", "capacity"])
def test_every_paper_model_has_a_scope_that_fits_and_says_so(name: str, rule: str) -> None:
    scene = build_scene("paper", name, scope=rule)  # type: ignore[arg-type]
    held = experts_held(scene.region_room, scene.expert_bytes[0])
    assert held >= 1.3 * scene.num_layers * scene.num_experts - 1
    assert f"{scene.num_layers} of {scene.model.num_layers} MoE layers" in scene.scope
    assert scene.scope.startswith("Scope: ") and "1.3 copies" in scene.scope
    if rule == "capacity":
        assert scene.num_layers == scene.model.num_layers
    elif scene.num_layers < scene.model.num_layers:
        assert held < 1.3 * (scene.num_layers + 1) * scene.num_experts


def test_scope_covers_as_many_layers_as_fit_at_least_one() -> None:
    assert build_scene(tiny(16), MODEL).num_layers == 3
    assert build_scene(tiny(8), MODEL).num_layers == 2
    scene = build_scene(tiny(2.0), MODEL)  # 2 + 2 experts: one copy of one layer
    assert scene.num_layers == 1 and "room for 1 copies only" in scene.scope
    with pytest.raises(InvalidInput, match=r"num_layers: 4 is not 1\.\.3"):
        build_scene(tiny(16), MODEL, num_layers=4)


def test_what_cannot_hold_one_copy_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"tiny.toml.*the regions hold 2 experts.*scope 'capacity'"):
        build_scene(tiny(0.5), MODEL)
    huge = MoeModel("huge", 1024, 4096, 1, 4, 2, 0, 0, 0)
    with pytest.raises(InvalidInput, match=r"tiny.toml: field 'tier': an expert of huge takes 24 MiB and fits no tier"):
        build_scene(tiny(16), huge)
    assert build_scene(tiny(16), huge, scope="capacity").num_layers == 1
    with pytest.raises(InvalidInput, match="experts of layer 1 take 32 MiB and fit no tier"):
        scene_of(tiny(16), num_layers=2, num_experts=2, top_k=1, expert_bytes=np.array([2.0, 32.0]) * 2**20)
    with pytest.raises(InvalidInput, match=r"one copy of every expert takes 24 MiB"):
        scene_of(tiny(16), num_layers=2, num_experts=6, top_k=1, expert_bytes=2.0 * 2**20)


def test_regions_with_room_for_one_copy_in_bytes_but_not_in_whole_experts_are_refused() -> None:
    room, size = build_scene(tiny(16), MODEL).region_room, 427000.0
    held = int(np.floor(room / size).sum())
    assert (held + 1) * size <= room.sum()
    with pytest.raises(InvalidInput, match=rf"the regions hold {held} whole experts"):
        scene_of(tiny(16), num_layers=1, num_experts=held + 1, top_k=1, expert_bytes=size, budget_copies=1.0)


@pytest.mark.parametrize("copies", [0.5, 0.0, -1.0, float("nan")])
def test_a_budget_under_one_copy_is_refused(copies: float) -> None:
    with pytest.raises(InvalidInput, match="expected at least 1"):
        build_scene(tiny(16), MODEL, budget_copies=copies)
    if copies > 0:
        with pytest.raises(InvalidInput, match="under one copy of every expert"):
            scene_of(tiny(16), num_layers=1, num_experts=2, top_k=1, expert_bytes=1024.0, budget_copies=copies)


@pytest.mark.parametrize("size", [0.0, -5.0, float("nan"), float("inf")])
def test_expert_sizes_must_be_sizes(size: float) -> None:
    with pytest.raises(InvalidInput, match=r"expert_bytes\[1\]"):
        scene_of(tiny(16), num_layers=2, num_experts=2, top_k=1, expert_bytes=np.array([1024.0, size]))


def test_sram_holds_small_experts_only() -> None:
    small, large = build_scene("paper", "deepseek-moe-16b"), build_scene("paper", "mixtral-8x7b")
    assert small.tier_holds(0).all()
    assert not large.tier_holds(0)[0].any() and large.tier_holds(0)[1:].all()
