"""A plan keeps its word under the placement that the late moves left."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from random_windows import random_cost, random_demand

from routepack_opt import Constraints, CostModel, Stage, Topology, Window, plan_window
from routepack_opt.cost import score
from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.late_plan import late_share, with_placement
from routepack_opt.models.placement import rank_loads
from routepack_opt.planner import place_window


def make_window(seed: int) -> tuple[Window, np.random.Generator]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 30, 24)
    return Window(lengths, random_demand(rng, lengths, 3, 8)), rng


@pytest.mark.parametrize("seed", range(8))
def test_any_placement_gives_a_plan_that_verifies(seed: int) -> None:
    window, rng = make_window(seed)
    topology = Topology(ep=2, shards=2)
    plan = plan_window(window, topology, token_cap=60, cost=random_cost(rng, 3), budget_steps=2000, seed=seed)
    previous, slots = (np.stack([rng.permutation(8) for _ in range(3)]) for _ in range(2))
    changed = with_placement(plan, window, slots, previous, Constraints(), ("why",))
    changed.verify(window)
    assert changed.score == score(window, plan.cells, slots, topology, 60, plan.cost)
    assert changed.moved_experts.tolist() == (slots // 4 != previous // 4).sum(axis=1).tolist()
    assert changed.cells == plan.cells and "why" in changed.notes
    same = with_placement(plan, window, plan.logical_to_slot, np.tile(np.arange(8), (3, 1)), plan.constraints)
    assert same == plan


def test_a_plan_behind_its_seed_says_which_cap_it_obeyed() -> None:
    window, _ = make_window(1)
    cost = CostModel((Stage("none", 0.0, 0.0),))
    plan = plan_window(window, Topology(ep=2, shards=2), token_cap=60, cost=cost, budget_steps=2000)
    identity = np.tile(np.arange(8), (3, 1))
    worst = np.argsort(np.argsort(-window.total_load, axis=1, kind="stable"), axis=1)  # the hottest on one rank
    changed = with_placement(plan, window, worst, identity, Constraints())
    changed.verify(window)
    assert (changed.rows, *changed.score) > (plan.seed_rows or 0, *(plan.seed_score or ()))
    assert changed.constraints.max_moved == pytest.approx(changed.moved_experts.sum() / 24)
    assert any(note.startswith("max_moved") for note in changed.notes)


@pytest.mark.parametrize(
    ("limit", "cap", "moved", "share"),
    [
        (None, None, [3, 0], None),
        (None, 0.25, [3, 0], 0.25),
        (None, 4, [3, 0], 0.5),
        (None, 40, [3, 0], 1.0),
        (0.5, None, [3, 0], 0.125),
        (0.5, None, [4, 0], 0.0),
        (0.5, 0.0, [0, 0], 0.0),
    ],
)
def test_shares_of_the_second_wave(limit: float | None, cap: float | None, moved: list[int], share: float) -> None:
    assert late_share(Constraints(max_moved=limit), cap, np.array(moved), 8) == share


def test_caps_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInput, match="late_moves"):
        late_share(Constraints(), -1, np.array([0]), 8)


@pytest.mark.parametrize("seed", range(5))
def test_place_window_lowers_the_fullest_rank_and_repeats_itself(seed: int) -> None:
    window, rng = make_window(seed)
    topology = Topology(ep=4)
    previous = np.stack([rng.permutation(8) for _ in range(3)])
    slots = place_window(window, topology, previous=previous, seed=seed)
    assert (np.sort(slots, axis=1) == np.arange(8)).all()
    fullest = [rank_loads(window.total_load, s // 2, 4).max(axis=1) for s in (slots, previous)]
    assert (fullest[0] <= fullest[1]).all()
    assert (place_window(window, topology, previous=previous, seed=seed) == slots).all()
    assert ((slots == previous) | (slots // 2 != previous // 2)).all()  # who stays in a rank keeps the slot
    assert (place_window(window, topology, previous=previous, max_moved=0.0) == previous).all()
