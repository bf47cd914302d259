"""The annealing engine: incremental arithmetic equals the slow path, and no move breaks a rule."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_windows import Case, random_cost, random_demand, random_topology

from routepack_opt import Constraints, CostModel, Stage, Topology, Window, score
from routepack_opt.cost import score_of
from routepack_opt.models.atoms import AtomSet, build_atoms
from routepack_opt.models.layout import cells_from_assignment
from routepack_opt.models.placement import slots_from_ranks
from routepack_opt.solvers.annealing.chain import Chain, ChainProblem
from routepack_opt.solvers.annealing.energy import energy_change, energy_of, full_energy
from routepack_opt.solvers.annealing.population import PopulationResult, run_population
from routepack_opt.solvers.annealing.random import new_state
from routepack_opt.solvers.annealing.sample_moves import Moves
from routepack_opt.solvers.annealing.schedule import Schedule

EXACT = ("cell_of", "num_atoms", "num_samples", "padded", "tokens", "squares", "loads", "stage_cost",
         "attention", "experts", "costs")  # fmt: skip
SEEDS = st.integers(0, 2**32 - 1)


def draw_chain(rng: np.random.Generator, **options: object) -> tuple[Chain, Case, AtomSet, int]:
    """A chain in a random legal state: 1-3 shards, oversize and pinned atoms, groups, every rule."""
    num_layers, num_experts, cap = int(rng.integers(1, 12)), int(rng.choice([4, 6, 8])), 64
    topology = random_topology(rng, num_experts)
    num_rows = int(rng.integers(1, 5))
    num_cells = num_rows * topology.dp
    constraints = Constraints(
        pad_multiple=int(rng.choice([1, 4])),
        max_samples_per_cell=int(rng.choice([3, 6])) if rng.random() < 0.3 else None,
        equal_samples_per_rank=bool(rng.random() < 0.3),
        groups=("cell" if rng.random() < 0.5 else "rank") if rng.random() < 0.4 else None,
        oversize="alone",
    )
    lengths: list[int] = []
    groups: list[int] = []
    cells: list[int] = []  # cell of each sample: built by hand so that every rule holds
    for cell in range(num_cells):
        group = cell % topology.dp if constraints.groups == "rank" else cell
        if rng.random() < 0.1 and not constraints.equal_samples_per_rank:
            lengths.append(int(rng.integers(cap + 1, 2 * cap)))
            groups.append(group)
            cells.append(cell)
            continue
        count = 2 if constraints.equal_samples_per_rank else int(rng.integers(1, 4))
        for _ in range(count):
            lengths.append(int(rng.integers(1, cap // 4)))
            pinned = constraints.groups == "rank" and rng.random() < 0.3
            alone = constraints.groups == "rank" and not pinned
            groups.append(1000 + len(lengths) if alone or rng.random() < 0.5 else group)
            cells.append(cell)
    if constraints.groups == "rank":  # a group stays on one rank
        groups = [g if g >= 1000 else c % topology.dp for g, c in zip(groups, cells, strict=True)]
    length_array = np.array(lengths)
    demand = random_demand(rng, length_array, num_layers, num_experts)
    window = Window(length_array, demand, group_ids=groups)
    cost = options.get("cost") or random_cost(rng, num_layers)
    assert isinstance(cost, CostModel)
    case = Case(window, topology, cap, cost, constraints)
    atoms = build_atoms(window, constraints, cap)
    cell_of = np.array([cells[members[0]] for members in atoms.members])
    home = np.array([rng.permutation(num_experts) for _ in range(num_layers)]) // (num_experts // topology.ep)
    budget = np.full(num_layers, int(rng.choice([-1, 0, 2, num_experts])))
    problem = ChainProblem(
        padded=atoms.padded,
        tokens=atoms.tokens,
        squares=atoms.squares,
        samples=atoms.samples,
        pinned=atoms.pinned,
        demand=atoms.demand,
        source=atoms.source,
        shards=topology.shards,
        num_rows=num_rows,
        num_ranks=topology.dp,
        cap=cap,
        max_samples=constraints.max_samples_per_cell or 0,
        equal_samples=constraints.equal_samples_per_rank,
        alpha=np.array([s.alpha for s in cost.stages]),
        beta=np.array([s.beta for s in cost.stages]),
        gamma=cost.expert_weights(num_layers),
        sync=cost.sync,
        num_expert_ranks=topology.ep,
        home=home,
        move_budget=budget,
    )
    spread = float(rng.choice([0.0, 0.3, 1.0]))
    return Chain(problem, cell_of, home, seed=int(rng.integers(2**31)), stream=0, spread=spread), case, atoms, num_rows


def exact_score(chain: Chain, case: Case, atoms: AtomSet, num_rows: int) -> tuple[float, float, float]:
    cells = cells_from_assignment(atoms, chain.state.cell_of, num_rows, case.topology.dp)
    slots = slots_from_ranks(chain.rank_of, case.topology.ep)
    return score(case.window, cells, slots, case.topology, case.token_cap, case.cost)


def check_legal(chain: Chain, case: Case, atoms: AtomSet, num_rows: int) -> None:
    """Every rule of the grid, counted afresh from the assignment."""
    rules = case.constraints
    cells = cells_from_assignment(atoms, chain.state.cell_of, num_rows, case.topology.dp)
    assert sorted(i for row in cells for cell in row for i in cell) == list(range(case.window.num_samples))
    units = np.empty(case.window.num_samples, dtype=int)
    for atom, members in enumerate(atoms.members):
        units[list(members)] = atom
    padded = -(-case.window.lengths // rules.pad_multiple) * rules.pad_multiple
    for row in cells:
        for cell in row:
            assert cell
            assert padded[cell].sum() <= case.token_cap or len(set(units[cell].tolist())) == 1
            assert rules.max_samples_per_cell is None or len(cell) <= rules.max_samples_per_cell
    if rules.equal_samples_per_rank:
        assert len({sum(len(row[d]) for row in cells) for d in range(case.topology.dp)}) == 1
    if rules.groups == "rank":
        rank = {i: d for row in cells for d, cell in enumerate(row) for i in cell}
        for group in set(case.window.group_ids.tolist()):
            assert len({rank[i] for i in np.flatnonzero(case.window.group_ids == group).tolist()}) == 1
    per_rank = case.window.num_experts // case.topology.ep
    for layer in chain.rank_of:
        assert (np.bincount(layer, minlength=case.topology.ep) == per_rank).all()
    away = (chain.rank_of != chain.problem.home).sum(axis=1)
    assert ((away <= chain.problem.move_budget) | (chain.problem.move_budget < 0)).all()


def check_state(chain: Chain) -> None:
    """The incremental state against a full recomputation of a second chain."""
    fresh = Chain(chain.problem, chain.state.cell_of, chain.rank_of, seed=0, stream=0, spread=chain.grid.spread)
    for name in EXACT:
        np.testing.assert_array_equal(getattr(chain.state, name), getattr(fresh.state, name), err_msg=name)
    np.testing.assert_array_equal(chain.loads, fresh.loads)
    np.testing.assert_allclose(chain.state.floor, fresh.state.floor, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(chain.state.shard_sums, fresh.state.shard_sums, rtol=1e-11)
    assert chain.energy == pytest.approx(fresh.energy, rel=1e-10)


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_incremental_state_equals_recomputation_after_random_moves_of_samples_and_experts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain, case, atoms, num_rows = draw_chain(rng)
    check_legal(chain, case, atoms, num_rows)
    unit = max(chain.energy, 1e-3) / atoms.num_atoms
    for _ in range(3):
        moves = Moves(*(float(share) for share in rng.dirichlet(np.ones(3))[:2]), guided=float(rng.choice([0.0, 0.8])))
        scored = chain.anneal(unit * float(rng.choice([0.0, 0.1, 10.0])), 200, moves)
        assert 0 <= scored <= 200
        check_state(chain)
        check_legal(chain, case, atoms, num_rows)
        assert chain.score() == exact_score(chain, case, atoms, num_rows)
        chain.refine(unit * float(rng.choice([0.0, 0.1, 10.0])), 50)
        check_state(chain)
        check_legal(chain, case, atoms, num_rows)
        assert chain.score() == exact_score(chain, case, atoms, num_rows)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_kernel_of_expert_swaps_keeps_loads_and_costs_in_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain, *_ = draw_chain(rng)
    before = chain.rank_of.copy()
    chain.rebuild = lambda: None  # type: ignore[method-assign]  # what the kernel itself left must already be right
    accepted = chain.refine(10.0, 50)
    fresh = Chain(chain.problem, chain.state.cell_of, chain.rank_of, seed=0, stream=0)
    np.testing.assert_array_equal(chain.state.loads, fresh.state.loads)
    np.testing.assert_allclose(chain.state.costs, fresh.state.costs, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(chain.state.shard_sums, fresh.state.shard_sums, rtol=1e-11, atol=1e-12)
    assert accepted > 0 or (before == chain.rank_of).all()


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_energy_change_equals_the_difference_of_full_energies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, num_shards = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    costs = rng.uniform(0, 10, num_rows * num_shards)
    x, y = (int(v) for v in rng.integers(0, costs.size, 2))
    new = costs.copy()
    new_x, new_y = rng.uniform(0, 10, 2)
    new[y], new[x] = new_y, new_x
    for sync_row in (False, True):
        for spread in (0.0, 0.5):
            sums, other = np.zeros(num_shards), np.zeros(num_shards)
            before = full_energy(costs, num_shards, sync_row, spread, sums)
            after = full_energy(new, num_shards, sync_row, spread, other)
            change = energy_change(costs, num_shards, sync_row, spread, sums, x, new_x, y, new_y)
            assert change == pytest.approx(after - before, abs=1e-9)
            assert energy_of(costs.reshape(num_rows, -1), num_shards, "row" if sync_row else "shard", spread) == before
            if spread == 0.0:
                exact = score_of(costs.reshape(num_rows, num_shards), "row" if sync_row else "shard")
                assert before == pytest.approx(exact.slowest_shard, rel=1e-12)


def test_a_cold_chain_never_gets_worse_and_a_hot_one_does() -> None:
    worse = 0
    for seed in range(6):
        chain, *_ = draw_chain(np.random.default_rng(seed), cost=CostModel((Stage("full", 4.0, 30.0),)))
        before = chain.energy
        for _ in range(5):
            chain.anneal(0.0, 100)
            chain.refine(0.0, 20)
            assert chain.energy <= before * (1 + 1e-12)
            before = chain.energy
        chain.anneal(1e9, 500)
        worse += chain.energy > before
    assert worse >= 3


def test_atoms_over_the_cap_stay_alone() -> None:
    window = Window([100, 10, 10, 10, 10, 10], np.ones((6, 1, 2), dtype=int))
    atoms = build_atoms(window, Constraints(oversize="alone"), 40)
    chain = Chain(_plain(atoms, num_rows=3, num_ranks=1, cap=40), np.array([0, 0, 1, 1, 1, 2]), np.array([[0, 1]]),
                  seed=0, stream=0)  # fmt: skip
    giant = int(np.argmax(atoms.padded))
    for _ in range(20):
        chain.anneal(1e9, 50)
        assert (chain.state.cell_of == chain.state.cell_of[giant]).sum() == 1


def _plain(atoms: AtomSet, *, num_rows: int, num_ranks: int, cap: int) -> ChainProblem:
    num_layers, num_experts = atoms.demand.shape[1:]
    return ChainProblem(
        padded=atoms.padded,
        tokens=atoms.tokens,
        squares=atoms.squares,
        samples=atoms.samples,
        pinned=atoms.pinned,
        demand=atoms.demand,
        source=atoms.source,
        shards=(tuple(range(num_ranks)),),
        num_rows=num_rows,
        num_ranks=num_ranks,
        cap=cap,
        max_samples=0,
        equal_samples=False,
        alpha=np.ones(1),
        beta=np.ones(1),
        gamma=np.ones(num_layers),
        sync="shard",
        num_expert_ranks=2,
        home=np.tile(np.arange(num_experts) // (num_experts // 2), (num_layers, 1)),
        move_budget=np.full(num_layers, -1),
    )


def test_windows_of_over_a_billion_assignments_a_layer_are_searched_on_shifted_loads() -> None:
    window = Window([5, 6, 7, 8], np.full((4, 1, 4), 2**30 - 1))
    atoms = build_atoms(window, Constraints(), 20)
    problem = _plain(atoms, num_rows=2, num_ranks=1, cap=20)
    assert problem.shift > 0
    chain = Chain(problem, np.array([0, 0, 1, 1]), np.array([[0, 0, 1, 1]]), seed=0, stream=0)
    assert chain.state.loads.min() >= 0
    exact = score(window, [[[0, 1]], [[2, 3]]], np.arange(4)[None], Topology(dp=1, ep=2, shards=1), 20,
                  CostModel((Stage("a", 1.0, 1.0),)))  # fmt: skip
    assert chain.score() == exact
    assert replace(problem, demand=problem.demand >> 8).shift == 0


def test_many_assignments_in_all_do_not_shift_what_no_row_can_hold() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 4000)
    demand = rng.multinomial(1000 * lengths, np.full(4, 0.25))[:, None, :]
    assert demand.sum() > 2**30
    atoms = build_atoms(Window(lengths, demand), Constraints(), 4000)
    assert _plain(atoms, num_rows=2000, num_ranks=2, cap=4000).shift == 0


def test_streams_of_one_seed_differ_and_repeat() -> None:
    assert new_state(1, 0) == new_state(1, 0)
    assert len({int(new_state(seed, stream)[0]) for seed in range(4) for stream in range(4)}) == 16
    assert int(new_state(-1, 0)[0]) != int(new_state(1, 0)[0])


def _chains(seed: int, count: int = 2) -> list[Chain]:
    first, *_ = draw_chain(np.random.default_rng(seed), cost=CostModel((Stage("full", 4.0, 30.0),)))
    rest = [
        Chain(first.problem, first.state.cell_of, first.rank_of, seed=3, stream=stream) for stream in range(1, count)
    ]
    return [first, *rest]


def _unit(chain: Chain) -> float:
    return chain.score().total / chain.problem.padded.size


def _run(
    chains: list[Chain],
    steps: int | None,
    deadline: float | None = None,
    schedule: Schedule | None = None,
    **more: object,
) -> PopulationResult:
    schedule = schedule or Schedule()
    return run_population(chains, deadline=deadline, steps=steps, unit=_unit(chains[0]), schedule=schedule, **more)


def test_step_budgets_are_prefixes_of_each_other() -> None:
    for seed in range(8):
        scores = []
        for steps in (0, 100, 700, 3000, 9000):
            chains = _chains(seed)
            found = _run(chains, steps)
            scores.append([incumbent.score for incumbent in found.incumbents])
        for one_chain in zip(*scores, strict=True):
            assert all(later <= earlier for earlier, later in itertools.pairwise(one_chain))


def test_a_step_budget_gives_the_same_chains_again() -> None:
    runs = []
    for _ in range(2):
        chains = _chains(5)
        found = _run(chains, 2000)
        runs.append([(f.score, f.cell_of.tolist(), f.rank_of.tolist(), found.num_scored) for f in found.incumbents])
    assert runs[0] == runs[1]


def test_the_incumbent_is_the_best_state_not_the_last() -> None:
    chains = _chains(7, count=1)
    start = chains[0].score()
    (found,) = _run(chains, 4000, schedule=Schedule(hot=1e6, cold=1e6)).incumbents
    assert found.score <= start
    chains[0].copy_from(found.cell_of, found.rank_of)
    assert chains[0].score() == found.score


def test_a_stop_event_ends_the_run_at_once() -> None:
    stop = threading.Event()
    stop.set()
    chains = _chains(2)
    before = [chain.score() for chain in chains]
    found = _run(chains, 10**12, stop=stop).incumbents
    assert [f.score for f in found] == before
    found = _run(chains, None, time.perf_counter() + 1e6, stop=stop).incumbents
    assert [f.score for f in found] <= before


def test_without_refinement_the_placement_stands() -> None:
    chains = _chains(3)
    ranks = chains[0].rank_of.copy()
    for found in _run(chains, 3000, schedule=Schedule().without_refinement()).incumbents:
        np.testing.assert_array_equal(found.rank_of, ranks)


def test_exactly_one_of_deadline_and_steps() -> None:
    for deadline, steps in ((None, None), (1.0, 1)):
        with pytest.raises(ValueError, match="exactly one"):
            _run(_chains(0), steps, deadline)
