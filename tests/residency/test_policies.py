"""Every policy: legal edits, its own invariants, and an honest use of what it may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from routepack_opt.residency.control.run_windows import PolicyRun, run_policy, start_of
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import scene_of
from routepack_opt.residency.policies.clairvoyant import Clairvoyant
from routepack_opt.residency.policies.fixed_replicas import FixedReplicas
from routepack_opt.residency.policies.hydra import Hydra
from routepack_opt.residency.policies.lfu import Lfu
from routepack_opt.residency.policies.look_ahead import LookAhead
from routepack_opt.residency.policies.lru import Lru
from routepack_opt.residency.policies.moentwine import MoEntwine
from routepack_opt.residency.policies.pimoe import Pimoe
from routepack_opt.residency.policies.static import Static
from routepack_opt.residency.traces.windows import Workload, synthetic_workload

if TYPE_CHECKING:
    from routepack_opt.residency.control.observation import Policy
    from routepack_opt.residency.simulator.layout import Layout

SCENE = scene_of(
    Package.load("paper"), num_layers=3, num_experts=32, top_k=4, expert_bytes=2**20 * 2, budget_copies=1.3
)


def changing(phase: str = "prefill", num_windows: int = 40) -> Workload:
    """Popularity that changes for good after the first tenth."""
    first, second = (
        synthetic_workload(
            "deepseek-v2-lite",
            phase,
            16,
            num_layers=3,
            num_experts=32,
            top_k=4,
            num_windows=num_windows,
            seed=seed,  # type: ignore[arg-type]
        )
        for seed in (1, 2)
    )
    profile = first.profile_windows
    return Workload(**{**first.__dict__, "make": lambda w: first.make(w) if w < profile else second.make(w)})


WORKLOAD = changing()
START = start_of(SCENE, WORKLOAD)


def run(policy: Policy) -> PolicyRun:
    return run_policy(SCENE, WORKLOAD, policy, start=START)


STATIC_S = float(run(Static()).routed_s.sum())


@pytest.mark.parametrize("policy", [Lru(), Lfu(), Hydra(), MoEntwine(), Pimoe(), LookAhead(), LookAhead(max_edits=8)])
def test_beats_a_stale_single_copy(policy: Policy) -> None:
    result = run(policy)
    assert float(result.routed_s.sum()) < STATIC_S
    assert result.copies.sum() > 0


@pytest.mark.parametrize("policy", [Static(), FixedReplicas(), FixedReplicas("near"), FixedReplicas("spread", "fast")])
def test_fixed_policies_move_nothing(policy: Policy) -> None:
    result = run(policy)
    assert result.copies.sum() + result.evictions.sum() + result.refused.sum() == 0
    assert result.migrated_bytes.sum() == 0


@pytest.mark.parametrize("policy", [Static(), Hydra(), Pimoe()])
def test_single_copy_policies_hold_one_copy(policy: Policy) -> None:
    counts = []
    decide = policy.decide

    def watch(view):  # type: ignore[no-untyped-def]
        counts.append(int(view.layout.count.max()))
        return decide(view)

    policy.decide = watch  # type: ignore[method-assign]
    run(policy)
    assert set(counts) == {1}


@pytest.mark.parametrize("policy", [Lru(), Lfu(), MoEntwine()])
def test_primaries_stay(policy: Policy) -> None:
    layouts: list[Layout] = []
    decide = policy.decide

    def watch(view):  # type: ignore[no-untyped-def]
        layouts.append(view.layout.primaries())
        return decide(view)

    policy.decide = watch  # type: ignore[method-assign]
    run(policy)
    assert (layouts[0].chiplet[:, :, 0] == layouts[-1].chiplet[:, :, 0]).all()
    assert (layouts[0].tier[:, :, 0] == layouts[-1].tier[:, :, 0]).all()


def test_start_layout_is_not_changed() -> None:
    before = START[0].copy()
    for policy in (Static(), Lru(), LookAhead(max_edits=8)):
        run(policy)
    assert (before.tier == START[0].tier).all()
    assert (before.chiplet == START[0].chiplet).all()


def test_clairvoyant_knows_what_comes() -> None:
    known = run(Clairvoyant(windows=WORKLOAD))
    assert float(known.routed_s.sum()) <= float(run(LookAhead(max_edits=8)).routed_s.sum()) * 1.02


def test_streaming_bound_layers_are_left_alone_by_caches() -> None:
    scene = scene_of(
        Package.load("paper"), num_layers=2, num_experts=32, top_k=4, expert_bytes=2**26, budget_copies=1.3
    )
    windows = np.ones((6, 2, 32, 16), dtype=np.int32)
    start = start_of(scene, WORKLOAD_ONE)
    for policy in (Lru(), Lfu(), MoEntwine()):
        result = run_policy(scene, windows, policy, start=start, first_window=0)
        assert result.copies.sum() + result.evictions.sum() == 0


WORKLOAD_ONE = synthetic_workload(
    "deepseek-v2-lite", "decode", 16, num_layers=2, num_experts=32, top_k=4, num_windows=10, window_tokens=64
)
