"""PIMoE-like: hot experts on the compute side, cold memory-bound ones on the memory side, moves under a throttle."""

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
class Pimoe:
    """One copy of every expert, in one of two classes.

    An expert is hot when its arithmetic takes longer than its stream: it belongs in a fast tier on the least busy
    chiplet. The others are memory-bound: they belong in the slowest tier, in the least busy region, on a chiplet next
    to it. Every window each layer moves at most ``throttle`` experts, those with most to gain; a hot one that finds no
    room in the fast tiers sends the coldest expert there away.

    Parameters
    ----------
    throttle
        Moves a layer and window.
    gain
        Least gain of a move, as a share of the layer's peak service time.
    """

    throttle: int = 1
    gain: float = 0.05
    looks: int = 8
    name: str = "pimoe"
    mapping: str = "primary"
    max_edits: int | None = None

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The primaries."""
        hardware = scene.hardware
        node = hardware.memory_node[-1]
        away = hardware.route_inverse_bandwidth[node, np.arange(scene.num_chiplets)]
        nearest = np.array([away[node == other].min() for other in node])
        self._memory_side = away <= nearest
        return start_layout.primaries()

    def decide(self, view: PolicyView) -> list[Edit]:
        """Moves, layer by layer."""
        return [edit for layer in range(view.scene.num_layers) for edit in self._layer(view, layer)]

    def _layer(self, view: PolicyView, layer: int) -> list[Edit]:
        layout, region_of = view.layout, view.scene.hardware.region_of
        book = LayerBook.of_layout(layout, layer, view.hotness.demand[layer].astype(np.float64))
        leave = may_leave(view.directory, layer, view.window, replaced=True)[:, 0]
        tiers, chiplets = layout.tier[layer, :, 0].astype(np.int64), layout.chiplet[layer, :, 0].astype(np.int64)
        hot = book.work * book.token_s.mean() > book.stream_s[region_of[tiers, chiplets]]
        slowest = view.scene.num_tiers - 1
        peak_s = max(float(book.chiplet_s.max()), float(book.region_s.max()))
        pressed = book.chiplet_s[chiplets] + (hot & (tiers == slowest)) * peak_s
        edits: list[Edit] = []
        for expert in np.argsort(-np.where(leave, pressed * (book.work + 1e-9), -1.0), kind="stable")[: self.looks]:
            if len(edits) >= self.throttle:
                break
            if not leave[expert]:
                continue
            (here,) = layout.replicas(layer, int(expert))
            legal = legal_targets(view.directory, layer, int(expert), moves=True)
            if hot[expert]:
                if legal[:slowest].any():
                    legal[slowest] = False
            else:
                legal[:slowest] = False
                legal[slowest] &= self._memory_side
            book.take_out(int(expert), *here, 1)
            busy = book.chiplet_s + book.work[expert] * book.token_s
            stream = np.where(region_of >= 0, (book.region_s + book.stream_s)[region_of], np.inf)
            cost = np.maximum(busy[None, :], stream)
            best = np.where(legal, cost, np.inf)
            tier, chiplet = divmod(int(np.argmin(best)), best.shape[1])
            if best[tier, chiplet] < cost[here] - self.gain * peak_s:
                edits.append(move(layer, int(expert), here, tier, chiplet))
                here = type(here)(tier, chiplet)
            book.place(int(expert), *here, np.zeros(0, dtype=np.int64))
        return edits
