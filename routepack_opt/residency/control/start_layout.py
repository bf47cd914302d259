"""The popularity layout every policy starts from: balanced primaries, and replicas of the busiest up to the budget."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.layer_book import LayerBook
from routepack_opt.residency.simulator.layout import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene

Location = Literal["balanced", "near", "spread"]
LOCATIONS: tuple[Location, ...] = ("balanced", "near", "spread")


def popularity_layout(
    scene: Scene,
    profile: NDArray[np.int64] | NDArray[np.float64],
    *,
    num_windows: int = 1,
    location: Location = "balanced",
) -> Layout:
    """The common start layout.

    Primaries: in every layer the experts, busiest first, each go to the tier and chiplet that grow the p-norm of
    service times (chiplets: arithmetic, regions: streaming) the least; every layer may use an even share of each
    region. Replicas: as long as the budget has room, the expert with the most demand per replica gets one more.

    Parameters
    ----------
    scene
        Model and machine.
    profile
        [L, E, C] summed demand of the first tenth of the workload.
    num_windows
        Windows in ``profile``: the balance of arithmetic against streaming needs one window's demand.
    location
        Where replicas go: "balanced" (as primaries), "near" (least travel of the expert's tokens, then the emptier
        region), "spread" (a chiplet group without a replica of the expert first, then as "balanced").

    Raises
    ------
    InvalidInput
        Profile of another shape, or an unknown location.
    """
    shape = scene.num_layers, scene.num_experts, scene.num_chiplets
    if profile.shape != shape:
        raise InvalidInput(f"profile: {profile.shape}; expected {shape}")
    if location not in LOCATIONS:
        raise InvalidInput(f"location: {location!r} is unknown; expected one of {', '.join(LOCATIONS)}")
    demand = np.asarray(profile, dtype=np.float64) / max(num_windows, 1)
    layout = Layout(scene)
    books = [LayerBook(scene, layer, demand[layer]) for layer in range(scene.num_layers)]
    for layer, book in enumerate(books):
        _place_primaries(layout, book, layer_quota(scene, layer))
    _add_replicas(layout, books, location)
    return layout


def replicate(layout: Layout, profile: NDArray[np.float64], location: Location) -> Layout:
    """Fill the budget of a layout of primaries with replicas by popularity; ``profile`` [L, E, C] of one window."""
    books = [LayerBook(layout.scene, layer, profile[layer]) for layer in range(layout.scene.num_layers)]
    nothing = np.zeros(0, dtype=np.int64)
    for (layer, expert), tier in np.ndenumerate(layout.tier[:, :, 0]):
        books[layer].place(expert, int(tier), int(layout.chiplet[layer, expert, 0]), nothing)
    _add_replicas(layout, books, location)
    return layout


def layer_quota(scene: Scene, layer: int) -> NDArray[np.int64]:
    """[G] experts of ``layer`` each region takes: an even share of its room; slots left over go to layers in turn."""
    slots = np.floor(scene.region_room / scene.expert_bytes.max()).astype(np.int64)
    shift = np.arange(len(slots)) * scene.num_layers // max(len(slots), 1)  # regions serve different layers first
    first = (layer + shift) % scene.num_layers
    return np.asarray((first + 1) * slots // scene.num_layers - first * slots // scene.num_layers)


def _place_primaries(layout: Layout, book: LayerBook, quota: NDArray[np.int64]) -> None:
    region_of = layout.scene.hardware.region_of
    quota = quota.copy()
    nothing = np.zeros(0, dtype=np.int64)
    for expert in np.argsort(-book.work, kind="stable").tolist():
        free = layout.may_add(book.layer, expert)
        within = free & (quota[region_of] > 0)
        cost = np.where(within if within.any() else free, book.cost(expert, nothing), np.inf)
        tier, chiplet = divmod(int(np.argmin(cost)), cost.shape[1])
        if not np.isfinite(cost[tier, chiplet]):
            raise InvalidInput(f"layer {book.layer}: no region has room for expert {expert}; expected a larger budget")
        layout.add(book.layer, expert, tier, chiplet)
        book.place(expert, tier, chiplet, nothing)
        quota[region_of[tier, chiplet]] -= 1


def _add_replicas(layout: Layout, books: list[LayerBook], location: Location = "balanced") -> None:
    """Fill the budget: one more replica for the expert with the most demand per replica, again and again."""
    scene = layout.scene
    queue = [
        (-float(book.work[expert]) / int(layout.count[layer, expert]), layer, expert)
        for layer, book in enumerate(books)
        for expert in range(scene.num_experts)
    ]
    heapq.heapify(queue)
    while queue and layout.budget_left() >= scene.expert_bytes.min():
        _, layer, expert = heapq.heappop(queue)
        free = layout.may_add(layer, expert)
        if not free.any():
            continue
        book = books[layer]
        placed = layout.chiplet[layer, expert, : layout.count[layer, expert]].astype(np.int64)
        free[:, placed] = False  # two copies on one chiplet share its arithmetic
        if not free.any():
            continue
        cost = np.where(free, _location_cost(book, expert, placed, location), np.inf)
        tier, chiplet = divmod(int(np.argmin(cost)), cost.shape[1])
        layout.add(layer, expert, tier, chiplet)
        book.place(expert, tier, chiplet, placed)
        heapq.heappush(queue, (-float(book.work[expert]) / int(layout.count[layer, expert]), layer, expert))


def _location_cost(book: LayerBook, expert: int, placed: NDArray[np.int64], location: Location) -> NDArray[np.float64]:
    hardware = book.scene.hardware
    cost = book.cost(expert, placed)
    if location == "balanced":
        return cost
    if location == "near":
        region_s = np.where(hardware.region_of >= 0, (book.region_s + book.stream_s)[hardware.region_of], np.inf)
        return np.asarray(book.distance(expert)[None, :] * 1e6 + region_s)
    groups = hardware.region_of[-1]
    taken = np.isin(groups, groups[placed])
    return np.asarray(cost + np.where(taken, 1e9, 0.0)[None, :])
