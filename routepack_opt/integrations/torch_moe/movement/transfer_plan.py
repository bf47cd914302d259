"""What travels when a placement changes: transfers between EP ranks, copies inside them, rounds, and chunks that fit.

Arrays only, no torch: every rank computes the same plan from the same two maps and tensor sizes.

Shape suffixes: L MoE layers, E experts, P EP ranks, H local slots per rank (E / P), M transfers, K local copies.

In-place moves contain cycles (two experts that swap ranks), so no order of whole-expert copies is safe without spare
room. The plan therefore cuts the state of the experts into ranges: for one range every rank sends that range of all
its leaving experts straight from their slots, receives into a staging buffer, and copies the buffer into the slots
only after its own sends of that range are complete. The spare room is (arriving experts) x (range), whatever the
cycles, and the range is chosen so that no rank needs more than ``chunk_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.moves import list_transfers, schedule_moves
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

LAYER, EXPERT, SOURCE, TARGET, SOURCE_SLOT, TARGET_SLOT = range(6)  # columns of transfers and copies

_ALIGN = 512  # cuts fall on this many bytes where the range allows it: whole cache lines and memory transactions


@dataclass(frozen=True)
class SlotBytes:
    """Size of one slot tensor: its MoE layer, bytes of one slot, bytes of one element."""

    moe_layer: int
    slot_bytes: int
    item_bytes: int


@dataclass(frozen=True)
class Piece:
    """Bytes [low, high) of every moved slot of one tensor."""

    tensor: int
    moe_layer: int
    low: int
    high: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot's share."""
        return self.high - self.low


@dataclass(frozen=True)
class Chunk:
    """Pieces staged together.

    Attributes
    ----------
    pieces
        In the order in which a transfer sends them.
    rounds
        int64 [M_k, 6] each, rows of ``TransferPlan.transfers``; in a round every rank sends at most one expert of one
        layer and receives at most one.
    copies
        int64 [K, 6], changes of slot inside a rank.
    """

    pieces: tuple[Piece, ...]
    rounds: tuple[NDArray[np.int64], ...]
    copies: NDArray[np.int64]


@dataclass(frozen=True)
class TransferPlan:
    """Everything that moves.

    Attributes
    ----------
    transfers
        int64 [M, 6]: layer, expert, source EP rank, target EP rank, source and target slot local to those ranks.
    copies
        int64 [K, 6], the same columns, source rank = target rank: nothing travels.
    layer_bytes
        int64 [L], bytes of one expert of each layer over all its slot tensors.
    staging_bytes
        int64 [P], the largest staging buffer each rank needs.
    """

    num_layers: int
    num_ranks: int
    transfers: NDArray[np.int64]
    copies: NDArray[np.int64]
    layer_bytes: NDArray[np.int64]
    staging_bytes: NDArray[np.int64]
    chunks: tuple[Chunk, ...]

    @property
    def moved_experts(self) -> NDArray[np.int64]:
        """int64 [L], experts of each layer that change EP rank."""
        return np.bincount(self.transfers[:, LAYER], minlength=self.num_layers).astype(np.int64)

    @property
    def planned_bytes(self) -> int:
        """Bytes that travel inside one EDP shard: each moved expert once, all its slot tensors. No fewer can do."""
        return int(self.layer_bytes[self.transfers[:, LAYER]].sum())

    @property
    def sent_bytes(self) -> NDArray[np.int64]:
        """int64 [P], bytes each EP rank sends."""
        return self._by_rank(SOURCE)

    @property
    def received_bytes(self) -> NDArray[np.int64]:
        """int64 [P], bytes each EP rank receives."""
        return self._by_rank(TARGET)

    @property
    def num_rounds(self) -> int:
        """Rounds over all chunks."""
        return sum(len(chunk.rounds) for chunk in self.chunks)

    def _by_rank(self, column: int) -> NDArray[np.int64]:
        result = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(result, self.transfers[:, column], self.layer_bytes[self.transfers[:, LAYER]])
        return result


def check_placement(logical_to_slot: ArrayLike, name: str = "logical_to_slot") -> NDArray[np.int64]:
    """``logical_to_slot`` as int64 [L, E], or InvalidInput naming the layer that is no bijection."""
    array = integer_array(logical_to_slot, name, 2, low=0, high=np.iinfo(np.int64).max)
    wrong = (np.sort(array, axis=1) != np.arange(array.shape[1])).any(axis=1)
    if wrong.any():
        layer = int(np.argmax(wrong))
        raise InvalidInput(f"{name}[{layer}]: not a bijection of experts to slots 0..{array.shape[1] - 1}")
    return np.ascontiguousarray(array, dtype=np.int64)


def slot_changes(
    old: NDArray[np.int64], new: NDArray[np.int64], num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Transfers int64 [M, 6] between EP ranks and copies int64 [K, 6] inside them, see :class:`TransferPlan`.

    Parameters
    ----------
    old, new
        int64 [L, E], logical_to_slot in force and wanted.
    """
    num_slots = old.shape[1] // num_ranks

    def with_slots(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        layer, expert = rows[:, LAYER], rows[:, EXPERT]
        slots = [old[layer, expert] % num_slots, new[layer, expert] % num_slots]
        return np.column_stack([rows, *slots]).astype(np.int64)

    transfers = with_slots(list_transfers(new // num_slots, old // num_slots))
    layers, experts = np.nonzero((old != new) & (old // num_slots == new // num_slots))
    ranks = old[layers, experts] // num_slots
    return transfers, with_slots(np.stack([layers, experts, ranks, ranks], axis=1))


def plan_transfers(
    old: ArrayLike, new: ArrayLike, num_ranks: int, tensors: Sequence[SlotBytes], *, chunk_bytes: int
) -> TransferPlan:
    """Plan the moves from one placement to the next.

    Parameters
    ----------
    old, new
        int [L, E], logical_to_slot in force and wanted.
    num_ranks
        P.
    tensors
        Sizes of the slot tensors, in the same order on every rank.
    chunk_bytes
        Most bytes of staging on any rank.

    Raises
    ------
    InvalidInput
        No bijection, shapes that differ, or a budget below one element of every arriving expert (names the least).
    """
    before, after = check_placement(old, "old logical_to_slot"), check_placement(new, "new logical_to_slot")
    if before.shape != after.shape:
        raise InvalidInput(f"new logical_to_slot: shape {after.shape}, but the one in force has {before.shape}")
    num_layers, num_experts = before.shape
    if num_ranks < 1 or num_experts % num_ranks:
        raise InvalidInput(f"num_ranks: {num_experts} experts do not divide over {num_ranks} EP ranks")
    layer_bytes = np.zeros(num_layers, dtype=np.int64)
    for index, tensor in enumerate(tensors):
        if not 0 <= tensor.moe_layer < num_layers:
            raise InvalidInput(f"slot_tensors[{index}]: MoE layer {tensor.moe_layer}, expected 0..{num_layers - 1}")
        layer_bytes[tensor.moe_layer] += tensor.slot_bytes
    transfers, copies = slot_changes(before, after, num_ranks)
    arriving = np.zeros((num_layers, num_ranks), dtype=np.int64)  # copies are staged too: their cycles are no better
    for rows in (transfers, copies):
        np.add.at(arriving, (rows[:, LAYER], rows[:, TARGET]), 1)
    groups, staging = _cut(tensors, arriving, chunk_bytes)
    return TransferPlan(
        num_layers=num_layers,
        num_ranks=num_ranks,
        transfers=transfers,
        copies=copies,
        layer_bytes=layer_bytes,
        staging_bytes=staging,
        chunks=_with_rounds(groups, transfers, copies, num_ranks),
    )


def least_chunk_bytes(tensors: Sequence[SlotBytes], arriving: NDArray[np.int64]) -> int:
    """The smallest budget that works: one element of every expert that arrives at the busiest rank of a layer."""
    return max((t.item_bytes * int(arriving[t.moe_layer].max()) for t in tensors if t.slot_bytes), default=0)


def _cut(
    tensors: Sequence[SlotBytes], arriving: NDArray[np.int64], chunk_bytes: int
) -> tuple[list[list[Piece]], NDArray[np.int64]]:
    """Fill chunks with pieces, first fit in layer order; also int64 [P], the staging each rank needs."""
    least = least_chunk_bytes(tensors, arriving)
    if chunk_bytes < least:
        raise InvalidInput(
            f"chunk_bytes: {chunk_bytes} does not hold one element of every arriving expert; needs at least {least}"
        )
    groups: list[list[Piece]] = []
    used = np.zeros(arriving.shape[1], dtype=np.int64)
    most = used.copy()
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].moe_layer)
    for index in order:
        tensor, low = tensors[index], 0
        need = arriving[tensor.moe_layer]
        if not need.any():
            continue
        while low < tensor.slot_bytes:
            left = tensor.slot_bytes - low
            room = int(((chunk_bytes - used)[need > 0] // need[need > 0]).min())
            size = min(left, room)
            if size < left:
                size -= size % (_ALIGN if size >= _ALIGN else tensor.item_bytes)
            whole_chunk = not used.any()
            if size <= 0 or (size < left and size < _ALIGN and not whole_chunk):  # no crumbs at the end of a chunk
                used[:] = 0
                continue
            if whole_chunk:
                groups.append([])
            groups[-1].append(Piece(index, tensor.moe_layer, low, low + size))
            used += need * size
            most = np.maximum(most, used)
            low += size
    return groups, most


def _with_rounds(
    groups: list[list[Piece]], transfers: NDArray[np.int64], copies: NDArray[np.int64], num_ranks: int
) -> tuple[Chunk, ...]:
    """Schedule the transfers of each chunk; chunks of the same layers share one schedule."""
    known: dict[tuple[int, ...], tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64]]] = {}
    chunks = []
    for pieces in groups:
        sizes: dict[int, int] = {}
        for piece in pieces:
            sizes[piece.moe_layer] = sizes.get(piece.moe_layer, 0) + piece.num_bytes
        layers = tuple(sizes)
        if layers not in known:
            rows = transfers[np.isin(transfers[:, LAYER], layers)]
            seconds = np.array([sizes[layer] for layer in rows[:, LAYER].tolist()], dtype=np.float64)
            rounds = schedule_moves(rows, num_ranks, seconds=seconds)
            known[layers] = (tuple(rounds), copies[np.isin(copies[:, LAYER], layers)])
        chunks.append(Chunk(tuple(pieces), *known[layers]))
    return tuple(chunks)
