"""The torch engine: integers exact to the last bit, scores equal to the evaluator, rules kept, Metropolis semantics."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chain_problems import assert_feasible, random_chain_problem

from routepack_opt import CostModel, Stage, Topology, Window
from routepack_opt.cost import score
from routepack_opt.solvers.annealing.chain import Chain
from routepack_opt.solvers.annealing.exact_score import score_assignment

torch = pytest.importorskip("torch")

from routepack_opt.solvers.annealing.torch_population import TorchPopulation  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBERS = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def population(problem, cell_of, rank_of, device, seed=0, members=MEMBERS, **options) -> TorchPopulation:  # type: ignore[no-untyped-def]
    options = {"num_tries": 3, **options}
    return TorchPopulation(problem, np.tile(cell_of, (members, 1)), rank_of, device=device, seed=seed, **options)


def unit_of(pop: TorchPopulation) -> float:
    """Mean cost of an atom, the unit of temperature."""
    return float(pop.scores()[0, 1]) / pop.sizes.atoms


def stir(pop: TorchPopulation, rng: np.random.Generator) -> None:
    """Some of everything, hot to cold."""
    unit = unit_of(pop)
    for temperature in (1.0, 0.1, 0.01):
        pop.anneal(temperature * unit, 19, relocate_share=0.3)
        pop.refine(0.1 * temperature * unit, 20, smooth=temperature > 0.5)
        pop.resample(rng.integers(0, pop.num_members, pop.num_members))
        pop.anneal(rng.random(pop.num_members) * temperature * unit, 5, relocate_share=0.3, num_tries=2)


def real_state(pop: TorchPopulation) -> dict[str, np.ndarray]:
    """Tensors of the state without their scrap places."""
    sizes, state = pop.sizes, pop._state
    result = {"cell_of": state.cell_of_MN.view(sizes.members, -1)[:, :-1]}
    for name in ("cells_BF", "loads_MXW", "experts_MX", "costs_MX"):
        result[name] = getattr(state, name).view(sizes.members, sizes.rows, -1)[:, :-1]
    return {name: tensor.cpu().numpy().copy() for name, tensor in result.items()}


@pytest.mark.parametrize("seed", range(12))
def test_state_is_exact_to_the_last_bit(device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem, cell_of, rank_of = random_chain_problem(rng)
    pop = population(problem, cell_of, rank_of, device, seed)
    stir(pop, rng)
    kept = real_state(pop)
    pop.rebuild()
    for name, fresh in real_state(pop).items():
        assert np.array_equal(kept[name], fresh), name
    cells, ranks = pop.state()
    scores = pop.scores()
    for member in range(MEMBERS):
        assert_feasible(problem, cells[member], ranks[member], cell_of)
        assert tuple(scores[member]) == score_assignment(problem, cells[member], ranks[member])


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_the_exact_evaluator(device: str, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    problem, cell_of, rank_of = random_chain_problem(rng, plain=True)
    window = Window(problem.tokens, problem.demand)
    topology = Topology(problem.num_ranks, problem.num_expert_ranks, problem.shards)
    stages = [Stage(str(k), a, b) for k, (a, b) in enumerate(zip(problem.alpha, problem.beta, strict=True))]
    cost = CostModel(tuple(stages), tuple(problem.gamma.tolist()), problem.sync)
    pop = population(problem, cell_of, rank_of, device, seed)
    stir(pop, rng)
    scores = pop.scores()
    best = pop.best()
    for cells, ranks, found in [*zip(*pop.state(), scores, strict=True), best]:
        lists = [
            [np.flatnonzero(cells == row * problem.num_ranks + rank).tolist() for rank in range(problem.num_ranks)]
            for row in range(problem.num_rows)
        ]
        slots = np.argsort(np.argsort(ranks, axis=1, kind="stable"), axis=1)
        assert tuple(found) == score(window, lists, slots, topology, problem.cap, cost)
    assert best[2].slowest_shard <= scores[:, 0].min() * (1 + 1e-12)


@pytest.mark.parametrize("sync", ["shard", "row"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_cold_moves_never_raise_the_energy(device: str, sync: str, num_shards: int) -> None:
    """Exact although many slots accept at once: each is scored as if it stood alone, or after those before it."""
    rng = np.random.default_rng(7)
    for _ in range(4):
        problem, cell_of, rank_of = random_chain_problem(rng, sync=sync, num_shards=num_shards)
        pop = population(problem, cell_of, rank_of, device, spread=0.3)
        before = pop.energies()
        for _ in range(12):
            pop.anneal(0.0, 2)
            after = pop.energies()
            assert (after <= before * (1 + 1e-12)).all()
            before = after
        chain = Chain(problem, *(array[0] for array in pop.state()), seed=0, stream=0, spread=0.3)
        assert chain.energy == pytest.approx(float(before[0]), rel=1e-12)


def test_cold_swaps_of_experts_never_raise_the_cost_of_one_shard(device: str) -> None:
    rng = np.random.default_rng(8)
    for _ in range(6):
        problem, cell_of, rank_of = random_chain_problem(rng, num_shards=1)
        pop = population(problem, cell_of, rank_of, device)
        before = pop.scores()[:, 1]
        pop.refine(0.0, 50)
        assert (pop.scores()[:, 1] <= before * (1 + 1e-12)).all()


def test_cold_smooth_swaps_never_raise_the_smooth_cost(device: str) -> None:
    def smooth_cost(pop: TorchPopulation) -> np.ndarray:
        sizes = pop.sizes
        loads = pop._state.loads_MXW.view(sizes.members, sizes.rows, sizes.ranks, sizes.layers)
        loads = loads[:, : sizes.real_rows].cpu().numpy().astype(np.float64)
        mean = np.maximum(loads.mean(axis=2), 1.0)
        powers = ((loads / mean[:, :, None]) ** 12).sum(axis=2)
        return np.asarray((mean * powers * pop.problem.gamma).sum(axis=(1, 2)))

    rng = np.random.default_rng(9)
    for _ in range(6):
        pop = population(*random_chain_problem(rng, num_shards=1), device)
        before = smooth_cost(pop)
        pop.refine(0.0, 50, smooth=True)
        assert (smooth_cost(pop) <= before * (1 + 1e-9)).all()


def test_improves_on_its_start_like_the_compiled_chain(device: str) -> None:
    rng = np.random.default_rng(11)
    n, num_layers, num_experts = 96, 4, 16
    tokens = rng.integers(20, 100, n)
    problem, _, _ = random_chain_problem(rng, plain=True)
    popularity = rng.dirichlet(np.full(num_experts, 0.5), (n // 8, num_layers)).repeat(8, axis=0)
    rank_of = np.tile(np.arange(num_experts) // 4, (num_layers, 1))
    problem = replace(
        problem,
        padded=tokens, tokens=tokens, squares=tokens**2, samples=np.ones(n, dtype=np.int64),
        pinned=np.zeros(n, dtype=np.bool_), shards=((0, 1), (2, 3)), num_rows=4, num_ranks=4, cap=600, sync="shard",
        demand=np.rint(popularity * 4 * tokens[:, None, None]).astype(np.int32),
        alpha=np.ones(1), beta=np.ones(1), gamma=np.ones(num_layers), num_expert_ranks=4,
        home=rank_of, move_budget=np.full(num_layers, -1),
    )  # fmt: skip
    cell_of = np.arange(n) // 6
    pop = population(problem, cell_of, rank_of, device, members=4, num_tries=4)
    chain = Chain(problem, cell_of, rank_of, seed=0, stream=0)
    start, unit = chain.score(), unit_of(pop)
    for temperature in np.geomspace(1e-1, 1e-3, 20):
        pop.anneal(temperature * unit, 16)
        pop.refine(temperature * unit, 64)
        chain.anneal(temperature * unit, 16 * 4 * 4)
        chain.refine(temperature * unit, 64)
    found = pop.best()[2]
    assert found < start
    gain, reference = (start.slowest_shard - s.slowest_shard for s in (found, chain.score()))
    assert gain > 0.7 * reference


def test_equal_seeds_give_equal_runs(device: str) -> None:
    runs = []
    for seed in (3, 3, 4):
        rng = np.random.default_rng(5)
        pop = population(*random_chain_problem(rng), device, seed)
        stir(pop, rng)
        runs.append((*pop.state(), pop.scores()))
    assert all(np.array_equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not np.array_equal(runs[0][0], runs[2][0])


def test_shared_placement_moves_like_one_placement_each(device: str) -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(6))
    runs = []
    for shared in (False, True):
        pop = population(problem, cell_of, rank_of, device, shared_placement=shared)
        pop.anneal(0.1 * unit_of(pop), 40)
        pop.resample(np.arange(MEMBERS)[::-1])
        pop.anneal(0.1 * unit_of(pop), 3)
        runs.append((*pop.state(), pop.scores(), *pop.best()))
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
    with pytest.raises(ValueError, match="share"):
        pop.refine(1.0, 1)


def test_resampling_copies_members_and_keeps_incumbents(device: str) -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(12))
    pop = population(problem, cell_of, rank_of, device)
    stir(pop, np.random.default_rng(0))
    (cells, ranks), scores, best = pop.state(), pop.scores(), pop.best()
    source = np.array([2, 2, 0, 4, 1])
    pop.resample(source)
    assert np.array_equal(pop.state()[0], cells[source])
    assert np.array_equal(pop.state()[1], ranks[source])
    assert np.array_equal(pop.scores(), scores[source])
    assert pop.best()[2] == best[2]
    with pytest.raises(ValueError, match="indices"):
        pop.resample(np.zeros(2, dtype=np.int64))


def test_restart_is_like_a_new_population(device: str) -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(18))
    pop = population(problem, cell_of, rank_of, device)
    stir(pop, np.random.default_rng(0))
    cells, ranks = pop.state()
    pop.restart(cells[::-1], ranks[::-1])
    fresh = TorchPopulation(problem, cells[::-1], ranks[::-1], device=device, seed=1, num_tries=3)
    assert np.array_equal(pop.scores(), fresh.scores())
    assert pop.best()[2] == fresh.best()[2]
    assert pop.statistics().num_scored.sum() == 0
    for name, tensor in real_state(fresh).items():
        assert np.array_equal(real_state(pop)[name], tensor)


def test_spread_weighs_slowest_shard_and_mean(device: str) -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(19), num_shards=3)
    pop = population(problem, cell_of, rank_of, device, spread=0.5)
    for spread in (0.5, 0.0, 1.0):
        pop.set_spread(spread)
        scores = pop.scores()
        expected = (1 - spread) * scores[:, 0] + spread * scores[:, 1] / 3
        assert pop.energies().cpu().numpy() == pytest.approx(expected, rel=1e-12)


def test_statistics_count_and_start_anew(device: str) -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(13))
    pop = population(problem, cell_of, rank_of, device)
    proposed = pop.anneal(unit_of(pop), 40)
    counts = pop.statistics()
    assert proposed == counts.num_proposed * MEMBERS
    assert (counts.num_accepted <= counts.num_scored).all()
    assert (counts.num_scored <= counts.num_proposed).all()
    assert np.isfinite(counts.mean_energy).all()
    again = pop.statistics()
    assert again.num_proposed == 0
    assert again.num_scored.sum() == 0
    assert np.isnan(again.mean_energy).all()


def test_windows_of_more_than_2_30_assignments_score_exactly(device: str) -> None:
    rng = np.random.default_rng(14)
    problem, cell_of, rank_of = random_chain_problem(rng)
    problem = replace(problem, demand=rng.integers(2**28, 2**30, problem.demand.shape).astype(np.int32))
    assert problem.shift > 0
    pop = population(problem, cell_of, rank_of, device)
    stir(pop, rng)
    for cells, ranks, found in zip(*pop.state(), pop.scores(), strict=True):
        assert tuple(found) == score_assignment(problem, cells, ranks)
        assert_feasible(problem, cells, ranks, cell_of)


def test_rounds_never_look_at_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, which have no values: what runs there waits for no device and can be captured in a graph."""

    class AnyGenerator(torch.Generator):  # type: ignore[misc]
        def __new__(cls, device: object) -> Any:
            return super().__new__(cls, "cpu")

    monkeypatch.setattr(torch, "Generator", AnyGenerator)
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None, **options: torch.empty(*shape, **options))
    for sync, num_shards in (("shard", 1), ("shard", 2), ("row", 2)):
        rng = np.random.default_rng(15)
        problem, cell_of, rank_of = random_chain_problem(rng, sync=sync, num_shards=num_shards)
        pop = population(problem, cell_of, rank_of, "meta")
        pop.anneal(1.0, 1)
        pop.refine(1.0, 3)
        pop.refine(1.0, 3, smooth=True)
        pop.resample(np.zeros(MEMBERS, dtype=np.int64))
        assert pop.energies().device.type == "meta"


@pytest.mark.gpu
def test_graphs_and_compiled_rounds_change_nothing() -> None:
    runs = []
    for options in ({"use_graph": False}, {"use_graph": True}, {"use_graph": True, "compiled": True}):
        rng = np.random.default_rng(16)
        pop = population(*random_chain_problem(rng), "cuda", **options)
        for _ in range(2):
            pop.anneal(0.1, 40)
            pop.refine(0.01, 100)
        stir(pop, rng)
        runs.append((*pop.state(), pop.scores()))
    for other in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_shapes_that_do_not_fit_are_refused() -> None:
    problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(17))
    with pytest.raises(ValueError, match="cell_of"):
        population(problem, cell_of[:-1], rank_of, "cpu")
    with pytest.raises(ValueError, match="rank_of"):
        population(problem, cell_of, rank_of[:, :-1], "cpu")
    with pytest.raises(ValueError, match="shared_placement"):
        population(problem, cell_of, np.tile(rank_of, (MEMBERS, 1, 1)), "cpu", shared_placement=True)


def test_the_package_needs_no_torch() -> None:
    code = "import sys, routepack_opt.planner, routepack_opt.models.layout_search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
