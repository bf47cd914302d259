"""Placement to proved optimality: CP-SAT, and the MIP solver HiGHS as a second opinion, on layers left open.

Meant for offline certification of small layers: the search of ``placement`` reaches the bound or comes within a
hundredth of a percent on nearly every real layer, and the assignment model has E * P binary variables.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput, MissingDependency
from routepack_opt.models.moves import contiguous_ranks, relabel_ranks
from routepack_opt.models.placement import PlacementResult, check_load, check_ranks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

BACKENDS = ("cp-sat", "highs")


@dataclass(frozen=True)
class LayerProof:
    """What a solver found for one layer.

    Attributes
    ----------
    rank_of
        int64 [E], the best placement known.
    reached, bound
        Its largest rank load, and the solver's lower bound (rounded up to an integer).
    optimal
        The two meet.
    """

    rank_of: NDArray[np.int64]
    reached: int
    bound: int
    optimal: bool


def solver_version(backend: str) -> str:
    """Name and version of a backend, as certificates quote it."""
    if backend == "cp-sat":
        import ortools

        return f"ortools CP-SAT {ortools.__version__}"
    import scipy

    return f"HiGHS in scipy {scipy.__version__}"


def prove_placement(
    load: ArrayLike,
    num_ranks: int,
    result: PlacementResult,
    *,
    time_limit_s: float,
    min_gap: float = 1e-3,
    backend: str = "cp-sat",
    workers: int = 1,
    seed: int = 0,
) -> PlacementResult:
    """Give every layer whose gap exceeds ``min_gap`` to a solver, the incumbent as its start.

    The widest gaps come first and share what is left of the time equally. A bound that improves is marked "solver": it
    is the solver's word (see :func:`solver_version`), not re-checkable by adding loads.

    Parameters
    ----------
    load
        int [L, E], the loads ``result`` was made for.
    time_limit_s
        For all layers together.
    workers
        CP-SAT threads; with 1 and a limit that is not hit the outcome is reproducible.
    """
    array = check_load(load, num_ranks)
    check_ranks(result.rank_of, array.shape, num_ranks, "result.rank_of")
    if backend not in BACKENDS:
        raise InvalidInput(f"backend: {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
    deadline = time.monotonic() + time_limit_s
    rank_of, reached, bound, kind = result.rank_of.copy(), result.reached.copy(), result.bound.copy(), list(result.kind)
    gap = (reached - bound) / np.maximum(bound, 1)
    layers = [int(layer) for layer in np.argsort(-gap, kind="stable") if gap[layer] > min_gap]
    for k, layer in enumerate(layers):
        left = (deadline - time.monotonic()) / (len(layers) - k)
        if left <= 0:
            break
        proof = prove_layer(
            array[layer],
            num_ranks,
            rank_of[layer],
            int(bound[layer]),
            time_limit_s=left,
            backend=backend,
            workers=workers,
            seed=seed,
        )
        if proof.reached < reached[layer]:
            reached[layer] = proof.reached
            rank_of[layer] = relabel_ranks(proof.rank_of[None], rank_of[[layer]], num_ranks)[0]
        if proof.bound > bound[layer]:
            bound[layer], kind[layer] = proof.bound, "solver"
    return PlacementResult(rank_of, reached, bound, tuple(kind))


def prove_layer(
    load: NDArray[np.int64],
    num_ranks: int,
    incumbent: NDArray[np.int64] | None = None,
    bound: int = 0,
    *,
    time_limit_s: float,
    backend: str = "cp-sat",
    workers: int = 1,
    seed: int = 0,
) -> LayerProof:
    """Solve one layer, int64 [E]; never returns anything worse than the incumbent or below the given bound."""
    order = np.argsort(-load, kind="stable")
    divisor = max(1, int(np.gcd.reduce(load)))
    hot = load[order] // divisor
    if incumbent is None:
        incumbent = contiguous_ranks(1, len(load), num_ranks)[0]
    start = _first_seen(incumbent[order])
    start_max = _largest(hot, start, num_ranks)
    solve = _solve_cpsat if backend == "cp-sat" else _solve_highs
    found, proved = solve(hot, num_ranks, start, start_max, -(-bound // divisor), time_limit_s, workers, seed)
    best = min(((_largest(hot, ranks, num_ranks), k) for k, ranks in enumerate((start, found)) if ranks is not None))
    ranks = start if best[1] == 0 or found is None else found
    rank_of = np.empty_like(incumbent)
    rank_of[order] = ranks
    proved = min(max(proved * divisor, bound), best[0] * divisor)
    return LayerProof(rank_of, best[0] * divisor, proved, proved == best[0] * divisor)


def _first_seen(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rename ranks in the order in which the hottest experts meet them: expert k is then on one of ranks 0 .. k."""
    _, first, inverse = np.unique(ranks, return_index=True, return_inverse=True)
    new = np.empty(len(first), dtype=np.int64)
    new[np.argsort(first)] = np.arange(len(first))
    return new[inverse]


def _largest(hot: NDArray[np.int64], ranks: NDArray[np.int64], num_ranks: int) -> int:
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, ranks, hot)
    return int(loads.max())


def _solve_cpsat(
    hot: NDArray[np.int64],
    num_ranks: int,
    start: NDArray[np.int64],
    start_max: int,
    bound: int,
    time_limit_s: float,
    workers: int,
    seed: int,
) -> tuple[NDArray[np.int64] | None, int]:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingDependency("proving placements needs ortools: pip install ortools") from None

    num_experts = len(hot)
    model = cp_model.CpModel()
    # ranks are interchangeable: the k-th hottest expert uses one of the first k + 1
    on = [[model.new_bool_var("") for _ in range(min(e + 1, num_ranks))] for e in range(num_experts)]
    peak = model.new_int_var(bound, start_max, "")
    for row in on:
        model.add_exactly_one(row)
    for rank in range(num_ranks):
        column = [(int(hot[e]), on[e][rank]) for e in range(num_experts) if rank < len(on[e])]
        model.add(sum(var for _, var in column) == num_experts // num_ranks)
        model.add(sum(weight * var for weight, var in column) <= peak)
    model.minimize(peak)
    for e in range(num_experts):
        for rank, var in enumerate(on[e]):
            model.add_hint(var, bool(start[e] == rank))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed % (1 << 31)
    status = solver.solve(model)
    proved = max(bound, int(np.ceil(solver.best_objective_bound - 1e-6))) if status != cp_model.INFEASIBLE else bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, proved if status == cp_model.UNKNOWN else bound
    found = [next(rank for rank, var in enumerate(row) if solver.boolean_value(var)) for row in on]
    return np.array(found, dtype=np.int64), proved


def _solve_highs(
    hot: NDArray[np.int64],
    num_ranks: int,
    start: NDArray[np.int64],
    start_max: int,
    bound: int,
    time_limit_s: float,
    workers: int,
    seed: int,
) -> tuple[NDArray[np.int64] | None, int]:
    """The same model as a MIP; scipy's interface takes no start and no threads, the incumbent only caps the peak."""
    del start, workers, seed
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    num_experts = len(hot)
    num_on = num_experts * num_ranks
    scale = float(max(start_max, 1))
    expert, rank = np.divmod(np.arange(num_on), num_ranks)
    ones, cells = np.ones(num_on), np.arange(num_on)
    shape = (num_ranks, num_on + 1)
    load = coo_array(
        (
            np.concatenate([hot[expert] / scale, -np.ones(num_ranks)]),
            (np.concatenate([rank, np.arange(num_ranks)]), np.concatenate([cells, np.full(num_ranks, num_on)])),
        ),
        shape=shape,
    ).tocsr()
    constraints = [
        LinearConstraint(coo_array((ones, (expert, cells)), shape=(num_experts, num_on + 1)).tocsr(), 1, 1),
        LinearConstraint(
            coo_array((ones, (rank, cells)), shape=shape).tocsr(), num_experts // num_ranks, num_experts // num_ranks
        ),
        LinearConstraint(load, -np.inf, 0),
    ]
    upper = np.ones(num_on + 1)
    upper[:num_on][rank > expert] = 0  # interchangeable ranks, as above
    cost = np.zeros(num_on + 1)
    cost[-1] = 1
    lower = np.zeros(num_on + 1)
    lower[-1] = bound / scale
    integrality = np.ones(num_on + 1)
    integrality[-1] = 0
    answer = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(lower, upper),
        constraints=constraints,
        options={"time_limit": max(time_limit_s, 0.01), "mip_rel_gap": 0.0},
    )
    dual = answer.get("mip_dual_bound")
    # floating point: give way by a millionth before rounding up, so that no placement is cut off
    proved = bound if dual is None or not np.isfinite(dual) else int(np.ceil(float(dual) * scale * (1 - 1e-6) - 1e-6))
    if answer.x is None:
        return None, max(bound, proved)
    found = answer.x[:num_on].reshape(num_experts, num_ranks).argmax(axis=1).astype(np.int64)
    if (np.bincount(found, minlength=num_ranks) != num_experts // num_ranks).any():
        return None, max(bound, proved)
    return found, max(bound, proved)
