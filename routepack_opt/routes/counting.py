"""Routes -> counts: the row rules of one sample and the guarded call of the compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.samples import (
    MAX_LENGTH,
    RouteBlock,
    checked_ids,
    checked_moe_layers,
    checked_num_experts,
    single_sample,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """What counting one block yields; the routes themselves are gone.

    ``counts`` int32 [n, L, E] over the counted layers; the other arrays are [n, L] except where noted.
    """

    counts: NDArray[np.int32]
    counted_rows: NDArray[np.int64]  # [n], rows that were read: without a dropped filler row
    missing_rows: NDArray[np.int64]
    duplicate_rows: NDArray[np.int64]
    first_duplicate: NDArray[np.int64]
    filler: NDArray[np.bool_]  # [n], the last row was filler and dropped
    all_zero: NDArray[np.bool_]  # every present row of the layer names expert 0 only
    present: NDArray[np.bool_]  # the layer has at least one row that is not missing
    unlisted_layer: int  # a dump layer that moe_layers leaves out and that carries routes, or -1


def count_experts(
    routes: Any,
    num_experts: int,
    *,
    length: int | None = None,
    start_len: int | None = None,
    moe_layers: Sequence[int] | None = None,
) -> NDArray[np.int32]:
    """Count one sample's routes where they are produced, so that counts travel instead of routes.

    Parameters
    ----------
    routes
        [rows, layers, K] logical expert ids: any integer dtype, numpy or torch. A row of K times -1 counts nothing.
    num_experts
        E.
    length
        Tokens of the sample. When given, the rows must be length or length - 1 (less ``start_len``) and a last row
        that is filler is dropped; None counts every row.
    start_len
        First token that has a row.
    moe_layers
        The MoE layers among the dump's layers; None counts every layer, dense (all zero) ones too.

    Returns
    -------
    int32 [L, E].

    Raises
    ------
    InvalidInput
        Ids of E or more, partly -1 rows, a dtype too narrow for E, rows that do not fit the length.
    """
    num_experts = checked_num_experts(num_experts)
    if length is None and start_len is not None:
        raise InvalidInput("start_len: needs length too")
    array = checked_ids(routes, "routes")
    rows = int(array.shape[0])
    block = single_sample(
        array, rows + 1 if length is None else int(length), source="routes", index=0, start_len=start_len
    )
    layers = select_layers(array.shape[1], checked_moe_layers(moe_layers), None, "routes")
    return np.asarray(count_block(block, num_experts, layers).counts[0])


def select_layers(
    dump_layers: int, moe_layers: NDArray[np.int64] | None, layer_numbers: tuple[int, ...] | None, where: str
) -> NDArray[np.int64]:
    """Positions of the layers to count among the dump's layers.

    A dump with exactly the MoE layers is taken as it is; one with more layers is indexed by ``moe_layers``.
    """
    if moe_layers is None:
        return np.arange(dump_layers, dtype=np.int64)
    if layer_numbers is not None:
        at = {number: position for position, number in enumerate(layer_numbers)}
        absent = [int(layer) for layer in moe_layers if int(layer) not in at]
        if absent:
            raise InvalidInput(f"{where}: layer {absent[0]} of moe_layers is not in the trace; it has {layer_numbers}")
        return np.array([at[int(layer)] for layer in moe_layers], dtype=np.int64)
    if dump_layers == moe_layers.size:
        return np.arange(dump_layers, dtype=np.int64)
    if int(moe_layers[-1]) >= dump_layers:
        raise InvalidInput(
            f"{where}: the dump has {dump_layers} layers but moe_layers names {moe_layers.size} up to layer"
            f" {int(moe_layers[-1])}; expected {moe_layers.size} layers (MoE only)"
            f" or at least {int(moe_layers[-1]) + 1}"
        )
    return moe_layers


def count_block(block: RouteBlock, num_experts: int, layers: NDArray[np.int64]) -> BlockCounts:
    """Count a block, applying the rules of one row and one sample (see docs/routes.md).

    Raises
    ------
    InvalidInput
        Naming source, sample, row and layer.
    """
    check_lengths(block)
    routes, num_samples, num_layers = block.routes, block.num_samples, layers.size
    counts = np.zeros((num_samples, num_layers, num_experts), dtype=np.int32)
    missing_rows, duplicate_rows = np.zeros((2, num_samples, num_layers), dtype=np.int64)
    first_duplicate = np.full((num_samples, num_layers), -1, dtype=np.int64)
    filler = np.zeros(num_samples, dtype=np.bool_)
    counted_rows = block.num_rows.copy()
    unlisted = -1
    if routes is not None:
        check_width(block, num_experts)
        routes = np.ascontiguousarray(routes, dtype=routes.dtype.newbyteorder("="))
        stops = np.cumsum(block.num_rows)
        starts = stops - block.num_rows
        filler = filler_rows(block, routes, stops, layers)
        counted_rows -= filler
        tallies = (counts, missing_rows, duplicate_rows, first_duplicate)
        bad = _call_kernel(routes, starts, starts + counted_rows, layers, num_experts, tallies)
        if bad[0] >= 0:
            sample, row, position = bad
            raise InvalidInput(
                _describe_bad_row(
                    routes[row, layers[position]],
                    num_experts,
                    f"{block.label(sample)}: row {row - starts[sample]}, layer {_layer_name(block, layers[position])}",
                )
            )
        unlisted = _unlisted_layer(routes, layers)
    top_k = 1 if routes is None else routes.shape[2]
    present_rows = counted_rows[:, None] - missing_rows
    present = present_rows > 0
    return BlockCounts(
        counts=counts,
        counted_rows=counted_rows,
        missing_rows=missing_rows,
        duplicate_rows=duplicate_rows,
        first_duplicate=first_duplicate,
        filler=filler,
        all_zero=present & (counts[:, :, 0] == present_rows * top_k),
        present=present,
        unlisted_layer=unlisted,
    )


def check_lengths(block: RouteBlock) -> None:
    """Rows against length: len or len - 1 of them, counted from start_len; fewer need an explicit start."""
    lengths, rows = block.lengths, block.num_rows
    starts = np.maximum(block.start_lens, 0)
    covered = lengths - starts
    wrong = (lengths < 1) | (lengths > MAX_LENGTH) | (block.start_lens > lengths - 1)
    wrong |= (rows > covered) | (rows < covered - 1)
    if not wrong.any():
        return
    at = int(np.argmax(wrong))
    label, length, start, count = block.label(at), int(lengths[at]), int(block.start_lens[at]), int(rows[at])
    if not 1 <= length <= MAX_LENGTH:
        raise InvalidInput(f"{label}: length {length} is not between 1 and {MAX_LENGTH}")
    if start > length - 1:
        raise InvalidInput(f"{label}: start_len {start} is not below length {length}")
    rows_text = f"{count} route row{'' if count == 1 else 's'}"
    expected = f"{max(length - 1 - max(start, 0), 0)} or {length - max(start, 0)}"
    if count > length - max(start, 0):
        after = f" from start_len {start}" if start > 0 else ""
        raise InvalidInput(
            f"{label}: {rows_text} for {length} tokens{after}, more rows than tokens; expected {expected}"
        )
    if start < 0:
        raise InvalidInput(
            f"{label}: {rows_text} for {length} tokens; expected {expected}, fewer rows need an explicit start_len"
        )
    raise InvalidInput(f"{label}: {rows_text} for {length} tokens from start_len {start}; expected {expected}")


def check_width(block: RouteBlock, num_experts: int) -> None:
    """Refuse a dtype that cannot hold every id, whose large ids were wrapped before they came here."""
    routes = block.routes
    assert routes is not None
    highest = int(np.iinfo(routes.dtype).max)
    if highest < num_experts - 1:
        raise InvalidInput(
            f"{block.label(0)}: dtype {routes.dtype} holds ids up to {highest} but num_experts is {num_experts};"
            " larger ids may already have been wrapped, store a wider dtype"
        )
    if int(block.num_rows.max(initial=0)) * routes.shape[2] > MAX_LENGTH:
        raise InvalidInput(f"{block.label(int(block.num_rows.argmax()))}: rows x top_k is above {MAX_LENGTH}")


def filler_rows(
    block: RouteBlock, routes: NDArray[Any], stops: NDArray[np.int64], layers: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Bool [n]: the sample has a row for its last token, and it is filler: per layer all zero (K > 1) or all -1."""
    covered = block.lengths - np.maximum(block.start_lens, 0)
    filler: NDArray[np.bool_] = np.asarray((block.num_rows == covered) & (block.num_rows > 0))
    if filler.any():
        at = np.flatnonzero(filler)
        last = routes[stops[at] - 1][:, layers]
        empty = np.zeros(last.shape[:2], dtype=np.bool_)
        if last.shape[2] > 1:
            empty |= (last == 0).all(axis=2)
        if last.dtype.kind == "i":
            empty |= (last == -1).all(axis=2)
        filler[at] = empty.all(axis=1)
    return filler


def _call_kernel(
    routes: NDArray[Any],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    layers: NDArray[np.int64],
    num_experts: int,
    tallies: tuple[NDArray[Any], ...],
) -> tuple[int, int, int]:
    from routepack_opt.routes.kernels import count_rows

    # Signed ids are read as unsigned of the same width: every negative becomes larger than any expert, so that one
    # comparison guards the count. Read-only views give the kernel one type whatever the array came from.
    signed, bits = routes.dtype.kind == "i", routes.dtype.itemsize * 8
    ids = routes.reshape(-1).view(f"u{routes.dtype.itemsize}")
    ids.flags.writeable = False
    bad = count_rows(
        ids,
        starts,
        stops,
        routes.shape[1],
        routes.shape[2],
        layers,
        np.uint64(num_experts),
        signed,
        np.uint64((1 << bits) - 1),
        *tallies,
        np.zeros(num_experts, dtype=np.int64),
    )
    return int(bad[0]), int(bad[1]), int(bad[2])


def _describe_bad_row(ids: NDArray[Any], num_experts: int, where: str) -> str:
    values = [int(value) for value in ids]
    if -1 in values:
        return f"{where}: ids {values} are partly -1; the row is corrupt (a missing row is -1 in all of its ids)"
    worst = min(values)
    if worst < 0:
        return f"{where}: expert id {worst} is negative; expected 0 to {num_experts - 1}, or -1 in the whole row"
    worst = max(values)
    hint = "; or a wrapped -1" if worst == np.iinfo(ids.dtype).max and ids.dtype.kind == "u" else ""
    return (
        f"{where}: expert id {worst} is not below num_experts {num_experts}; physical ids?"
        f" Routes must carry logical expert ids{hint}"
    )


def _layer_name(block: RouteBlock, position: int) -> int:
    return int(position) if block.layer_numbers is None else block.layer_numbers[position]


def _unlisted_layer(routes: NDArray[Any], layers: NDArray[np.int64]) -> int:
    if layers.size == routes.shape[1]:
        return -1
    rest = np.setdiff1d(np.arange(routes.shape[1]), layers)
    for layer in rest:
        ids = routes[:, layer]
        real = ids != 0 if ids.dtype.kind == "u" else (ids != 0) & (ids != -1)
        if real.any():
            return int(layer)
    return -1
