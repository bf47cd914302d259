"""Hydra-like: one copy of every expert, popular ones placed near the chiplets that send them most tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.control.edits import move
from routepack_opt.residency.control.layer_book import LayerBook
from routepack_opt.residency.control.legality import legal_targets, may_leave

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class Hydra:
    """Every window the hottest experts of every layer look for a better place, hottest first.

    A place costs ``distance`` x the travel time of the expert's tokens plus the time its chiplet or its region would be
    busy, whichever is longer: popularity alone piles hot experts on few chiplets.

    Parameters
    ----------
    distance
        Weight of travel.
    moves
        Moves a layer and window; ``looks`` hottest experts are tried.
    gain
        Least gain of a move, as a share of the cost of staying.
    max_edits
        Moves a window, all layers together.
    """

    distance: float = 1.0
    moves: int = 1
    looks: int = 8
    gain: float = 0.1
    name: str = "hydra"
    mapping: str = "primary"
    max_edits: int | None = None

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The primaries."""
        return start_layout.primaries()

    def decide(self, view: PolicyView) -> list[Edit]:
        """Moves, layer by layer."""
        return [edit for layer in range(view.scene.num_layers) for edit in self._layer(view, layer)]

    def _layer(self, view: PolicyView, layer: int) -> list[Edit]:
        layout, region_of = view.layout, view.scene.hardware.region_of
        book = LayerBook.of_layout(layout, layer, view.hotness.demand[layer].astype(np.float64))
        leave = may_leave(view.directory, layer, view.window, replaced=True)
        edits: list[Edit] = []
        for expert in np.argsort(-book.work, kind="stable")[: self.looks].tolist():
            if not leave[expert, 0] or len(edits) >= self.moves:
                continue
            (here,) = layout.replicas(layer, expert)
            book.take_out(expert, *here, 1)
            busy = book.chiplet_s + book.work[expert] * book.token_s
            stream = np.where(region_of >= 0, (book.region_s + book.stream_s)[region_of], np.inf)
            cost = (
                np.maximum(busy[None, :], stream) + self.distance * book.distance(expert)[None, :] * book.work[expert]
            )
            legal = legal_targets(view.directory, layer, expert, moves=True)
            best = np.where(legal, cost, np.inf)
            tier, chiplet = divmod(int(np.argmin(best)), best.shape[1])
            if best[tier, chiplet] < (1.0 - self.gain) * cost[here]:
                edits.append(move(layer, expert, here, tier, chiplet))
                here = type(here)(tier, chiplet)
            book.place(expert, *here, np.zeros(0, dtype=np.int64))
        return edits
