"""CostModel and Score: what a layout costs, and the one exact evaluator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.topology import Topology
from routepack_opt.window import Window, integer_array, positive_int

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

_MAX_WEIGHT = 1e100  # weights times tokens, summed over a window, stay finite


class Score(NamedTuple):
    """Compared lexicographically, smaller is better.

    ``slowest_shard`` is max_g U_g, ``total`` sum_g U_g, ``worst_row`` max J; with ``sync="row"`` they are
    sum_r max_g J, sum J and max J.
    """

    slowest_shard: float
    total: float
    worst_row: float


@dataclass(frozen=True)
class Stage:
    """One attention type with its own straggler: a cell costs alpha*T + beta*Q.

    T = sum t_i / C and Q = sum (t_i / C)^2 over the samples of the cell, C the token cap. ``alpha`` and ``beta``
    absorb the number of layers of this type; beta is 0 for linear and sliding-window attention.
    """

    name: str
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        """Validate."""
        for field in ("alpha", "beta"):
            object.__setattr__(self, field, _weight(f"stage {self.name!r}.{field}", getattr(self, field)))


def _weight(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInput(f"{name}: {value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise InvalidInput(f"{name}: {number!r} is not a finite number >= 0")
    if number > _MAX_WEIGHT:
        raise InvalidInput(f"{name}: {number!r} is above {_MAX_WEIGHT:g}")
    return number


@dataclass(frozen=True)
class CostModel:
    """Cost of a layout (routepack.md section 5).

    Parameters
    ----------
    stages
        Attention stages; their linear and quadratic parts are added inside a cell, then the maximum over the DP
        ranks of the shard is taken, per stage.
    expert_weight
        gamma: one number, or one per MoE layer.
    sync
        "shard": shards meet once per step (score max_g sum_r J first). "row": all shards meet every row
        (sum_r max_g J first).
    """

    stages: tuple[Stage, ...]
    expert_weight: float | tuple[float, ...] = 1.0
    sync: Literal["shard", "row"] = "shard"

    def __post_init__(self) -> None:
        """Validate and freeze sequences."""
        try:
            stages = tuple(self.stages)
        except TypeError:
            raise InvalidInput(f"cost.stages: expected a list of Stage, found {type(self.stages).__name__}") from None
        for index, stage in enumerate(stages):
            if not isinstance(stage, Stage):
                raise InvalidInput(f"cost.stages[{index}]: expected a Stage, found {type(stage).__name__}")
        object.__setattr__(self, "stages", stages)
        weight: Any = self.expert_weight
        if isinstance(weight, np.ndarray):
            weight = weight.tolist()
        if isinstance(weight, Sequence) and not isinstance(weight, (str, bytes)):
            values = tuple(_weight(f"cost.expert_weight[{i}]", w) for i, w in enumerate(weight))
            object.__setattr__(self, "expert_weight", values)
        else:
            object.__setattr__(self, "expert_weight", _weight("cost.expert_weight", weight))
        if not isinstance(self.sync, str) or self.sync not in ("shard", "row"):
            raise InvalidInput(f"cost.sync: {self.sync!r} is unknown; expected 'shard' or 'row'")

    @classmethod
    def default(cls, num_layers: int, token_cap: int) -> CostModel:
        """One stage alpha = 4 L, beta = 7e-4 C L, expert_weight 1: used when no cost is given."""
        num_layers, token_cap = positive_int("num_layers", num_layers), positive_int("token_cap", token_cap)
        return cls((Stage("full", 4.0 * num_layers, 7e-4 * token_cap * num_layers),))

    @classmethod
    def for_model(
        cls,
        model: str | os.PathLike[str] | dict[str, Any],
        *,
        token_cap: int,
        tp: int = 1,
        cp: int = 1,
        etp: int = 1,
        sync: Literal["shard", "row"] = "shard",
    ) -> CostModel:
        """From a preset name, a Hugging Face ``config.json`` (path or dict), see :mod:`routepack_opt.model_shapes`."""
        from routepack_opt.model_shapes import cost_for_model

        return cost_for_model(model, token_cap=token_cap, tp=tp, cp=cp, etp=etp, sync=sync)

    def expert_weights(self, num_layers: int) -> NDArray[np.float64]:
        """float64 [L]; raises InvalidInput when a per-layer list has another length."""
        if isinstance(self.expert_weight, tuple):
            if len(self.expert_weight) != num_layers:
                raise InvalidInput(f"cost.expert_weight: {len(self.expert_weight)} weights for {num_layers} MoE layers")
            return np.asarray(self.expert_weight, dtype=np.float64)
        return np.full(num_layers, self.expert_weight, dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """The object of cost.json."""
        weight = list(self.expert_weight) if isinstance(self.expert_weight, tuple) else self.expert_weight
        return {
            "stages": [{"name": s.name, "alpha": s.alpha, "beta": s.beta} for s in self.stages],
            "expert_weight": weight,
            "sync": self.sync,
        }

    @classmethod
    def from_json(cls, value: Any, where: str = "cost") -> CostModel:
        """Inverse of :meth:`to_json`; unknown keys and non-numbers are refused."""
        if not isinstance(value, dict) or not isinstance(value.get("stages"), list):
            raise InvalidInput(f"{where}: expected an object with a list 'stages'")
        unknown = set(value) - {"stages", "expert_weight", "sync"}
        if unknown:
            raise InvalidInput(f"{where}: unknown key {sorted(unknown)[0]!r}")
        stages = []
        for index, entry in enumerate(value["stages"]):
            if not isinstance(entry, dict) or set(entry) != {"name", "alpha", "beta"}:
                raise InvalidInput(f"{where}.stages[{index}]: expected name, alpha and beta")
            stages.append(Stage(str(entry["name"]), entry["alpha"], entry["beta"]))
        weight = value.get("expert_weight", 1.0)
        if not isinstance(weight, (list, int, float)):
            raise InvalidInput(f"{where}.expert_weight: expected a number or a list of numbers")
        return cls(tuple(stages), tuple(weight) if isinstance(weight, list) else weight, value.get("sync", "shard"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read cost.json."""
        from routepack_opt.files import read_json

        value = read_json(path)
        try:
            return cls.from_json(value, "cost")
        except InvalidInput as error:
            raise FormatError(f"{path}: {error}") from None


def dense_block(hidden: int, token_cap: int = 1) -> Stage:
    """The dense transformer block of verl's workload estimate: 12 h^2 t + 2 h t^2, MLP inside, not causal.

    In units of 2 h multiply-adds it is ``6 h t + t^2``; for h = 4096 that is verl's ``24576 t + t^2``.
    """
    return Stage("dense", 6.0 * positive_int("hidden", hidden), float(positive_int("token_cap", token_cap)))


def attention_costs(
    stages: Sequence[Stage],
    cell_tokens: NDArray[np.int64],
    cell_squares: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
) -> NDArray[np.float64]:
    """float64 [R, G], A[r, g] = sum over stages of the slowest cell.

    Parameters
    ----------
    cell_tokens, cell_squares
        int64 [R, D], sum of lengths and of squared lengths in each cell.
    """
    tokens = cell_tokens / float(token_cap)
    squares = cell_squares / float(token_cap) ** 2
    result = np.zeros((cell_tokens.shape[0], topology.num_shards))
    for stage in stages:
        cost = stage.alpha * tokens + stage.beta * squares
        for shard, ranks in enumerate(topology.shards):
            result[:, shard] += cost[:, list(ranks)].max(axis=1)
    return result


def rank_loads(
    window: Window, cells: Sequence[Sequence[Sequence[int]]], logical_to_slot: NDArray[np.int64], topology: Topology
) -> NDArray[np.int64]:
    """int64 [R, G, L, P], W[r, g, l, p]: assignments EP rank p of shard g computes in row r at layer l."""
    num_layers, num_experts = window.num_layers, window.num_experts
    per_rank = topology.experts_per_rank(num_experts)
    slot_to_logical = np.argsort(logical_to_slot, axis=1, kind="stable")
    result = np.empty((len(cells), topology.num_shards, num_layers, topology.ep), dtype=np.int64)
    for row, row_cells in enumerate(cells):
        for shard, ranks in enumerate(topology.shards):
            samples = [i for rank in ranks for i in row_cells[rank]]
            # int32 sums run in vector lanes and are exact where they cannot overflow
            narrow = window.max_demand * max(1, len(samples)) < 2**31
            demand = np.zeros((num_layers, num_experts), dtype=np.int32 if narrow else np.int64)
            for sample in samples:
                demand += window.demand[sample]
            by_slot = np.take_along_axis(demand, slot_to_logical, axis=1)
            result[row, shard] = by_slot.reshape(num_layers, topology.ep, per_rank).sum(axis=2, dtype=np.int64)
    return result


def expert_costs(loads: NDArray[np.int64], expert_weights: NDArray[np.float64], token_cap: int) -> NDArray[np.float64]:
    """float64 [R, G], E[r, g] = (1/C) sum_l gamma_l max_p W[r, g, l, p]; ``loads`` is int64 [R, G, L, P]."""
    peaks = loads.max(axis=3)
    if (expert_weights == expert_weights[0]).all():  # integer sum first: exact, and the same in every order
        return np.asarray(float(expert_weights[0]) * peaks.sum(axis=2) / float(token_cap))
    weighted = np.zeros(peaks.shape[:2])
    for layer, weight in enumerate(expert_weights):  # layer by layer, as the compiled kernels do: equal to the last bit
        weighted += peaks[:, :, layer] * weight
    return weighted / float(token_cap)


def score_of(costs: NDArray[np.float64], sync: Literal["shard", "row"]) -> Score:
    """Score of J = float64 [R, G]. Sums are correctly rounded (fsum), hence independent of order."""
    total = math.fsum(costs.ravel())
    worst = float(costs.max())
    if sync == "row":
        return Score(math.fsum(costs.max(axis=1)), total, worst)
    return Score(max(math.fsum(costs[:, g]) for g in range(costs.shape[1])), total, worst)


def row_shard_costs(
    window: Window,
    cells: Sequence[Sequence[Sequence[int]]],
    logical_to_slot: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
) -> NDArray[np.float64]:
    """float64 [R, G], J = A + E of every row and shard."""
    squares = window.lengths * window.lengths
    cell_tokens = np.array([[window.lengths[list(c)].sum() for c in row] for row in cells], dtype=np.int64)
    cell_squares = np.array([[squares[list(c)].sum() for c in row] for row in cells], dtype=np.int64)
    attention = attention_costs(cost.stages, cell_tokens, cell_squares, topology, token_cap)
    loads = rank_loads(window, cells, logical_to_slot, topology)
    return attention + expert_costs(loads, cost.expert_weights(window.num_layers), token_cap)


def score(
    window: Window,
    cells: Sequence[Sequence[Sequence[int]]],
    logical_to_slot: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
) -> Score:
    """The exact evaluator: every engine's arithmetic is tested against this.

    Parameters
    ----------
    cells
        ``cells[row][dp_rank]`` lists sample indices; not checked here, see :mod:`routepack_opt.verify`.
    logical_to_slot
        int64 [L, E], a bijection per layer; slot s lives on EP rank s // (E / P).
    """
    for name, value, kind in (("window", window, Window), ("topology", topology, Topology), ("cost", cost, CostModel)):
        if not isinstance(value, kind):
            raise InvalidInput(f"{name}: expected a {kind.__name__}, found {type(value).__name__}")
    token_cap = positive_int("token_cap", token_cap)
    slots = integer_array(logical_to_slot, "logical_to_slot", 2, low=0, high=window.num_experts - 1)
    if slots.shape != (window.num_layers, window.num_experts):
        raise InvalidInput(f"logical_to_slot: shape {slots.shape}, expected {(window.num_layers, window.num_experts)}")
    try:
        return score_of(row_shard_costs(window, cells, slots, topology, token_cap, cost), cost.sync)
    except (TypeError, IndexError, ValueError):
        raise InvalidInput(
            f"cells: expected rows of {topology.dp} lists of sample indices below {window.num_samples}"
        ) from None
