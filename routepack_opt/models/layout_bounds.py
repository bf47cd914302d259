"""Lower bounds on the slowest EDP shard, for every placement and every layout of a given row count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.models.layout_bounds_attention import StageAtoms, Truncation, truncation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.cost import CostModel
    from routepack_opt.models.atoms import AtomSet
    from routepack_opt.topology import Topology

_ROUNDING = 1.0 - 1e-12  # covers the rounding of the sums here


@dataclass(frozen=True)
class LayoutBound:
    """A lower bound on the slowest shard, valid for every placement and every layout.

    ``attention`` and ``experts`` are its two terms, in score units; ``weighting`` is how shards were averaged;
    ``truncations`` the stages that are bounded better than by averaging, as (stage, proof).
    """

    value: float
    attention: float
    experts: float
    weighting: str
    truncations: tuple[tuple[int, Truncation], ...] = ()

    @property
    def kind(self) -> str:
        """What proves it."""
        return "truncation" if self.truncations else "averaging"

    def to_json(self) -> dict[str, Any]:
        """The ``certificates.layout`` object."""
        result: dict[str, Any] = {
            "kind": self.kind,
            "weighting": self.weighting,
            "attention": self.attention,
            "experts": self.experts,
            "value": self.value,
        }
        if self.truncations:
            result["stages"] = [proof.to_json(stage) for stage, proof in self.truncations]
        return result


@dataclass(frozen=True)
class _Weighting:
    """Weights c_g proportional to max(m_g, size): rho = min c_g / m_g, and c = min c_g = size * rho."""

    name: str
    rho: float
    size: int

    def bound(self, work: float, per_shard: float) -> tuple[float, float]:
        """The two terms: sums of attention, and what each shard pays by itself or all pay together."""
        return work * self.rho, per_shard * self.rho * self.size


def _weightings(topology: Topology) -> list[_Weighting]:
    """max_g U_g >= sum_g c_g U_g for weights of sum 1; the best are proportional to max(m_g, size), size some m."""
    sizes = [len(ranks) for ranks in topology.shards]
    return [
        _Weighting(
            "equal" if size == max(sizes) else "by-size" if size == min(sizes) else f"max(m, {size})",
            1.0 / sum(max(m, size) for m in sizes),
            size,
        )
        for size in sorted(set(sizes), reverse=True)
    ]


def averaging_bound(
    lengths: NDArray[np.int64],
    rank_load_bounds: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
) -> LayoutBound:
    """max_g U_g is at least any convex combination of the U_g.

    The slowest cell of a row-shard is at least the mean of its cells, so ``m_g * sum_r A[r, g]`` is at least the
    attention work X_g placed on shard g; and ``sum_{r,g} max_p W >= max_p G >= rank_load_bounds``, whose cost is Y.
    Weights c_g of sum 1 give ``X min(c_g / m_g) + Y min(c_g)``. With ``sync="row"`` the score is at least max_g U_g, so
    the bound holds there too.

    Parameters
    ----------
    lengths
        int64 [N], true lengths.
    rank_load_bounds
        int64 [L], lower bound of each layer on max_p of the window's rank load, for every placement.
    """
    tokens, squares = float(lengths.sum()) / token_cap, float((lengths * lengths).sum()) / float(token_cap) ** 2
    work = sum(stage.alpha * tokens + stage.beta * squares for stage in cost.stages)
    experts = _expert_work(rank_load_bounds, token_cap, cost)
    weighting = max(_weightings(topology), key=lambda weights: sum(weights.bound(work, experts)))
    attention, experts = weighting.bound(work, experts)
    return LayoutBound((attention + experts) * _ROUNDING, attention, experts, weighting.name)


def layout_bound(
    atoms: AtomSet,
    num_rows: int,
    rank_load_bounds: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
    constraints: Constraints,
    *,
    thorough: bool = True,
) -> LayoutBound:
    """The best bound at hand for layouts of ``num_rows`` rows: averaging, with each stage truncated where that is more.

    See :mod:`routepack_opt.models.layout_bounds_attention`. Stages are bounded one by one and added: the attention of a
    row-shard is the sum of the stages' maxima.

    Parameters
    ----------
    rank_load_bounds
        int64 [L], lower bound of each layer on max_p of the window's rank load, for every placement.
    thorough
        False leaves the linear programs out (for budgets of a few milliseconds).
    """
    sizes = [len(ranks) for ranks in topology.shards]
    experts = _expert_work(rank_load_bounds, token_cap, cost)
    plain = _stage_costs(atoms, token_cap, cost)
    totals = [float(costs.sum()) for costs in plain]
    weightings = _weightings(topology)
    first = max(weightings, key=lambda weights: sum(weights.bound(sum(totals), experts)))
    proofs: dict[int, Truncation] = {}
    for stage, costs in enumerate(plain):
        limit = constraints.max_samples_per_cell or 0
        seen = StageAtoms(atoms.padded, atoms.samples, costs, token_cap, limit)
        proof = truncation(seen, sizes * num_rows, first.size, thorough=thorough)
        if proof is not None:
            proofs[stage] = proof
    work = sum(proofs[stage].prices if stage in proofs else total for stage, total in enumerate(totals))
    per_shard = experts + sum(proof.excess for proof in proofs.values())
    weighting = max(weightings, key=lambda weights: sum(weights.bound(work, per_shard)))
    priced, excess = weighting.bound(work, per_shard - experts)
    attention, experts = priced + excess, weighting.bound(0.0, experts)[1]
    value = (attention + experts) * _ROUNDING
    return LayoutBound(value, attention, experts, weighting.name, tuple(proofs.items()))


def _expert_work(rank_load_bounds: NDArray[np.int64], token_cap: int, cost: CostModel) -> float:
    weights = cost.expert_weights(rank_load_bounds.shape[0])
    return float((weights * rank_load_bounds).sum()) / float(token_cap)


def _stage_costs(atoms: AtomSet, token_cap: int, cost: CostModel) -> list[NDArray[np.float64]]:
    """Per stage float64 [n], what each atom adds to its cell."""
    tokens, squares = atoms.tokens / float(token_cap), atoms.squares / float(token_cap) ** 2
    return [stage.alpha * tokens + stage.beta * squares for stage in cost.stages]


def warmup() -> None:
    """Load the linear program engine."""
    costs = np.array([3.0, 1.0, 1.0])
    seen = StageAtoms(np.array([4, 2, 1]), np.ones(3, dtype=np.int64), costs, 4)
    truncation(seen, [1, 1, 1], 1)
