"""Small random windows, topologies, costs and constraints, drawn from one numpy generator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routepack_opt import Constraints, CostModel, Stage, Topology, Window


@dataclass(frozen=True)
class Case:
    """One planning problem."""

    window: Window
    topology: Topology
    token_cap: int
    cost: CostModel
    constraints: Constraints
    previous: np.ndarray | None = None


def random_topology(rng: np.random.Generator, num_experts: int) -> Topology:
    """One to three shards, of equal size or not, in rank order or not."""
    ep = int(rng.choice([p for p in (1, 2, 3, 4) if num_experts % p == 0]))
    num_shards = int(rng.integers(1, 4))
    dp = int(rng.integers(num_shards, 2 * num_shards + 2))
    if rng.random() < 0.5:
        return Topology(dp=num_shards * max(1, dp // num_shards), ep=ep, shards=num_shards)
    ranks = rng.permutation(dp)
    cuts = np.sort(rng.choice(np.arange(1, dp), num_shards - 1, replace=False)) if num_shards > 1 else []
    return Topology(dp=dp, ep=ep, shards=[part.tolist() for part in np.split(ranks, cuts)])


def random_cost(rng: np.random.Generator, num_layers: int, *, uniform_gamma: bool | None = None) -> CostModel:
    """Zero to two attention stages, a gamma for all layers or one for each."""
    stages = tuple(
        Stage(f"stage{k}", float(rng.choice([0.0, 0.5, 4.0, 1 / 3])), float(rng.choice([0.0, 0.7, 30.0])))
        for k in range(int(rng.integers(0, 3)))
    )
    if uniform_gamma is None:
        uniform_gamma = bool(rng.random() < 0.6)
    weight = float(rng.choice([1.0, 0.3, 2.5])) if uniform_gamma else tuple(rng.uniform(0.1, 3.0, num_layers).tolist())
    return CostModel(stages, expert_weight=weight, sync="row" if rng.random() < 0.4 else "shard")


def random_demand(rng: np.random.Generator, lengths: np.ndarray, num_layers: int, num_experts: int) -> np.ndarray:
    """Assignments with skewed popularity that follow the lengths; some layers or samples may have none."""
    popularity = rng.dirichlet(np.full(num_experts, 0.7), num_layers)
    demand = rng.poisson(popularity[None] * lengths[:, None, None] * float(rng.choice([0.5, 2.0])))
    if rng.random() < 0.2:
        demand[:, int(rng.integers(num_layers))] = 0
    if rng.random() < 0.2:
        demand[int(rng.integers(lengths.size))] = 0
    return demand


def random_constraints(rng: np.random.Generator, cap: int) -> Constraints:
    """Every field takes part, each with a modest probability."""

    def sometimes(probability: float) -> bool:
        return bool(rng.random() < probability)

    return Constraints(
        min_rows=int(rng.integers(1, 4)) if sometimes(0.3) else 1,
        row_multiple=int(rng.integers(1, 4)) if sometimes(0.3) else 1,
        pad_multiple=int(rng.choice([2, 4, 8])) if sometimes(0.25) else 1,
        max_samples_per_cell=int(rng.integers(1, 6)) if sometimes(0.25) else None,
        equal_samples_per_rank=sometimes(0.25),
        groups=str(rng.choice(["cell", "rank"])) if sometimes(0.35) else None,  # type: ignore[arg-type]
        oversize="alone" if sometimes(0.5) else "error",
        max_moved=float(rng.choice([0.0, 0.25, 0.5, 1.0])) if sometimes(0.3) else None,
    )


def random_case(rng: np.random.Generator, *, constrained: bool = True) -> Case:
    """A window of 4 to 40 samples; it may turn out to be infeasible."""
    num_samples = int(rng.integers(4, 41))
    num_layers, num_experts = int(rng.integers(1, 4)), int(rng.choice([4, 6, 8]))
    cap = int(rng.choice([16, 64, 100]))
    long = cap if rng.random() < 0.8 else cap + cap // 4
    lengths = np.minimum(
        rng.geometric(4.0 / cap, num_samples) if rng.random() < 0.5 else rng.integers(1, long + 1, num_samples), long
    )
    window = Window(
        lengths,
        random_demand(rng, lengths, num_layers, num_experts),
        group_ids=np.sort(rng.integers(0, max(1, num_samples // 2), num_samples)),
    )
    topology = random_topology(rng, num_experts)
    constraints = random_constraints(rng, cap) if constrained else Constraints()
    previous = None
    if rng.random() < 0.4:
        previous = np.array([rng.permutation(num_experts) for _ in range(num_layers)])
    return Case(window, topology, cap, random_cost(rng, num_layers), constraints, previous)
