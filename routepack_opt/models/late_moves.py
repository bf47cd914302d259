"""Which layers of a co-refined placement are worth moving once the layout stands.

Placement A is in force, placement B (after co-refinement) costs less, but moving to B keeps the training step waiting.
Layers are independent: each keeps A or takes B. In J[r, g] they add up, then the maximum over shards is taken, so a
layer that helps only a shard that nobody waits for is worth nothing, and two layers may be worth something only
together. Wanted is the set of layers with the least

    seconds_per_cost_unit * (first component of the score) + seconds_per_expert * (experts that change EP rank).

Names: L MoE layers, E experts, R rows, G shards; S candidate layers, the ones that differ between A and B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.cost import Score, expert_costs, rank_loads, row_shard_costs, score
from routepack_opt.errors import InvalidInput
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

_ENUMERATE = 12  # candidate layers up to which all subsets are looked at
_PRICE_STEPS = 40  # of the prices that say how much each shard's time is worth


@dataclass(frozen=True)
class LateMoves:
    """The layers that change after the layout stands.

    Attributes
    ----------
    keeps_change
        bool [L], True where the layer goes from A to B.
    logical_to_slot
        int64 [L, E], the final placement.
    moved_experts
        int64 [L], experts that change EP rank from A to it.
    score
        Of the layout under it, by the exact evaluator.
    gain, gain_s, exposed_s
        First component of the score under A minus that under the final placement, the same in seconds, and the
        seconds the step waits. ``gain_s`` is above ``exposed_s``, or all three are 0.
    """

    keeps_change: NDArray[np.bool_]
    logical_to_slot: NDArray[np.int64]
    moved_experts: NDArray[np.int64]
    score: Score
    gain: float
    gain_s: float
    exposed_s: float


def choose_late_moves(
    window: Window,
    cells: Sequence[Sequence[Sequence[int]]],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
    *,
    placement_a: ArrayLike,
    placement_b: ArrayLike,
    seconds_per_cost_unit: float,
    seconds_per_expert: float,
    late_moves: float | None = None,
) -> LateMoves:
    """Choose the layers whose change pays for the time it exposes.

    Exact up to 12 layers that differ; above that a local search (one layer in or out, one exchanged for another) from
    several starts, exact again where layers do not compete (one shard, no cap). Never worse than keeping A.

    Parameters
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices.
    placement_a, placement_b
        int [L, E], logical_to_slot in force and wanted.
    seconds_per_cost_unit
        Step time of one unit of the score.
    seconds_per_expert
        Time the step waits for one expert that changes EP rank.
    late_moves
        Most experts that may change EP rank: a share of all L * E (a float from 0 to 1) or a count (an int).
    """
    slots_a, slots_b = (
        integer_array(value, name, 2, low=0, high=window.num_experts - 1).astype(np.int64)
        for name, value in (("placement_a", placement_a), ("placement_b", placement_b))
    )
    most = late_move_count(late_moves, slots_a.size)
    for name, value in (
        ("seconds_per_cost_unit", seconds_per_cost_unit),
        ("seconds_per_expert", seconds_per_expert),
    ):
        if not 0 <= value < float("inf"):
            raise InvalidInput(f"{name}: {value!r} is not a number of seconds >= 0")
    per_rank = topology.experts_per_rank(window.num_experts)
    moves = (slots_a // per_rank != slots_b // per_rank).sum(axis=1)
    candidates = np.flatnonzero(moves)
    before = score(window, cells, slots_a, topology, token_cap, cost)
    chosen = np.zeros(0, dtype=bool)
    if candidates.size and most:
        base = row_shard_costs(window, cells, slots_a, topology, token_cap, cost)
        saved = _saved_costs(window, cells, slots_a, slots_b, topology, token_cap, cost)[candidates]
        if cost.sync == "shard":  # shards meet once: one maximum over whole sums
            base, saved = base.sum(axis=0, keepdims=True), saved.sum(axis=1, keepdims=True)
        problem = _Problem(
            base * seconds_per_cost_unit,
            saved * seconds_per_cost_unit,
            moves[candidates] * float(seconds_per_expert),
            moves[candidates],
            most,
        )
        chosen = problem.solve()
    keeps = np.zeros(window.num_layers, dtype=bool)
    keeps[candidates[np.flatnonzero(chosen)]] = True
    slots = np.where(keeps[:, None], slots_b, slots_a)
    after = score(window, cells, slots, topology, token_cap, cost)
    gain = before.slowest_shard - after.slowest_shard
    exposed_s = float(moves[keeps].sum() * seconds_per_expert)
    if gain * seconds_per_cost_unit <= exposed_s:  # also what rounding makes of a gain of nothing
        keeps[:] = False
        slots, after, gain, exposed_s = slots_a, before, 0.0, 0.0
    moved = np.where(keeps, moves, 0).astype(np.int64)
    return LateMoves(keeps, slots, moved, after, gain, gain * seconds_per_cost_unit, exposed_s)


def late_move_count(late_moves: float | None, num_experts: int) -> int:
    """Experts a cap allows, of ``num_experts`` over all layers: a float is a share, an int a count, None no cap."""
    if late_moves is None:
        return num_experts
    if isinstance(late_moves, (int, np.integer)) and not isinstance(late_moves, bool) and late_moves >= 0:
        return min(int(late_moves), num_experts)
    if isinstance(late_moves, (float, np.floating)) and 0 <= late_moves <= 1:
        return int(late_moves * num_experts + 1e-9)
    raise InvalidInput(f"late_moves: {late_moves!r} is neither a share from 0.0 to 1.0 nor a count of experts")


def _saved_costs(
    window: Window,
    cells: Sequence[Sequence[Sequence[int]]],
    slots_a: NDArray[np.int64],
    slots_b: NDArray[np.int64],
    topology: Topology,
    token_cap: int,
    cost: CostModel,
) -> NDArray[np.float64]:
    """float64 [L, R, G], what each layer takes off J[r, g] when it goes from A to B; may be negative."""
    loads_a, loads_b = (rank_loads(window, cells, slots, topology) for slots in (slots_a, slots_b))
    weights = cost.expert_weights(window.num_layers)
    result = np.empty((window.num_layers, *loads_a.shape[:2]))
    for layer in range(window.num_layers):
        one = slice(layer, layer + 1)
        result[layer] = expert_costs(loads_a[:, :, one], weights[one], token_cap) - expert_costs(
            loads_b[:, :, one], weights[one], token_cap
        )
    return result


@dataclass(frozen=True)
class _Problem:
    """Minimise sum_r max_g (base - sum of the chosen layers' saved)[r, g] + their exposed time, in seconds.

    ``base`` [R, G], ``saved`` [S, R, G], ``exposed`` [S], ``moves`` [S] with at most ``most`` in sum.
    """

    base: NDArray[np.float64]
    saved: NDArray[np.float64]
    exposed: NDArray[np.float64]
    moves: NDArray[np.int64]
    most: int

    def solve(self) -> NDArray[np.bool_]:
        """bool [S], the chosen layers."""
        if len(self.moves) <= _ENUMERATE:
            return self._enumerate()
        improved = [self._improve(start) for start in self._starts()]
        return min(improved, key=self._value)

    def _value(self, chosen: NDArray[np.bool_]) -> float:
        return float(self._values(chosen[None])[0])

    def _values(self, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """float64 [X], of subsets bool [X, S]; inf where the cap is broken."""
        weights = chosen.astype(np.float64)
        left = self.base[None] - np.tensordot(weights, self.saved, axes=1)
        values = left.max(axis=2).sum(axis=1) + weights @ self.exposed
        return np.where(chosen @ self.moves <= self.most, values, np.inf)

    def _enumerate(self) -> NDArray[np.bool_]:
        size = len(self.moves)
        subsets = (np.arange(1 << size)[:, None] >> np.arange(size) & 1).astype(bool)
        # in slices: a subset holds R * G sums
        values = np.concatenate([self._values(part) for part in np.array_split(subsets, max(1, len(subsets) // 256))])
        return np.asarray(subsets[int(np.argmin(values))])

    def _starts(self) -> list[NDArray[np.bool_]]:
        """Nothing, and the best layers when the time of every shard has a price: more for the ones now slowest."""
        starts = [np.zeros(len(self.moves), dtype=bool)]
        price = np.full(self.base.shape, 1.0 / self.base.shape[1])
        scale = max(float(np.abs(self.saved).sum(axis=0).max()), 1e-300)
        for step in range(_PRICE_STEPS):
            worth = np.tensordot(self.saved, price, axes=2) - self.exposed
            start = self._within_cap(worth)
            starts.append(start)
            left = self.base - np.tensordot(start.astype(np.float64), self.saved, axes=1)
            price *= np.exp((left - left.max(axis=1, keepdims=True)) / scale * 4.0 / (1 + 0.2 * step))
            price /= price.sum(axis=1, keepdims=True)
        return [np.array(s) for s in dict.fromkeys(tuple(start.tolist()) for start in starts)]

    def _within_cap(self, worth: NDArray[np.float64]) -> NDArray[np.bool_]:
        chosen = np.zeros(len(worth), dtype=bool)
        left = self.most
        for layer in np.argsort(-worth / self.moves, kind="stable").tolist():
            if worth[layer] > 0 and self.moves[layer] <= left:
                chosen[layer] = True
                left -= int(self.moves[layer])
        return chosen

    def _improve(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Best single change or exchange, until there is none."""
        size, value = len(chosen), self._value(chosen)
        flips = np.eye(size, dtype=bool)
        while True:
            trials = [chosen ^ flips]
            inside, outside = np.flatnonzero(chosen), np.flatnonzero(~chosen)
            trials += [(chosen ^ flips[layer])[None] ^ flips[outside] for layer in inside]
            values = [self._values(trial) for trial in trials if len(trial)]
            best = min(range(len(values)), key=lambda k: float(values[k].min()))
            if float(values[best].min()) >= value:
                return chosen
            trials = [trial for trial in trials if len(trial)]
            chosen, value = trials[best][int(np.argmin(values[best]))], float(values[best].min())
