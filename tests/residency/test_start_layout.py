"""Start layout: legal, within the budget, balanced, popular experts replicated."""

from __future__ import annotations

import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.start_layout import LOCATIONS, layer_quota, popularity_layout, replicate
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import Scene, scene_of


def make_scene(num_layers: int = 2, num_experts: int = 32, size: float = 8 * 2**20, copies: float = 1.3) -> Scene:
    return scene_of(
        Package.load("paper"), num_layers=num_layers, num_experts=num_experts, top_k=2, expert_bytes=size,
        budget_copies=copies,
    )  # fmt: skip


def profile_of(scene: Scene, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(scene.num_experts, 1.0), size=scene.num_layers)
    return rng.poisson(4096 * share[:, :, None] / scene.num_chiplets, (*share.shape, scene.num_chiplets))


@pytest.mark.parametrize("location", LOCATIONS)
def test_layout_is_legal_and_fills_the_budget(location: str) -> None:
    scene = make_scene()
    layout = popularity_layout(scene, profile_of(scene), location=location)  # type: ignore[arg-type]
    layout.check()
    assert layout.budget_left() < scene.expert_bytes[0]
    for layer in range(scene.num_layers):
        for expert in range(scene.num_experts):
            chiplets = [replica.chiplet for replica in layout.replicas(layer, expert)]
            assert len(set(chiplets)) == len(chiplets)


def test_replicas_follow_demand_per_copy() -> None:
    scene = make_scene(num_layers=1)
    profile = profile_of(scene)
    layout = popularity_layout(scene, profile)
    work = profile.sum(axis=2)[0]
    count = layout.count[0]
    open_share = (work / count)[count < scene.r_max].max()
    assert (work[count > 1] / (count[count > 1] - 1)).min() >= open_share


def test_primaries_balance_arithmetic_when_it_binds() -> None:
    scene = make_scene(num_experts=64, size=2.0**16)
    profile = profile_of(scene)
    one = popularity_layout(scene, profile).primaries()
    for layer in range(scene.num_layers):
        load = np.bincount(one.chiplet[layer, :, 0], weights=profile[layer].sum(axis=1), minlength=16)
        best = max(load.sum() / 16, profile[layer].sum(axis=1).max())
        assert load.max() <= 1.2 * best


def test_primaries_balance_streaming_when_it_binds() -> None:
    scene = make_scene(num_experts=64)
    one = popularity_layout(scene, np.ones((2, 64, 16))).primaries()
    region = scene.hardware.region_of[one.tier[0, :, 0], one.chiplet[0, :, 0]]
    busy = np.bincount(region, minlength=12)[4:] * scene.expert_bytes[0] / scene.hardware.region_bandwidth[4:]
    assert busy.max() <= 1.3 * busy.mean()


def test_quota_shares_out_every_slot() -> None:
    scene = make_scene(num_layers=5, size=30 * 2**20)
    quota = np.array([layer_quota(scene, layer) for layer in range(5)])
    slots = np.floor(scene.region_room / scene.expert_bytes[0])
    assert (quota.sum(axis=0) == slots).all()
    assert (quota.max(axis=0) - quota.min(axis=0) <= 1).all()


def test_budget_of_one_copy_makes_no_replicas() -> None:
    scene = make_scene(copies=1.0)
    layout = popularity_layout(scene, profile_of(scene))
    assert (layout.count == 1).all()


def test_replicate_keeps_primaries() -> None:
    scene = make_scene()
    profile = profile_of(scene).astype(np.float64)
    one = popularity_layout(scene, profile).primaries()
    more = replicate(one.copy(), profile, "near")
    more.check()
    assert (more.tier[:, :, 0] == one.tier[:, :, 0]).all()
    assert (more.chiplet[:, :, 0] == one.chiplet[:, :, 0]).all()
    assert more.total_bytes > one.total_bytes


def test_refusals() -> None:
    scene = make_scene()
    with pytest.raises(InvalidInput, match=r"profile: \(1, 2, 3\); expected \(2, 32, 16\)"):
        popularity_layout(scene, np.ones((1, 2, 3)))
    with pytest.raises(InvalidInput, match="location: 'far' is unknown"):
        popularity_layout(scene, profile_of(scene), location="far")  # type: ignore[arg-type]
