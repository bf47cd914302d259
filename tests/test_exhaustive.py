"""Trying everything on tiny windows: each class of layouts once, the lexicographic optimum, None for larger windows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from brute_force import legal_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import Case, random_cost, random_demand

from routepack_opt import Constraints, CostModel, Stage, Topology, Window, plan_window, score
from routepack_opt.models import exhaustive as module
from routepack_opt.models.atoms import build_atoms
from routepack_opt.models.exhaustive import exhaustive
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.placement import slots_from_ranks
from routepack_opt.solvers.annealing.chain import ChainProblem

CAP = 40


def problem_of(case: Case, num_rows: int) -> tuple[ChainProblem, np.ndarray | None]:
    """The case as arrays, samples in their own order."""
    window, topology, rules = case.window, case.topology, case.constraints
    num_samples, num_layers, num_experts = window.demand.shape
    groups = rules.group_numbers(window.group_ids, num_samples)
    share = rules.max_moved
    per_rank = num_experts // topology.ep
    problem = ChainProblem(
        padded=window.lengths,
        tokens=window.lengths,
        squares=window.lengths**2,
        samples=np.ones(num_samples, dtype=np.int64),
        pinned=np.zeros(num_samples, dtype=np.bool_),
        demand=window.demand,
        shards=topology.shards,
        num_rows=num_rows,
        num_ranks=topology.dp,
        cap=CAP,
        max_samples=rules.max_samples_per_cell or 0,
        equal_samples=rules.equal_samples_per_rank,
        alpha=np.array([s.alpha for s in case.cost.stages]),
        beta=np.array([s.beta for s in case.cost.stages]),
        gamma=case.cost.expert_weights(num_layers),
        sync=case.cost.sync,
        num_expert_ranks=topology.ep,
        home=np.tile(np.arange(num_experts) // per_rank, (num_layers, 1)),
        move_budget=np.full(num_layers, -1 if share is None else int(share * num_experts)),
    )
    return problem, groups


def tiny(rng: np.random.Generator, most: int = 6, **rules: object) -> tuple[Case, int]:
    dp, num_rows = (int(v) for v in [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1)][int(rng.integers(6))])
    num_shards = int(rng.choice([g for g in (1, 2) if dp % g == 0]))
    lengths = rng.integers(1, 25, int(rng.integers(dp * num_rows, most + 1)))
    num_layers = int(rng.integers(1, 3))
    window = Window(lengths, random_demand(rng, lengths, num_layers, 4), group_ids=rng.integers(0, 3, lengths.size))
    uneven = dp > 2 and rng.random() < 0.3
    topology = Topology(dp=dp, ep=2, shards=[[1], [0, *range(2, dp)]] if uneven else num_shards)
    return Case(window, topology, CAP, random_cost(rng, num_layers), Constraints(**rules)), num_rows  # type: ignore[arg-type]


def draw_rules(rng: np.random.Generator) -> dict[str, object]:
    return {
        "max_samples_per_cell": int(rng.integers(2, 4)) if rng.random() < 0.3 else None,
        "equal_samples_per_rank": bool(rng.random() < 0.3),
        "groups": "rank" if rng.random() < 0.3 else None,
        "oversize": "alone",
        "max_moved": float(rng.choice([0.0, 0.5, 1.0])) if rng.random() < 0.3 else None,
    }


def canonical(case: Case, cells: np.ndarray, num_rows: int, cells_may_move: bool) -> tuple[object, ...]:
    """Least of all equal layouts: rows, shards of one size, and cells of a row-shard or ranks of a shard permuted."""
    shards = case.topology.shards
    grid = [[tuple(np.flatnonzero(cells == r * case.topology.dp + d)) for d in range(case.topology.dp)]
            for r in range(num_rows)]  # fmt: skip
    forms = []
    orders = [[ranks] if cells_may_move else itertools.permutations(ranks) for ranks in shards]
    for picks in itertools.product(*map(list, orders)):
        for order in itertools.permutations(range(len(shards))):
            if [len(shards[g]) for g in order] != [len(ranks) for ranks in shards]:
                continue
            rows = [[[row[d] for d in picks[g]] for g in order] for row in grid]
            if cells_may_move:
                rows = [[sorted(part) for part in row] for row in rows]
            forms.append(tuple(sorted(tuple(map(tuple, row)) for row in rows)))
    return min(forms)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_class_of_equal_layouts_comes_exactly_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case, num_rows = tiny(rng, most=5, **draw_rules(rng))
    problem, groups = problem_of(case, num_rows)
    may_move = groups is None and not problem.equal_samples
    layouts = module._layouts(problem, may_move, groups)
    found = [] if layouts is None else [canonical(case, cells, num_rows, may_move) for cells in layouts]
    expected = {canonical(case, cells, num_rows, may_move) for cells in legal_layouts(case, num_rows)}
    assert len(set(found)) == len(found)
    assert set(found) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_answer_is_the_lexicographic_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case, num_rows = tiny(rng, **draw_rules(rng))
    problem, groups = problem_of(case, num_rows)
    answer = exhaustive(problem, cells_may_move=groups is None and not problem.equal_samples, rank_groups=groups)
    layouts = legal_layouts(case, num_rows)
    if not len(layouts):
        assert answer is None
        return
    assert answer is not None
    atoms = build_atoms(case.window, Constraints(), CAP)
    position = np.array([members[0] for members in atoms.members])

    def evaluate(cell_of: np.ndarray, rank_of: np.ndarray) -> tuple[float, ...]:
        cells = cells_from_assignment(atoms, cell_of[position], num_rows, case.topology.dp)
        return score(case.window, cells, slots_from_ranks(rank_of, 2), case.topology, CAP, case.cost)

    best = evaluate(*answer)
    assert ((answer[1] != problem.home).sum(axis=1) <= problem.move_budget).all() or case.constraints.max_moved is None
    ways = [np.array(way) for way in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0))]
    if case.constraints.max_moved is not None:
        ways += [1 - way for way in ways]
    picks = list(itertools.product(ways, repeat=case.window.num_layers))
    for _ in range(60):  # nothing drawn at random is better
        cells, ranks = layouts[int(rng.integers(len(layouts)))], np.array(picks[int(rng.integers(len(picks)))])
        if case.constraints.max_moved is not None and ((ranks != problem.home).sum(axis=1) > problem.move_budget).any():
            continue
        other = evaluate(cells, ranks)
        for mine, theirs in zip(best, other, strict=True):
            if mine != pytest.approx(theirs, rel=1e-11):
                assert mine < theirs
                break


def test_among_equals_the_standing_placement_wins() -> None:
    window = Window([5, 6, 7], np.full((3, 2, 4), 3))
    case = Case(window, Topology(dp=1, ep=2, shards=1), CAP, CostModel((Stage("a", 1.0, 1.0),)), Constraints())
    problem, _ = problem_of(case, 1)
    answer = exhaustive(problem, cells_may_move=True)
    assert answer is not None
    np.testing.assert_array_equal(answer[1], problem.home)


def test_larger_windows_are_left_to_annealing() -> None:
    rng = np.random.default_rng(0)
    for num_samples, num_rows, num_experts in ((512, 16, 8), (30, 4, 4), (6, 2, 32)):
        lengths = rng.integers(1, 5, num_samples)
        window = Window(lengths, random_demand(rng, lengths, 3, num_experts))
        case = Case(window, Topology(dp=2, ep=2, shards=2), CAP, random_cost(rng, 3), Constraints())
        assert exhaustive(problem_of(case, num_rows)[0], cells_may_move=True) is None


def test_the_plan_says_when_everything_was_tried() -> None:
    rng = np.random.default_rng(1)
    lengths = np.array([9, 8, 7, 6, 5, 4])
    plan = plan_window(
        Window(lengths, random_demand(rng, lengths, 2, 4)), Topology(dp=2, ep=2, shards=2), token_cap=CAP,
        budget_steps=1,
    )  # fmt: skip
    assert any("every layout and every placement" in note for note in plan.notes)
