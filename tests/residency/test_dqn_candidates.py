"""Candidate edits: mask against the directory's own rules, features, and the policy of a frozen network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from routepack_opt.residency.control.run_windows import run_policy
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.dqn import candidate_kernels as kernels
from routepack_opt.residency.dqn.candidates import FEATURES, KINDS, CandidateMaker, warmup
from routepack_opt.residency.dqn.reward import Reward
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import scene_of
from routepack_opt.residency.mapping.balance_map import balance_map
from routepack_opt.residency.simulator.stage import StageModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIB = float(1 << 20)


def small_scene(num_layers: int = 3, num_experts: int = 12, budget: float = 1.3):
    return scene_of(
        Package.load("paper"), num_layers=num_layers, num_experts=num_experts, top_k=2, expert_bytes=12 * MIB,
        budget_copies=budget,
    )  # fmt: skip


def windows(scene, count: int, seed: int = 0) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    rates = rng.gamma(0.7, 40.0, (scene.num_layers, scene.num_experts, 1))
    shape = (scene.num_layers, scene.num_experts, scene.num_chiplets)
    return [rng.poisson(np.broadcast_to(rates / 4, shape)).astype(np.int32) for _ in range(count)]


class Wanderer:
    """Takes random legal candidates and hands every window to ``look``."""

    name, mapping, max_edits = "wanderer", "balance", 1

    def __init__(self, look, seed: int = 0, kinds: Sequence[str] = KINDS) -> None:
        self.look, self.rng, self.kinds = look, np.random.default_rng(seed), kinds

    def start(self, scene, start_layout, profile):
        self.maker = CandidateMaker(scene)
        return start_layout

    def decide(self, view):
        found = self.maker.make(view)
        self.look(self, view, found)
        rows = [row for row in np.flatnonzero(found.legal) if found.kind(row) in self.kinds]
        row = int(self.rng.choice(rows))
        self.maker.chosen(found, row, view.window)
        return [found.edit(row)]


def wander(scene, look, count: int = 24, seed: int = 0, kinds: Sequence[str] = KINDS):
    demand = windows(scene, count, seed)
    profile = demand[0].astype(np.float64)
    return run_policy(
        scene, demand, Wanderer(look, seed, kinds), start=(popularity_layout(scene, profile), profile), first_window=0
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1.0, 1.3, 2.5])
def test_the_mask_is_the_directorys(seed: int, budget: float) -> None:
    seen: dict[str, int] = {}

    def look(policy, view, found) -> None:
        assert found.legal[0] and found.kind(0) == "no-op"
        for row in range(len(found)):
            edit = found.edit(row)
            reason = view.directory.why_not(edit, view.window)
            if found.legal[row]:
                assert not reason, (edit, reason)
                seen[edit.kind] = seen.get(edit.kind, 0) + 1
            elif not view.directory.pending and (edit.layer, edit.expert) not in policy.maker._retained:
                assert reason, edit

    run = wander(small_scene(budget=budget), look, seed=seed)
    assert run.refused.sum() == 0
    assert {"no-op", "promote"} <= set(seen)
    assert budget == 1.0 or {"evict", "retain"} <= set(seen)


def test_features_are_finite_and_in_range() -> None:
    def look(policy, view, found) -> None:
        assert found.features.shape == (len(found), len(FEATURES)) and found.features.dtype == np.float32
        assert np.isfinite(found.features).all() and np.abs(found.features).max() < 50
        assert (found.features[:, : len(KINDS)].sum(axis=1) == 1).all()
        kinds = found.features[:, : len(KINDS)].argmax(axis=1)
        assert [KINDS[kind] for kind in kinds] == [found.kind(row) for row in range(len(found))]
        assert len(found) <= 1 + 2 * kernels.MAX_EDITS

    wander(small_scene(), look)


def test_candidates_do_not_change_what_they_look_at() -> None:
    def look(policy, view, found) -> None:
        layout = view.layout
        before = layout.tier.copy(), layout.chiplet.copy(), layout.free_bytes()
        again = CandidateMaker(view.scene, layers=3).make(view)
        twice = CandidateMaker(view.scene, layers=3).make(view)
        assert (again.features == twice.features).all() and (again.edits == twice.edits).all()
        for old, new in zip(before, (layout.tier, layout.chiplet, layout.free_bytes()), strict=True):
            assert (old == new).all()

    wander(small_scene(), look, count=6)


def test_a_retained_replica_is_left_alone() -> None:
    retained: list[tuple[int, int, int]] = []

    def look(policy, view, found) -> None:
        for row in np.flatnonzero(found.legal):
            edit = found.edit(row)
            for layer, expert, until in retained:
                assert (edit.layer, edit.expert) != (layer, expert) or view.window >= until or row == 0
        for (layer, expert), until in policy.maker._retained.items():
            retained.append((layer, expert, until))

    wander(small_scene(), look, kinds=("no-op", "retain"))
    assert retained


def naive_seconds(scene, layout, demand) -> float:
    model = StageModel(scene)
    return model.evaluate(layout, demand, balance_map(model.tables, layout, demand)).routed_s


def test_reward_is_the_counterfactual_of_the_whole_window() -> None:
    """Against copies of the layout with the edit done, window by window; other layers as in the window just seen."""
    checked = 0
    scene = small_scene()

    def look(policy, view, found) -> None:
        nonlocal checked
        reward = Reward(scene, mu1=0.0, mu2=0.01)
        demand = view.demand  # the window just seen also follows: then all layers agree with their times now
        with_layout = naive_seconds(scene, view.layout, demand)
        for row in np.flatnonzero(found.legal)[::7]:
            edit, other = found.edit(row), view.layout.copy()
            changed = 0
            if edit.kind == "evict":
                other.remove(edit.layer, edit.expert, edit.tier, edit.chiplet)
                changed = 1
            elif edit.copies:
                changed = 1 + (edit.drop is not None)
                if edit.drop is not None:
                    other.remove(edit.layer, edit.expert, *edit.drop)
                other.add(edit.layer, edit.expert, edit.tier, edit.chiplet)
            gain = (with_layout - naive_seconds(scene, other, demand)) / with_layout
            wanted = 10.0 * scene.num_layers * (gain - 0.01 * changed / scene.num_layers)
            assert reward.of(view, found, int(row), [demand]) == pytest.approx(wanted, abs=1e-9)
            checked += 1

    wander(scene, look, kinds=("no-op",))  # nothing is migrated: the times seen are those of the layout
    assert checked > 20


def test_exposed_migration_lowers_the_reward() -> None:
    scene = small_scene()

    def look(policy, view, found) -> None:
        for row in np.flatnonzero(found.legal)[::9]:
            free, dear = (
                Reward(scene, mu1=mu1, mu2=0.0).of(view, found, int(row), [view.demand]) for mu1 in (0.0, 1.0)
            )
            assert dear <= free
            if not found.edit(row).copies:
                assert dear == free

    wander(scene, look, count=8)


def test_warmup() -> None:
    warmup()
