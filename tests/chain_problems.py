"""Random annealing problems with a feasible start, drawn so that every rule binds somewhere."""

from __future__ import annotations

import numpy as np

from routepack_opt.solvers.annealing.chain import ChainProblem


def random_chain_problem(
    rng: np.random.Generator, *, plain: bool = False, sync: str | None = None, num_shards: int | None = None
) -> tuple[ChainProblem, np.ndarray, np.ndarray]:
    """A problem, cells [n] and EP ranks [L, E] that obey it; ``plain`` leaves out all rules but the cap."""
    num_shards = num_shards or int(rng.integers(1, 4))
    num_ranks = int(rng.integers(num_shards, 2 * num_shards + 3))
    num_rows = int(rng.integers(1, 6))
    order = rng.permutation(num_ranks)
    cuts = np.sort(rng.choice(np.arange(1, num_ranks), num_shards - 1, replace=False)) if num_shards > 1 else []
    shards = tuple(tuple(sorted(part.tolist())) for part in np.split(order, cuts))
    num_cells = num_rows * num_ranks
    n = num_cells + int(rng.integers(0, 2 * num_cells + 2))
    cell_of = rng.permutation(np.append(np.arange(num_cells), rng.integers(0, num_cells, n - num_cells)))
    tokens = rng.integers(1, 60, n)
    padded = tokens if plain else -(-tokens // 4) * 4
    samples = np.ones(n, dtype=np.int64) if plain else rng.integers(1, 3, n)
    num_layers, num_experts = int(rng.integers(1, 4)), int(rng.choice([4, 6, 8]))
    ep = int(rng.choice([p for p in (1, 2, 3, 4) if num_experts % p == 0]))
    rank_of = np.array([rng.permutation(num_experts) // (num_experts // ep) for _ in range(num_layers)])
    home, budget = rank_of.copy(), np.full(num_layers, -1)
    if not plain and rng.random() < 0.5:
        budget = rng.integers(0, 5, num_layers)
    in_cell = np.bincount(cell_of, weights=padded, minlength=num_cells).astype(np.int64)
    crowded = np.bincount(cell_of, minlength=num_cells) > 1
    oversize = not plain and rng.random() < 0.5 and crowded.any()
    cap = int(in_cell[crowded].max() if oversize else in_cell.max()) + int(rng.integers(0, 10))
    uniform = rng.random() < 0.5
    demand = rng.poisson(rng.dirichlet(np.ones(num_experts), num_layers) * tokens[:, None, None]).astype(np.int32)
    source = None
    if not plain and rng.random() < 0.3:  # stored in another order
        source = rng.permutation(n)
        demand = demand[np.argsort(source)]
    num_stages = int(rng.integers(0, 4))
    problem = ChainProblem(
        padded=padded,
        tokens=tokens,
        squares=tokens * tokens,
        samples=samples,
        pinned=np.zeros(n, dtype=np.bool_) if plain or rng.random() < 0.5 else rng.random(n) < 0.3,
        demand=demand,
        shards=shards,
        num_rows=num_rows,
        num_ranks=num_ranks,
        cap=cap,
        max_samples=0
        if plain or rng.random() < 0.5
        else int(np.bincount(cell_of, weights=samples).max()) + int(rng.integers(0, 2)),
        equal_samples=not plain and bool(rng.random() < 0.3),
        alpha=rng.uniform(0.0, 3.0, num_stages),
        beta=rng.uniform(0.0, 30.0, num_stages),
        gamma=np.full(num_layers, 1.7) if uniform else rng.uniform(0.0, 3.0, num_layers),
        sync=sync or ("row" if rng.random() < 0.4 else "shard"),  # type: ignore[arg-type]
        num_expert_ranks=ep,
        home=home,
        move_budget=budget,
        source=source,
    )
    return problem, cell_of, rank_of


def assert_feasible(problem: ChainProblem, cell_of: np.ndarray, rank_of: np.ndarray, start: np.ndarray) -> None:
    """Every rule of a chain problem, checked from scratch; ``start`` is the layout the search began with."""
    num_cells = problem.num_rows * problem.num_ranks
    atoms = np.bincount(cell_of, minlength=num_cells)
    padded = np.bincount(cell_of, weights=problem.padded, minlength=num_cells)
    samples = np.bincount(cell_of, weights=problem.samples, minlength=num_cells)
    assert (atoms >= 1).all()
    assert ((padded <= problem.cap) | (atoms == 1)).all()
    if problem.max_samples:
        assert samples.max() <= problem.max_samples
    rank, first = cell_of % problem.num_ranks, start % problem.num_ranks
    assert (rank == first)[problem.pinned].all()
    if problem.equal_samples:
        assert np.array_equal(*(np.bincount(r, weights=problem.samples) for r in (rank, first)))
    per_rank = rank_of.shape[1] // problem.num_expert_ranks
    assert (np.sort(rank_of, axis=1) == np.arange(rank_of.shape[1]) // per_rank).all()
    away = (rank_of != problem.home).sum(axis=1)
    assert ((problem.move_budget < 0) | (away <= problem.move_budget)).all()
