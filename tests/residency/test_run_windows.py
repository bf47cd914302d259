"""The runner: order of events, equal information, limits on edits, sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.edits import addition
from routepack_opt.residency.control.hotness import Hotness
from routepack_opt.residency.control.run_windows import run_policy, start_of, tokens_by_tier, warmup
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import Scene, scene_of
from routepack_opt.residency.policies.fixed_replicas import FixedReplicas
from routepack_opt.residency.policies.static import Static
from routepack_opt.residency.simulator.directory import Edit
from routepack_opt.residency.traces.windows import synthetic_workload

if TYPE_CHECKING:
    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.simulator.layout import Layout

SCENE = scene_of(
    Package.load("paper"), num_layers=2, num_experts=16, top_k=2, expert_bytes=4 * 2**20, budget_copies=1.5
)
WORKLOAD = synthetic_workload(
    "deepseek-v2-lite", "decode", 16, num_layers=2, num_experts=16, top_k=2, num_windows=20, window_tokens=64
)


@dataclass
class Scripted:
    """Adds one replica an expert and window, and writes down what it sees."""

    max_edits: int | None = None
    name: str = "scripted"
    mapping: str = "nearest"
    seen: list[tuple[int, int, int]] = field(default_factory=list)

    def start(self, scene: Scene, start_layout: Layout, profile: np.ndarray) -> Layout:
        return start_layout.primaries()

    def decide(self, view: PolicyView) -> list[Edit]:
        assert (view.demand == WORKLOAD[view.window]).all()
        self.seen.append((view.window, int(view.layout.count.sum()), len(view.directory.pending)))
        wanted = []
        for expert in range(16):
            here = view.layout.replicas(0, expert)[0]
            wanted.append(addition(0, expert, here.tier, (here.chiplet + 1 + len(self.seen)) % 16))
        return [Edit("no-op"), *wanted]


def test_u_max_and_publication() -> None:
    policy = Scripted(max_edits=1)
    run = run_policy(SCENE, WORKLOAD, policy)
    assert run.first_window == WORKLOAD.profile_windows == 2
    assert len(run.routed_s) == 18
    assert run.copies.max() <= 1
    (window, count, pending), (_, later, _) = policy.seen[:2]
    assert (window, count, pending) == (2, 32, 0)
    assert later <= 33  # submitted after window 2: published after window 3 at the earliest


def test_rows_add_up() -> None:
    run = run_policy(SCENE, WORKLOAD, Scripted())
    assert (run.token_reads.sum(axis=1) == 2 * 2 * 64).all()
    assert np.allclose(run.edp, run.energy_j * run.end_to_end_s)
    assert (run.end_to_end_s >= run.routed_s).all()
    assert (run.streamed_bytes.sum(axis=1) == run.reads.sum(axis=1) * SCENE.expert_bytes[0]).all()
    assert run.migrated_bytes.sum() <= run.copies.sum() * SCENE.expert_bytes[0]
    assert run.refused.sum() > 0  # budget and regions are finite
    assert 0.0 <= run.read_hit_rate <= 1.0
    assert 0.0 <= run.token_hit_rate <= 1.0


def test_same_windows_same_figures() -> None:
    start = start_of(SCENE, WORKLOAD)
    one, two = (run_policy(SCENE, WORKLOAD, FixedReplicas(), start=start) for _ in range(2))
    assert (one.routed_s == two.routed_s).all()
    assert (one.copies == 0).all()
    assert one.pressures.shape == (18, 4)


def test_event_level_runs() -> None:
    run = run_policy(SCENE, WORKLOAD.array(), Static(), level="event", start=start_of(SCENE, WORKLOAD), first_window=15)
    assert len(run.routed_s) == 5
    assert (run.routed_s > 0).all()


def test_tokens_by_tier() -> None:
    layout, _ = start_of(SCENE, WORKLOAD)
    demand = WORKLOAD[3]
    slots = np.where(demand > 0, 0, -1).astype(np.int8)
    expected = [int(demand[layout.tier[:, :, 0] == tier].sum()) for tier in range(3)]
    assert tokens_by_tier(layout, demand, slots).tolist() == expected


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=r"first_window: 20 is not in 0\.\.19"):
        run_policy(SCENE, WORKLOAD, Static(), first_window=20)
    layout, profile = start_of(SCENE, WORKLOAD)
    with pytest.raises(InvalidInput, match=r"workload: demand \(2, 15, 16\); expected \(2, 16, 16\)"):
        run_policy(SCENE, WORKLOAD, Static(), start=(layout, profile[:, :15]))
    with pytest.raises(InvalidInput, match=r"hotness.keep: 1.0"):
        Hotness((1, 1, 1), keep=1.0)


def test_hotness_means() -> None:
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 9, (5, 2, 3, 4)).astype(np.int32)
    windows[:, 1, 2] = 0
    hotness = Hotness((2, 3, 4), keep=0.75)
    expected = windows[0].astype(float)
    for window, demand in enumerate(windows):
        hotness.update(demand, window)
        expected = 0.75 * expected + 0.25 * demand
    assert np.allclose(hotness.demand, expected, rtol=1e-6)
    assert np.allclose(hotness.hot, expected.sum(axis=2))
    assert hotness.last_used[0, 0] == 4
    assert hotness.last_used[1, 2] == -1
    assert (hotness.volatility >= 0).all()
    assert (hotness.forecast(0) == np.rint(hotness.demand[0] * 16)).all()


def test_source_entropy() -> None:
    hotness = Hotness((1, 3, 4))
    demand = np.array([[[5, 5, 5, 5], [7, 0, 0, 0], [0, 0, 0, 0]]], dtype=np.int32)
    hotness.update(demand, 0)
    assert np.allclose(hotness.entropy(0), [1.0, 0.0, 0.0])


def test_warmup() -> None:
    warmup()


def test_a_copy_asked_for_twice_was_not_counted_at_all() -> None:
    class Twice(Scripted):
        def decide(self, view: PolicyView) -> list[Edit]:
            wanted = super().decide(view)[1]
            return [wanted, wanted] if len(self.seen) == 1 else []

    run = run_policy(SCENE, WORKLOAD, Twice())
    assert (run.copies.sum(), run.refused.sum()) == (1, 1) and run.migrated_bytes.sum() > 0
