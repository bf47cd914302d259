"""No layout and no placement gets below the layout bound, and the checker derives what it claims."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import Constraints, CostModel, Stage, Topology, Window, plan_window
from routepack_opt.errors import VerificationError
from routepack_opt.models.atoms import AtomSet, build_atoms
from routepack_opt.models.layout_bounds import LayoutBound, averaging_bound, layout_bound
from routepack_opt.models.layout_bounds_attention import StageAtoms, _functions, forced_costs, truncation
from routepack_opt.models.placement_bounds import placement_bounds
from routepack_opt.synth import synth
from routepack_opt.verify import verify_plan
from routepack_opt.verify.bound import truncated
from routepack_opt.verify.facts import read_facts

TOPOLOGIES = [
    Topology(dp=1, ep=2, shards=1),
    Topology(dp=2, ep=2, shards=1),
    Topology(dp=2, ep=2, shards=2),
    Topology(dp=3, ep=2, shards=[[0, 2], [1]]),
    Topology(dp=4, ep=2, shards=[[1], [0, 2, 3]]),
    Topology(dp=4, ep=2, shards=2),
]


def feasible_layouts(atoms: AtomSet, num_cells: int, cap: int, most: int | None) -> np.ndarray:
    """int [S, n]: every assignment of atoms to cells that keeps the cap, the sample limit and no cell empty."""
    cells = np.array(list(itertools.product(range(num_cells), repeat=atoms.num_atoms)))
    inside = cells[:, :, None] == np.arange(num_cells)
    counts = inside.sum(axis=1)
    fits = (inside * atoms.padded[:, None]).sum(axis=1) <= cap
    keep = (counts > 0) & (fits | (counts == 1))
    if most is not None:
        keep &= (inside * atoms.samples[:, None]).sum(axis=1) <= most
    return cells[keep.all(axis=1)]


def optimum(
    atoms: AtomSet, cells: np.ndarray, num_rows: int, topology: Topology, cap: int, cost: CostModel
) -> tuple[float, np.ndarray]:
    """Least slowest shard over all given layouts and all placements; and v, the sorted stage-0 costs [S, X]."""
    num_cells, num_shards = num_rows * topology.dp, topology.num_shards
    inside = (cells[:, :, None] == np.arange(num_cells)).astype(np.int64)
    tokens, squares = (np.einsum("snb,n->sb", inside, part) for part in (atoms.tokens, atoms.squares))
    shard_cells = [
        [r * topology.dp + d for d in topology.shards[g]] for r in range(num_rows) for g in range(num_shards)
    ]
    stage_costs = [
        np.stack(
            [(s.alpha * tokens / cap + s.beta * squares / cap**2)[:, at].max(axis=1) for at in shard_cells], axis=1
        )
        for s in cost.stages
    ]
    attention = sum(stage_costs, np.zeros((len(cells), len(shard_cells))))
    members = np.stack([inside[:, :, at].sum(axis=2) for at in shard_cells], axis=1)  # [S, X, n]
    demand = np.einsum("sxn,nle->sxle", members, atoms.demand_of(np.arange(atoms.num_atoms)).astype(np.int64))
    gamma = cost.expert_weights(atoms.demand.shape[1])
    num_experts = atoms.demand.shape[2]
    halves = [h for h in itertools.combinations(range(num_experts), num_experts // 2) if 0 in h]
    peaks = [
        np.maximum(demand[..., list(half)].sum(axis=3), demand.sum(axis=3) - demand[..., list(half)].sum(axis=3))
        for half in halves
    ]  # per placement of a layer [S, X, L]
    best = math.inf
    for picks in itertools.product(range(len(halves)), repeat=len(gamma)):
        experts = sum(gamma[layer] * peaks[pick][:, :, layer] / cap for layer, pick in enumerate(picks))
        costs = (attention + experts).reshape(len(cells), num_rows, num_shards)
        slowest = costs.max(axis=2).sum(axis=1) if cost.sync == "row" else costs.sum(axis=1).max(axis=1)
        best = min(best, float(slowest.min()))
    return best, -np.sort(-stage_costs[0], axis=1) if stage_costs else attention


def bound_of(
    window: Window, topology: Topology, cap: int, cost: CostModel, rules: Constraints, num_rows: int, **extra: bool
) -> LayoutBound:
    peaks, _ = placement_bounds(window.total_load, topology.ep)
    return layout_bound(build_atoms(window, rules, cap), num_rows, peaks, topology, cap, cost, rules, **extra)


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[Window, Topology, int, CostModel, Constraints, int]:
    """At most 6 atoms (4 with four cells or more), long samples likely."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    num_rows = draw(st.integers(1, max(1, 4 // topology.dp)))
    num_cells = num_rows * topology.dp
    most_atoms = 7 if num_cells < 4 else 6
    num_atoms = draw(st.integers(num_cells, most_atoms))
    cap = draw(st.sampled_from([5, 12, 100]))
    oversize = draw(st.booleans())
    size = st.one_of(st.integers(1, cap), st.integers(max(1, cap // 2), cap + (cap // 2 if oversize else 0)))
    lengths = np.array(draw(st.lists(size, min_size=num_atoms, max_size=num_atoms)))
    groups = None
    if draw(st.booleans()):
        groups = np.array([draw(st.integers(0, num_atoms - 1)) for _ in lengths])
    rules = Constraints(
        pad_multiple=draw(st.sampled_from([1, 1, 3])),
        max_samples_per_cell=draw(st.sampled_from([None, None, 2, 3])),
        groups=None if groups is None else "cell",
        oversize="alone",
    )
    stages = tuple(
        Stage(f"s{k}", draw(st.sampled_from([0.0, 1.0, 0.3])), draw(st.sampled_from([0.0, 0.5, 7.0])))
        for k in range(draw(st.integers(1, 2)))
    )
    gamma = draw(st.sampled_from([0.0, 0.01, 1.0]))
    cost = CostModel(stages, expert_weight=gamma, sync=draw(st.sampled_from(["shard", "row"])))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    demand = rng.integers(0, 2 + lengths[:, None, None] // 2, (num_atoms, 1 + num_atoms % 2, 4))
    return Window(lengths, demand, group_ids=groups), topology, cap, cost, rules, num_rows


@given(tiny_cases())
@settings(max_examples=150, deadline=None)
def test_no_layout_and_no_placement_is_below_the_bound(case: Any) -> None:
    window, topology, cap, cost, rules, num_rows = case
    try:
        atoms = build_atoms(window, rules, cap)
    except Exception as error:  # a group of more samples than a cell may hold
        assert "max_samples_per_cell" in str(error)
        return
    cells = feasible_layouts(atoms, num_rows * topology.dp, cap, rules.max_samples_per_cell)
    if not len(cells):
        return
    best, sorted_costs = optimum(atoms, cells, num_rows, topology, cap, cost)
    for thorough in (False, True):
        bound = bound_of(window, topology, cap, cost, rules, num_rows, thorough=thorough)
        assert bound.value <= best * (1 + 1e-12)
    peaks, _ = placement_bounds(window.total_load, topology.ep)
    assert bound.value >= averaging_bound(window.lengths, peaks, topology, cap, cost).value * (1 - 1e-9)
    first = cost.stages[0]
    own = first.alpha * atoms.tokens / cap + first.beta * atoms.squares / cap**2
    seen = StageAtoms(atoms.padded, atoms.samples, own, cap, rules.max_samples_per_cell or 0)
    forced = forced_costs(seen, [len(ranks) for ranks in topology.shards] * num_rows)
    assert (forced <= sorted_costs.min(axis=0) * (1 + 1e-12)).all()
    assert (np.diff(forced) <= 0).all()


def test_one_long_sample_charges_its_row() -> None:
    """Cap 10, one DP rank, beta only: (10), (5, 5), (5, 5) cost 100 + 50 + 50 and nothing less is possible."""
    window = Window(np.array([10, 5, 5, 5, 5]), np.zeros((5, 1, 2), dtype=np.int64))
    cost = CostModel((Stage("full", 0.0, 100.0),))
    bound = bound_of(window, Topology(dp=1, ep=1), 10, cost, Constraints(), 3)
    assert bound.value == pytest.approx(200.0)
    # two DP ranks: the row of the long sample costs 100, its other cell holds (5, 5), one row of (5), (5) is left
    bound = bound_of(window, Topology(dp=2, ep=2, shards=1), 10, cost, Constraints(), 2)
    assert bound.kind == "truncation"
    assert bound.value == pytest.approx(125.0)
    assert averaging_bound(window.lengths, np.zeros(1, np.int64), Topology(dp=2, ep=1, shards=1), 10, cost).value < 101


def test_two_long_samples_do_not_share_a_cell() -> None:
    """Cutting samples would pack 0.6 + 0.4 of 0.6; the premium for more than half the cap does not."""
    window = Window(np.array([10, 6, 6, 6]), np.zeros((4, 1, 2), dtype=np.int64))
    cost = CostModel((Stage("full", 0.0, 100.0),))
    bound = bound_of(window, Topology(dp=2, ep=2, shards=1), 10, cost, Constraints(), 2, thorough=False)
    assert bound.value == pytest.approx(136.0)  # 100 and 36: the optimum


def test_samples_over_the_cap_stand_alone() -> None:
    window = Window(np.array([20, 6, 6, 6]), np.zeros((4, 1, 2), dtype=np.int64))
    cost = CostModel((Stage("full", 0.0, 100.0),))
    rules = Constraints(oversize="alone")
    assert bound_of(window, Topology(dp=2, ep=2, shards=1), 10, cost, rules, 2).value == pytest.approx(436.0)


@given(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_dual_feasible_functions_sum_to_at_most_one_in_a_cell(cap: int, sizes: list[int]) -> None:
    padded = np.array(sizes, dtype=np.int64)
    seen = StageAtoms(padded, np.ones_like(padded), padded.astype(float), cap)
    values = _functions(seen, thorough=True)
    for size in range(1, len(sizes) + 1):
        for cell in itertools.combinations(range(len(sizes)), size):
            if padded[list(cell)].sum() <= cap or len(cell) == 1:
                assert values[:, list(cell)].sum(axis=1).max() <= 1 + 1e-12


def heavy_window(num_samples: int = 96, seed: int = 0) -> Window:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(np.ceil(rng.lognormal(4.0, 0.8, num_samples)), 300).astype(np.int64)
    lengths[0] = 500
    return Window(lengths, rng.integers(0, 9, (num_samples, 2, 4)), group_ids=np.arange(num_samples) // 2)


HEAVY_COST = CostModel((Stage("linear", 3.0, 0.0), Stage("full", 1.0, 9.0)), expert_weight=0.1)


def heavy_plan(**rules: Any) -> tuple[dict[str, Any], Window]:
    window = heavy_window()
    topology = Topology(dp=8, ep=2, shards=2)
    plan = plan_window(
        window, topology, token_cap=500, cost=HEAVY_COST, budget_steps=200, constraints=Constraints(**rules)
    )
    return plan.to_json(), window


@pytest.mark.parametrize(
    "rules",
    [{}, {"pad_multiple": 4}, {"max_samples_per_cell": 5}, {"groups": "cell", "oversize": "alone"}, {"groups": "rank"}],
)
def test_the_checker_derives_what_the_planner_claims(rules: dict[str, Any]) -> None:
    plan, window = heavy_plan(**rules)
    certificate = plan["certificates"]["layout"]
    assert certificate["kind"] == "truncation"
    assert any("truncation" in sentence for sentence in verify_plan(plan, window))
    facts, _ = read_facts(plan, window)
    proved = truncated(facts, certificate)
    assert certificate["value"] == pytest.approx(float(proved.value), rel=1e-9)
    averages = truncated(facts, {"stages": []})
    assert proved.value > averages.value


def test_unequal_shards_and_row_synchronisation_are_checked_too() -> None:
    window = heavy_window(seed=3)
    topology = Topology(dp=8, ep=2, shards=[[0, 3, 4, 7, 5], [1, 2, 6]])
    cost = CostModel(HEAVY_COST.stages, expert_weight=(0.1, 0.3), sync="row")
    plan = plan_window(window, topology, token_cap=500, cost=cost, budget_steps=50)
    assert plan.certificates["layout"]["kind"] == "truncation"
    plan.verify(window)


def _first(plan: dict[str, Any]) -> Any:
    return plan["certificates"]["layout"]["stages"][0]


MUTATIONS: list[tuple[str, Any, str]] = [
    ("max_cell", lambda v: v * 9 // 10, "max_cell says"),
    ("max_cell", lambda v: -1, "max_cell"),
    ("max_cell", lambda v: 1.5, "max_cell"),
    ("unit", lambda v: 0, "'unit'"),
    ("unit", lambda v: v * 1e-30, "prices sum"),
    ("unit", lambda v: v * 1e9, "is proved"),
    ("unit", lambda v: "x", "'unit'"),
    ("stage", lambda v: 2, "stage 2"),
    ("stage", lambda v: True, "stage True"),
    ("table", lambda v: v[:-1], "max_cell says"),
    ("table", lambda v: v + v[-1:], "appears twice"),
    ("table", lambda v: [[a, 0] for a, _ in v], "is proved"),
    ("table", lambda v: [[a, -b] for a, b in v], "negative"),
    ("table", lambda v: [[499, 1]], "padded length 499"),
    ("table", lambda v: [[500]], "pair"),
    ("table", lambda v: None, "'table'"),
]


@pytest.mark.parametrize(("field", "change", "words"), MUTATIONS, ids=[f"{f}-{w}" for f, _, w in MUTATIONS])
def test_false_certificates_are_refused(field: str, change: Any, words: str) -> None:
    plan, window = heavy_plan()
    plan = copy.deepcopy(plan)
    _first(plan)[field] = change(_first(plan)[field])
    with pytest.raises(VerificationError, match=words) as caught:
        verify_plan(plan, window)
    assert caught.value.claim == "certificates.layout"


def test_a_stage_counts_once() -> None:
    plan, window = heavy_plan()
    stages = plan["certificates"]["layout"]["stages"]
    stages.append(copy.deepcopy(stages[0]))
    with pytest.raises(VerificationError, match="listed twice"):
        verify_plan(plan, window)
    plan["certificates"]["layout"]["stages"] = 3
    with pytest.raises(VerificationError, match="list of objects"):
        verify_plan(plan, window)


def test_more_rows_weaken_the_bound_only_as_far_as_true() -> None:
    """The bound is about plan.rows rows; more row-shards can only charge more."""
    window, topology, rules = heavy_window(), Topology(dp=4, ep=2, shards=1), Constraints()
    values = [bound_of(window, topology, 500, HEAVY_COST, rules, rows).value for rows in (4, 5, 6)]
    assert values == sorted(values)


def test_a_published_shape_is_proved_much_better_than_by_averaging() -> None:
    window = synth("tiny", 512, seed=0)
    topology = Topology(dp=8, ep=8, shards=1)
    cost = CostModel.default(window.num_layers, 8192)
    rules = Constraints()
    num_rows = math.ceil(window.lengths.sum() / (8 * 8192))
    peaks, _ = placement_bounds(window.total_load, 8)
    plain = averaging_bound(window.lengths, peaks, topology, 8192, cost)
    better = bound_of(window, topology, 8192, cost, rules, num_rows)
    assert better.experts == pytest.approx(plain.experts)
    assert better.attention > 1.02 * plain.attention


@pytest.mark.parametrize("factor", [1e-300, 1e-8, 1e12])
def test_scaling_the_costs_scales_the_bound(factor: float) -> None:
    window, topology, rules = heavy_window(), Topology(dp=4, ep=2, shards=1), Constraints()
    plain = bound_of(window, topology, 500, CostModel(HEAVY_COST.stages, 0.0), rules, 4).value
    stages = tuple(Stage(s.name, s.alpha * factor, s.beta * factor) for s in HEAVY_COST.stages)
    scaled = bound_of(window, topology, 500, CostModel(stages, 0.0), rules, 4).value
    assert scaled == pytest.approx(plain * factor, rel=1e-6)


def test_nothing_to_bound() -> None:
    none = StageAtoms(np.array([3, 2]), np.array([1, 1]), np.zeros(2), 4)
    assert truncation(none, [1, 1], 1) is None
    equal = StageAtoms(np.full(8, 2), np.ones(8, dtype=np.int64), np.ones(8), 4)
    assert truncation(equal, [2, 2], 2) is None
    huge_cap = StageAtoms(np.array([1 << 40, 2]), np.array([1, 1]), np.array([5.0, 1.0]), 1 << 41)
    assert truncation(huge_cap, [1, 1], 1) is None  # no checker could fill the knapsack


def test_the_planner_keeps_the_bound_of_rational_arithmetic() -> None:
    plan, window = heavy_plan()
    facts, _ = read_facts(plan, window)
    assert Fraction(plan["certificates"]["layout"]["value"]) <= truncated(facts, plan["certificates"]["layout"]).value
