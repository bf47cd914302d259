"""The stages of the placement search: seeds, search from scratch, search from the standing placement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.models.moves import num_moved, relabel_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KICKS = 200
"""Most random restarts of a layer without a time limit."""
_LADDER = (0.002, 0.005, 0.01, 0.01, 0.01, 0.02, 0.02, 0.04, 0.08, 0.16, 0.32)
"""First targets, as shares above the bound, when moves are capped: the first one within the budget wins."""
NOISE = 0.02
"""Randomness of repeated repairs, as a share of the target load."""


def lpt_ranks(load: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """int64 [L, E]: experts by (-load, e), each to the open rank with the smallest (rank load, rank)."""
    from routepack_opt.solvers.local_search import lpt_instances

    rank_of = np.zeros_like(load)
    lpt_instances(load, np.argsort(-load, axis=1, kind="stable"), num_ranks, rank_of)
    return rank_of


def pair_up(load: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """int64 [L, E], the optimum for two experts a rank: the hottest with the coldest, and so on."""
    order = np.argsort(-load, axis=1, kind="stable")
    rank_of = np.empty_like(load)
    ranks = np.concatenate([np.arange(num_ranks), np.arange(num_ranks)[::-1]])
    np.put_along_axis(rank_of, order, np.broadcast_to(ranks, load.shape), axis=1)
    return rank_of


@dataclass(frozen=True)
class Search:
    """The stages of :func:`solve_placement`; each takes the layers it should work on and leaves the others standing."""

    load: NDArray[np.int64]
    num_ranks: int
    bound: NDArray[np.int64]
    home: NDArray[np.int64]
    standing_max: NDArray[np.int64]
    seed: int
    deadline: float | None

    def late(self) -> bool:
        """No time is left."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def from_scratch(self, layers: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """LPT, descent, then kicks where the gap is still above 0.01%; until the deadline, wherever there is one."""
        from routepack_opt.solvers.local_search import balance

        rank_of, reached = self.home.copy(), self.standing_max.copy()
        if not len(layers):
            return rank_of, reached
        pairs = self.load.shape[1] == 2 * self.num_ranks
        rank_of[layers] = (pair_up if pairs else lpt_ranks)(self.load[layers], self.num_ranks)
        reached[layers] = balance(self.load, rank_of, self.num_ranks, self.bound, chosen=layers)[layers]
        self.kick(rank_of, reached, layers)
        return rank_of, reached

    def kick(self, rank_of: NDArray[np.int64], reached: NDArray[np.int64], layers: NDArray[np.intp]) -> None:
        """Improve both in place: some kicks down to a gap of 0.01%, then on to the bound while time is left."""
        from routepack_opt.solvers.local_search import balance

        rounds = [(20, _slightly_above(self.bound))] * (_KICKS // 20)
        step = 0
        while not self.late():
            if step >= len(rounds) and self.deadline is None:
                return
            kicks, stop = rounds[step] if step < len(rounds) else (10, self.bound)
            hard = layers[reached[layers] > stop[layers]]
            if len(hard):
                reached[hard] = balance(
                    self.load,
                    rank_of,
                    self.num_ranks,
                    self.bound,
                    stop=stop,
                    kicks=kicks,
                    chosen=hard,
                    seed=self.seed + step,
                )[hard]
                step += 1
            elif step < len(rounds):
                step = len(rounds)
            else:
                return

    def from_standing(self, budget: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Exchanges from where the experts stand; from scratch only where those stay above the bound."""
        from routepack_opt.solvers.local_search import balance
        from routepack_opt.solvers.move_search import rebalance

        load, num_ranks, seed = self.load, self.num_ranks, self.seed
        goal = _slightly_above(self.bound)
        rank_of, reached = self.home.copy(), self.standing_max.copy()
        layers = np.flatnonzero(reached > goal)
        capped = bool((budget < load.shape[1]).any())
        if len(layers):
            slack = _LADDER if capped else (0.003,)
            near, near_reached = rebalance(
                load,
                self.home,
                num_ranks,
                goal,
                budget=budget,
                slack=slack,
                noise=NOISE,
                first_only=capped,
                chosen=layers,
                seed=seed,
            )
            rank_of[layers], reached[layers] = near[layers], near_reached[layers]
            layers = layers[reached[layers] > goal[layers]]
        if not capped and len(layers):
            reached[layers] = balance(load, rank_of, num_ranks, goal, chosen=layers)[layers]
            layers = layers[reached[layers] > goal[layers]]
        if len(layers) and not (budget < load.shape[1] // 2).all() and not self.late():
            # from-scratch placements move far more than half of the experts even after relabelling
            free, free_reached = self.from_scratch(layers)
            free = relabel_ranks(free, self.home, num_ranks)
            moved = num_moved(free, self.home)
            closer = (free_reached < reached) & (reached > _slightly_above(free_reached)) & (moved <= budget)
            rank_of[closer], reached[closer] = free[closer], free_reached[closer]
        return rank_of, reached


def _slightly_above(load: NDArray[np.int64]) -> NDArray[np.int64]:
    """0.01% more, rounded down: closer than any real count repeats itself."""
    return load + load // 10_000
