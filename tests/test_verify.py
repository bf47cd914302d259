"""The checker accepts true plans and names the first broken claim of every false one."""

from __future__ import annotations

import ast
import copy
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_plan import naive_plan, small_window

import routepack_opt.verify
from routepack_opt import Constraints, CostModel, Plan, Stage, Topology, Window
from routepack_opt.errors import FormatError, RoutePackError, VerificationError
from routepack_opt.verify import verify_plan
from routepack_opt.verify.bound import averaging
from routepack_opt.verify.facts import read_facts
from routepack_opt.verify.knapsack import Item, TooLarge, heaviest_cell
from routepack_opt.verify.placement import rank_load_bound

TOPOLOGY = Topology(dp=4, ep=2, shards=2)


def good() -> tuple[dict[str, Any], Window]:
    window = small_window()
    return naive_plan(window, TOPOLOGY, 120, num_rows=2), window


def edit(plan: dict[str, Any], path: str, change: Any) -> dict[str, Any]:
    """A copy with one entry changed; ``change`` is a value or a function of the old one."""
    plan = copy.deepcopy(plan)
    target: Any = plan
    *parents, last = [int(k) if k.lstrip("-").isdigit() else k for k in path.split("/")]
    for key in parents:
        target = target[key]
    target[last] = change(target[last]) if callable(change) else change
    return plan


def claim_of(plan: dict[str, Any], window: Window) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_plan(plan, window)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(caught.value.claim + ": ")
    assert caught.value.exit_code == 1
    return caught.value.claim


def test_a_true_plan_passes_and_says_what_was_checked() -> None:
    plan, window = good()
    checked = verify_plan(plan, window)
    words = " | ".join(checked)
    for expected in ("sha256", "every sample exactly once", "score", "rows", "placement", "bound", "one to one"):
        assert expected in words
    Plan.from_json(plan).verify(window)


MUTATIONS: list[tuple[str, Any, str]] = [
    ("window/samples", 13, "window.samples"),
    ("window/layers", 3, "FORMAT"),
    ("window/experts", 9, "FORMAT"),
    ("window/sha256", "0" * 64, "window.sha256"),
    ("window/counts", "predicted", "window.counts"),
    ("window/counts", None, "window.counts"),
    ("seed_score", lambda s: [s[0], s[1], s[2] * 0.99], "seed_score"),
    ("seed_rows", lambda r: r - 1, "seed_score"),
    ("topology/dp", 5, "topology.shards"),
    ("topology/dp", 0, "topology.dp"),
    ("topology/ep", 3, "topology.ep"),
    ("topology/ep", 0, "topology.ep"),
    ("topology/ep", -2, "topology.ep"),
    ("topology/shards", [[0, 1], [2, 2]], "topology.shards"),
    ("topology/shards", [[0, 1], [2]], "topology.shards"),
    ("topology/shards", [[0, 1], [2, 4]], "topology.shards"),
    ("topology/shards", [[0, 1], [2, 3], []], "FORMAT"),
    ("topology/shards", [[0, 2], [1, 3]], "score"),
    ("token_cap", 50, "cells.cap"),
    ("token_cap", 121, "score"),
    ("constraints/min_rows", 3, "constraints.min_rows"),
    ("constraints/row_multiple", 3, "constraints.row_multiple"),
    ("constraints/max_samples_per_cell", 1, "constraints.max_samples_per_cell"),
    ("constraints/pad_multiple", 64, "cells.cap"),
    ("constraints/groups", "cell", "constraints.groups"),
    ("constraints/groups", [0] * 12, "constraints.groups"),
    ("constraints/groups", [0] * 11, "constraints.groups"),
    ("constraints/groups", True, "constraints.groups"),
    ("constraints/max_moved", 2, "FORMAT"),
    ("constraints/oversize", "drop", "FORMAT"),
    ("constraints/wish", 1, "FORMAT"),
    ("rows", 3, "rows"),
    ("cells/0", [], "cells.shape"),
    ("cells/0/0", [], "cells.empty"),
    ("cells/0/0", lambda c: [*c, c[0]], "cells.coverage"),
    ("cells/0/0", lambda c: [*c, 12], "cells.coverage"),
    ("cells/0/0", lambda c: [*c, -1], "cells.coverage"),
    ("cells/0/0", lambda c: c[:-1], "cells.coverage"),
    ("cells/0/0", lambda c: [*c, 1], "cells.coverage"),
    ("cell_tokens/1/2", lambda t: t + 1, "cell_tokens"),
    ("cell_tokens", lambda t: t[:1], "cell_tokens"),
    ("cell_tokens/0", lambda t: t[:1], "cell_tokens"),
    ("total_tokens", lambda t: t - 1, "total_tokens"),
    ("logical_to_slot/1/3", 2, "logical_to_slot"),
    ("logical_to_slot/0/0", -1, "logical_to_slot"),
    ("logical_to_slot/0/0", 8, "logical_to_slot"),
    ("moved_experts/0", 9, "moved_experts"),
    ("score/0", lambda s: s * (1 + 1e-8), "score"),
    ("score/1", lambda s: s * (1 - 1e-8), "score"),
    ("score/2", 0, "score"),
    ("cost/stages/0/alpha", lambda a: a * 1.001, "score"),
    ("cost/stages/0/beta", 0, "score"),
    ("cost/expert_weight", 1.01, "score"),
    ("cost/expert_weight", [1.0], "cost.expert_weight"),
    ("cost/expert_weight", True, "FORMAT"),
    ("cost/sync", "row", "score"),
    ("certificates/rows", None, "certificates.rows"),
    ("certificates/rows/kind", "faith", "certificates.rows"),
    ("certificates/rows/kind", "count", "certificates.rows"),
    ("certificates/rows/kind", "solver", "certificates.rows"),
    ("certificates/rows/cap", 119, "certificates.rows"),
    ("certificates/rows/max_cell", 100, "certificates.rows"),
    ("certificates/rows/max_cell", 120.0, "certificates.rows"),
    ("certificates/rows/max_cell", -1, "certificates.rows"),
    ("certificates/rows/cells", lambda b: b + 1, "certificates.rows"),
    ("certificates/rows/cells", lambda b: b - 1, "certificates.rows"),
    ("certificates/rows/table", lambda t: t[1:], "certificates.rows"),
    ("certificates/rows/table", lambda t: [*t, t[0]], "certificates.rows"),
    ("certificates/rows/table", lambda t: [*t, [201, 1]], "certificates.rows"),
    ("certificates/rows/table/0", lambda e: [e[0], -1], "certificates.rows"),
    ("certificates/rows/table/0", lambda e: [e[0], e[1] + 1], "certificates.rows"),
    ("certificates/rows/table/0", lambda e: [e[0], True], "certificates.rows"),
    ("certificates/rows/table/0", lambda e: [e[0], 1 << 70], "certificates.rows"),
    ("certificates/rows/table", {}, "certificates.rows"),
    ("rows_lower_bound", 2, "rows_lower_bound"),
    ("rows_lower_bound", 3, "rows_lower_bound"),
    ("rows_status", "certified", "rows_status"),
    ("rows_status", "solver-proved", "rows_status"),
    ("certificates/placement", [], "certificates.placement"),
    ("certificates/placement", None, "certificates.placement"),
    ("certificates/placement/1/bound", lambda b: b + 100, "certificates.placement"),
    ("certificates/placement/1/bound", -1, "certificates.placement"),
    ("certificates/placement/0/bound", 10.0, "certificates.placement"),
    ("certificates/placement/0/reached", lambda b: b - 1, "certificates.placement"),
    ("certificates/placement/0/kind", "solver", "certificates.placement"),
    ("certificates/placement/0/kind", 7, "certificates.placement"),
    ("certificates/layout", None, "certificates.layout"),
    ("certificates/layout/kind", "guess", "certificates.layout"),
    ("certificates/layout/kind", ["averaging"], "certificates.layout"),
    ("certificates/layout/attention", lambda v: v * 1.01, "certificates.layout"),
    ("certificates/layout/experts", lambda v: v * 0.99, "certificates.layout"),
    ("certificates/layout/value", lambda v: v * 1.01, "certificates.layout"),
    ("certificates/layout/value", lambda v: v * 0.99, "certificates.layout"),
    ("certificates/layout/value", "high", "certificates.layout"),
    ("bound", lambda b: b * 1.001, "bound"),
    ("bound", lambda b: b * 0.999, "bound"),
    ("bound", 0, "bound"),
    ("gap", lambda g: g + 1e-7, "gap"),
    ("gap", 0, "gap"),
]


@pytest.mark.parametrize(("path", "change", "claim"), MUTATIONS, ids=[f"{i}-{m[0]}" for i, m in enumerate(MUTATIONS)])
def test_every_false_field_is_named(path: str, change: Any, claim: str) -> None:
    plan, window = good()
    broken = edit(plan, path, change)
    if claim == "FORMAT":
        with pytest.raises(FormatError) as caught:
            verify_plan(broken, window)
        assert "\n" not in str(caught.value)
    else:
        assert claim_of(broken, window) == claim


def test_a_changed_window_is_another_window() -> None:
    plan, window = good()
    lengths = window.lengths.copy()
    lengths[[0, 1]] = lengths[[1, 0]] if lengths[0] != lengths[1] else lengths[[0, 1]] + 1
    assert claim_of(plan, Window(lengths, window.demand)) == "window.sha256"
    demand = window.demand.copy()
    demand[3, 1, 2] += 1
    assert claim_of(plan, Window(window.lengths, demand)) == "window.sha256"
    window.demand[0, 0, 0] += 1  # arrays can be written to after the plan was made
    assert claim_of(plan, window) == "window.sha256"


def test_equal_samples_per_rank() -> None:
    window = small_window(num_samples=9)
    rules = Constraints(equal_samples_per_rank=True)
    plan = naive_plan(window, TOPOLOGY, 500, num_rows=2, constraints=rules)
    assert claim_of(plan, window) == "constraints.equal_samples_per_rank"
    window = small_window(num_samples=16)
    verify_plan(naive_plan(window, TOPOLOGY, 500, num_rows=2, constraints=rules), window)


def test_groups_keep_to_a_cell_or_to_a_rank() -> None:
    ids = [0, 0, 1, 1, 2, 2, 3, 3]
    window = small_window(num_samples=8, group_ids=ids)
    topology = Topology(dp=2, ep=2)
    in_cells = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    in_ranks = [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    units = [int(window.lengths[2 * g : 2 * g + 2].sum()) for g in range(4)]
    for groups in ("cell", True, tuple(ids)):
        rules = Constraints(groups=groups)
        verify_plan(naive_plan(window, topology, 150, cells=in_cells, constraints=rules, units=units), window)
        plan = naive_plan(window, topology, 150, cells=in_ranks, constraints=rules, units=units)
        assert claim_of(plan, window) == "constraints.groups"
    rules = Constraints(groups="rank")
    verify_plan(naive_plan(window, topology, 150, cells=in_ranks, constraints=rules), window)
    swapped = [[[0, 2], [4, 6]], [[5, 3], [1, 7]]]
    assert claim_of(naive_plan(window, topology, 150, cells=swapped, constraints=rules), window) == "constraints.groups"


def test_rank_groups_may_prove_rows() -> None:
    """One group of 4 samples of 60 tokens under cap 100 needs 3 rows on its rank, whatever the volume says."""
    window = Window([60] * 4 + [1] * 4, np.ones((8, 1, 2), dtype=int), group_ids=[0, 0, 0, 0, 1, 2, 3, 4])
    cells = [[[r], [4 + r]] for r in range(4)]
    rules = Constraints(groups="rank")
    plan = naive_plan(window, Topology(dp=2, ep=1, shards=1), 100, cells=cells, constraints=rules)
    verify_plan(plan | {"rows_lower_bound": 3}, window)
    assert claim_of(plan | {"rows_lower_bound": 4}, window) == "rows_lower_bound"


def test_oversize_stands_alone_or_is_refused() -> None:
    window = Window([21, 5, 5, 5], np.ones((4, 1, 2), dtype=int))
    topology = Topology(dp=2, ep=1, shards=1)
    alone = [[[0], [1]], [[2], [3]]]
    with_others = [[[0, 1], [2, 3]]]
    rules = Constraints(oversize="alone")
    verify_plan(naive_plan(window, topology, 20, cells=alone, constraints=rules), window)
    assert claim_of(naive_plan(window, topology, 20, cells=alone), window) == "cells.cap"
    assert claim_of(naive_plan(window, topology, 20, cells=with_others, constraints=rules), window) == "cells.cap"
    exact = Window([20, 5, 5, 5], np.ones((4, 1, 2), dtype=int))
    verify_plan(naive_plan(exact, topology, 20, cells=alone), exact)


def test_oversize_group_stands_alone() -> None:
    window = Window([5, 5, 3, 3], np.ones((4, 1, 2), dtype=int))
    rules = Constraints(oversize="alone", groups=(0, 0, 1, 1))
    topology = Topology(dp=2, ep=1, shards=1)
    plan = naive_plan(window, topology, 8, cells=[[[0, 1], [2, 3]]], constraints=rules, units=[10, 6])
    assert plan["certificates"]["rows"]["cells"] == 2
    verify_plan(plan, window)
    one_cell = edit(edit(plan, "cells", [[[0, 1, 2, 3]]]), "topology", {"dp": 1, "ep": 1, "shards": [[0]]})
    assert claim_of(one_cell, window) == "cells.cap"


def test_padding_counts_for_the_cap_and_true_lengths_for_the_cost() -> None:
    window = Window([3, 5, 9, 2], np.ones((4, 1, 2), dtype=int))
    topology = Topology(dp=2, ep=1, shards=1)
    cells = [[[0, 1], [2, 3]]]
    rules = Constraints(pad_multiple=8)
    verify_plan(naive_plan(window, topology, 24, cells=cells, constraints=rules), window)
    assert claim_of(naive_plan(window, topology, 23, cells=cells, constraints=rules), window) == "cells.cap"


def test_max_moved_caps_the_share() -> None:
    plan, window = good()
    capped = edit(edit(plan, "constraints/max_moved", 0.25), "moved_experts", [2, 2])
    verify_plan(capped, window)
    assert claim_of(edit(capped, "moved_experts/0", 3), window) == "constraints.max_moved"
    capped.pop("moved_experts")
    assert claim_of(capped, window) == "moved_experts"


def test_words_of_the_row_status_need_their_proof() -> None:
    window = small_window(num_samples=4)
    topology = Topology(dp=2, ep=2)
    cap = int(window.lengths.sum()) // 2 + 1
    one_row = naive_plan(window, topology, max(cap, 100), num_rows=1)
    assert one_row["rows_status"] == "certified"
    verify_plan(one_row, window)
    assert claim_of(edit(one_row, "rows_status", "best-known"), window) == "rows_status"
    two_rows = naive_plan(window, topology, max(cap, 100), num_rows=2)
    claimed = edit(edit(two_rows, "rows_lower_bound", 2), "rows_status", "solver-proved")
    assert claim_of(claimed, window) == "rows_lower_bound"
    named = edit(claimed, "certificates/rows", lambda c: c | {"solver": "CP-SAT", "version": "9.14"})
    assert any("according to CP-SAT 9.14 (not re-checked" in line for line in verify_plan(named, window))
    assert claim_of(edit(named, "rows_status", "certified"), window) == "rows_status"
    bare = {"kind": "solver", "cap": two_rows["token_cap"], "cells": 3, "solver": "CP-SAT", "version": "9.14"}
    verify_plan(edit(named, "certificates/rows", bare), window)


def test_count_certificate() -> None:
    """5 samples, 2 a cell at most, DP 2, row_multiple 2: 2 rows."""
    window = small_window(num_samples=5)
    rules = Constraints(max_samples_per_cell=2, row_multiple=2)
    cells = [[[0, 4], [1]], [[2], [3]]]
    plan = naive_plan(window, Topology(dp=2, ep=2), 1000, cells=cells, constraints=rules)
    table = [[int(t), 1] for t in sorted(set(window.lengths.tolist()))]
    count = {"kind": "count", "cap": 1000, "table": table, "max_cell": 2, "cells": 3}
    verify_plan(edit(plan, "certificates/rows", count), window)
    assert claim_of(edit(plan, "certificates/rows", count | {"max_cell": 1}), window) == "certificates.rows"


def test_big_item_certificate_proves_what_volume_does_not() -> None:
    """Three samples of 11 under cap 20 share no cell: weight 1 each, 1 a cell."""
    window = Window([11, 11, 11], np.ones((3, 1, 2), dtype=int))
    plan = naive_plan(window, Topology(dp=1, ep=1), 20, cells=[[[0]], [[1]], [[2]]])
    assert plan["rows_status"] == "best-known"
    certificate = {"kind": "l2", "cap": 20, "table": [[11, 1]], "max_cell": 1, "cells": 3}
    plan = edit(plan, "certificates/rows", certificate) | {"rows_lower_bound": 3, "rows_status": "certified"}
    verify_plan(plan, window)


def test_solver_bound_of_a_placement_is_named_and_not_counted_as_checked() -> None:
    plan, window = good()
    reached = plan["certificates"]["placement"][0]["reached"]
    entry = {"bound": reached, "kind": "solver", "reached": reached, "solver": "CP-SAT", "version": "9.14"}
    checked = verify_plan(edit(plan, "certificates/placement/0", entry), window)
    assert any("solver-proved in 1 more (not re-checked)" in line for line in checked)


def test_zero_costs_have_gap_zero() -> None:
    window = Window([3, 4], np.zeros((2, 1, 2), dtype=int))
    free = CostModel((Stage("none", 0.0, 0.0),))
    plan = naive_plan(window, Topology(dp=1, ep=1), 10, cost=free)
    assert plan["bound"] == 0
    assert plan["gap"] == 0
    verify_plan(plan, window)
    assert claim_of(plan | {"gap": 1.0}, window) == "gap"


@st.composite
def random_case(draw: st.DrawFn) -> tuple[Window, dict[str, Any]]:
    seed = draw(st.integers(0, 2**32 - 1))
    dp, ep, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(seed)
    num_samples = dp * rows + int(rng.integers(0, 6))
    window = small_window(seed, num_samples, layers, ep * per_rank)
    ranks = rng.permutation(dp).tolist()
    cuts = sorted(rng.choice(np.arange(1, dp), size=rng.integers(0, dp), replace=False).tolist()) if dp > 1 else []
    shards = [ranks[a:b] for a, b in itertools.pairwise([0, *cuts, dp])]
    stages = tuple(
        Stage(str(i), float(rng.random()), float(rng.random() * (i != 1))) for i in range(rng.integers(0, 3))
    )
    gamma = float(rng.random()) if rng.random() < 0.5 else tuple(rng.random(layers).tolist())
    cost = CostModel(stages, gamma, draw(st.sampled_from(["shard", "row"])))
    return window, naive_plan(window, Topology(dp, ep, shards), 400, num_rows=rows, cost=cost)


@settings(max_examples=150, deadline=None)
@given(random_case())
def test_exact_score_agrees_with_the_evaluator_and_the_bound_holds(case: tuple[Window, dict[str, Any]]) -> None:
    window, plan = case
    verify_plan(plan, window)
    assert plan["bound"] <= plan["score"][0] * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(random_case(), st.data())
def test_random_damage_is_found(case: tuple[Window, dict[str, Any]], data: st.DataObject) -> None:
    window, plan = case
    where = data.draw(st.sampled_from(["cells", "slots", "score"]))
    if where == "cells":
        flat = [(r, d, k) for r, row in enumerate(plan["cells"]) for d, c in enumerate(row) for k in range(len(c))]
        r, d, k = data.draw(st.sampled_from(flat))
        old = plan["cells"][r][d][k]
        new = data.draw(st.integers(-3, window.num_samples + 3).filter(lambda i: i != old))
        assert claim_of(edit(plan, f"cells/{r}/{d}/{k}", new), window) == "cells.coverage"
    elif where == "slots":
        layer = data.draw(st.integers(0, window.num_layers - 1))
        expert = data.draw(st.integers(0, window.num_experts - 1))
        new = data.draw(st.integers(-1, window.num_experts).filter(lambda s: s != expert))
        assert claim_of(edit(plan, f"logical_to_slot/{layer}/{expert}", new), window) == "logical_to_slot"
    else:
        entry = data.draw(st.integers(0, 2))
        factor = data.draw(st.floats(1e-7, 1)) * data.draw(st.sampled_from([-1, 1]))
        new = plan["score"][entry] * (1 + factor) + (plan["score"][entry] == 0)
        assert claim_of(edit(plan, f"score/{entry}", new), window) == "score"


@settings(max_examples=100, deadline=None)
@given(random_case(), st.randoms(use_true_random=False))
def test_moving_a_sample_unnoticed_is_impossible(case: tuple[Window, dict[str, Any]], random: Any) -> None:
    """A layout that is changed without its numbers is found, unless it costs and weighs the same everywhere."""
    window, plan = case
    cells = copy.deepcopy(plan["cells"])
    places = [(r, d) for r, row in enumerate(cells) for d in range(len(row))]
    if len(places) < 2:
        return
    (r, d), (s, e) = random.sample(places, 2)
    cells[r][d][0], cells[s][e][0] = cells[s][e][0], cells[r][d][0]
    if window.lengths[cells[r][d][0]] == window.lengths[cells[s][e][0]]:
        return
    assert claim_of(plan | {"cells": cells}, window) == "cell_tokens"


def test_unequal_shards_use_the_best_weighting() -> None:
    """Shards of 1 and 3 DP ranks, no attention: Y / 2 is proved, not only Y / 4."""
    window = Window([1] * 4, np.full((4, 1, 1), 6))
    cost = CostModel((), 1.0)
    plan = naive_plan(window, Topology(4, 1, [[0], [1, 2, 3]]), 4, cost=cost)
    assert plan["bound"] == pytest.approx(1.5)  # Y = 24 / 4
    layout = {"kind": "averaging", "attention": 0.0, "experts": 3.0, "value": 3.0}
    better = edit(plan, "certificates/layout", layout) | {"bound": 3.0, "gap": plan["score"][0] / 3 - 1}
    verify_plan(better, window)
    too_much = edit(better, "certificates/layout", layout | {"experts": 3.1, "value": 3.1})
    assert claim_of(too_much, window) == "certificates.layout"


def test_bound_of_unequal_shards_is_the_best_convex_combination() -> None:
    from scipy.optimize import linprog

    rng = np.random.default_rng(3)
    for sizes in ([1, 3], [2, 2], [1, 1, 4], [5], [1, 2, 3]):
        ranks = iter(range(sum(sizes)))
        topology = Topology(sum(sizes), 2, [[next(ranks) for _ in range(m)] for m in sizes])
        window = small_window(int(rng.integers(1000)), num_samples=2 * sum(sizes))
        facts, _ = read_facts(naive_plan(window, topology, 500), window)
        value = float(averaging(facts, {}).value)
        work = float(averaging(facts, {}).attention) * sum(sizes)
        experts = float(averaging(facts, {}).experts) * len(sizes)
        num = len(sizes)  # variables c_1..c_G, x <= c_g / m_g, y <= c_g
        above = np.vstack([np.hstack([-np.eye(num), np.c_[sizes, np.zeros(num)]]),
                           np.hstack([-np.eye(num), np.c_[np.zeros(num), np.ones(num)]])])  # fmt: skip
        best = linprog([0] * num + [-work, -experts], above, np.zeros(2 * num), [[1] * num + [0, 0]], [1])
        assert value == pytest.approx(-best.fun, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(0, 9), st.integers(1, 3)), max_size=5),
    st.integers(12, 30),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_heaviest_cell_is_exact(kinds: list[tuple[int, int, int, int]], cap: int, most: int | None) -> None:
    items = [Item(*kind) for kind in kinds]
    best = 0
    for counts in itertools.product(*(range(item.count + 1) for item in items)):
        size = sum(n * item.size for n, item in zip(counts, items, strict=True))
        samples = sum(n * item.samples for n, item in zip(counts, items, strict=True))
        if size <= cap and (most is None or samples <= most):
            best = max(best, sum(n * item.weight for n, item in zip(counts, items, strict=True)))
    assert heaviest_cell(items, cap, most, -1) == best
    assert heaviest_cell(items, cap, most, best) == best
    for enough in range(best + 3):
        assert (heaviest_cell(items, cap, most, enough) <= enough) == (best <= enough)


def test_knapsack_too_large_to_fill_is_refused_not_tried() -> None:
    with pytest.raises(TooLarge):
        heaviest_cell([Item(3, 1, 2, 1 << 30), Item(7, 1, 5, 1 << 30)], 1 << 40, None, 1)


def brute_force_rank_load(loads: list[int], num_ranks: int) -> int:
    per_rank = len(loads) // num_ranks

    def place(rest: tuple[int, ...]) -> int:
        if not rest:
            return 0
        others = [
            max(
                rest[0] + sum(rest[i] for i in mates),
                place(tuple(a for k, a in enumerate(rest) if k and k not in mates)),
            )
            for mates in itertools.combinations(range(1, len(rest)), per_rank - 1)
        ]
        return min(others)

    return place(tuple(loads))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2), (3, 3), (4, 1), (4, 2)]), st.data())
def test_rank_load_bound_holds(shape: tuple[int, int], data: st.DataObject) -> None:
    num_ranks, per_rank = shape
    size = num_ranks * per_rank
    loads = data.draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1000)), min_size=size, max_size=size))
    best = brute_force_rank_load(loads, num_ranks)
    bound = rank_load_bound(loads, num_ranks)
    assert bound <= best
    if num_ranks == 1 or per_rank <= 2:
        assert bound == best


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_placement_bound_of_the_planner_is_rederived(num_ranks: int, per_rank: int, seed: int) -> None:
    from routepack_opt.models.placement_bounds import placement_bounds

    rng = np.random.default_rng(seed)
    load = (rng.pareto(float(rng.uniform(0.3, 3)), (4, num_ranks * per_rank)) * 100).clip(0, 10**9).astype(np.int64)
    bound, _ = placement_bounds(load, num_ranks)
    for loads, claimed in zip(load.tolist(), bound.tolist(), strict=True):
        assert claimed <= rank_load_bound(loads, num_ranks)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.booleans(), st.sampled_from([None, 1, 2, 3]), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_row_certificate_of_the_planner_is_accepted(
    dp: int, grouped: bool, most: int | None, oversize: bool, seed: int
) -> None:
    from routepack_opt.models.rows import RowsProblem, solve_rows

    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(dp, 16) + (4 * dp if grouped else 0))
    lengths = rng.integers(1, 60, num_samples) + (rng.random(num_samples) < 0.2) * (100 if oversize else 30)
    groups = np.sort(rng.integers(0, num_samples, num_samples)) if grouped else np.arange(num_samples)
    _, atom_of = np.unique(groups, return_inverse=True)
    tokens = np.bincount(atom_of, weights=lengths).astype(np.int64)
    samples = np.bincount(atom_of).astype(np.int64)
    cap = 100 if oversize else max(100, int(tokens.max()))
    try:
        result = solve_rows(RowsProblem(tokens, samples, dp, cap, max_samples_per_cell=most), time_limit_s=0.02)
    except RoutePackError:
        return
    flat = [[i for atom in cell for i in np.flatnonzero(atom_of == atom).tolist()] for cell in result.cells]
    cells = [flat[r * dp : (r + 1) * dp] for r in range(result.rows)]
    window = Window(lengths, np.ones((num_samples, 1, 2), dtype=int))
    rules = Constraints(oversize="alone", max_samples_per_cell=most, groups=tuple(groups.tolist()) if grouped else None)
    topology = Topology(dp, 1, 1)
    plan = naive_plan(window, topology, cap, cells=cells, constraints=rules, units=tokens.tolist())
    plan |= {"rows_lower_bound": result.lower_bound, "rows_status": result.status}
    verify_plan(edit(plan, "certificates/rows", result.certificate), window)


def test_huge_weights_stay_exact() -> None:
    window = small_window()
    cost = CostModel((Stage("huge", 1e100, 1e-300),), expert_weight=1e-310)
    plan = naive_plan(window, TOPOLOGY, 200, num_rows=2, cost=cost)
    verify_plan(plan, window)
    assert Fraction(plan["score"][0]) > 10**99
    overflowing = edit(plan, "cost/stages/0/alpha", 1.7e308)
    assert claim_of(overflowing, window) == "score"


def test_long_samples_do_not_overflow() -> None:
    longest = 2**31 - 1
    window = Window([longest] * 4, np.full((4, 1, 2), 2**31 - 1))
    plan = naive_plan(window, Topology(dp=2, ep=2), 2 * longest, num_rows=1)
    unit = 2 * longest
    attention = 4.0 * 2 * longest / unit + 7e-4 * unit * 2 * (longest / unit) ** 2
    assert math.isclose(plan["score"][0], attention + 4 * longest / unit, rel_tol=1e-9)
    verify_plan(plan, window)


@pytest.mark.parametrize("path", ["certificates/rows/cells", "certificates/placement/0/reached", "score/0", "gap"])
def test_numbers_beyond_64_bits_are_refused(path: str) -> None:
    plan, window = good()
    for value in (10**400, -(10**400), math.inf, math.nan, True, None, "1", [], {}):
        with pytest.raises(RoutePackError):
            verify_plan(edit(plan, path, value), window)


def test_the_checker_shares_nothing_with_the_planner() -> None:
    allowed = {"errors", "plan", "verify", "window"}
    for source in Path(routepack_opt.verify.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("routepack_opt"):
                    assert name.split(".")[1] in allowed, f"{source.name} imports {name}"
