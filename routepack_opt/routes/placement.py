"""Routes under a placement: pad rows that load every EP rank evenly, and logical ids -> slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.samples import checked_ids, checked_moe_layers, checked_num_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, DTypeLike, NDArray


_MAX_SIZE = 2**31 - 1  # of one axis


def pad_routes(
    num_rows: int,
    num_layers: int,
    top_k: int,
    num_experts: int,
    *,
    num_ranks: int,
    logical_to_slot: ArrayLike | None = None,
    first_row: int = 0,
    dtype: DTypeLike = np.int32,
) -> NDArray[Any]:
    """Routes for pad tokens that name distinct experts in every row and load the EP ranks evenly.

    Pad tokens are real expert load: rows that all name the same experts overload one rank. Here, in every layer and
    for every prefix of rows, the loads of any two EP ranks (and of any two experts) differ by at most one.

    Parameters
    ----------
    num_rows, num_layers, top_k
        Shape of the result.
    num_experts
        E, a multiple of ``num_ranks``; at least ``top_k``.
    num_ranks
        P; rank p holds slots [p E / P, (p + 1) E / P).
    logical_to_slot
        [L, E] placement; None is the identity.
    first_row
        Continue after this many pad rows, so that the pads of several samples are even together.
    dtype
        Integer type of the result.

    Returns
    -------
    [num_rows, num_layers, top_k] logical expert ids.
    """
    num_experts = checked_num_experts(num_experts)
    for name, value, low in (
        ("num_rows", num_rows, 0), ("num_layers", num_layers, 1), ("top_k", top_k, 1), ("num_ranks", num_ranks, 1),
        ("first_row", first_row, 0),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
            raise InvalidInput(f"{name}: {value!r} is not an integer of at least {low}")
        if value > _MAX_SIZE:
            raise InvalidInput(f"{name}: {value} is above {_MAX_SIZE}")
    if top_k > num_experts:
        raise InvalidInput(
            f"top_k: {top_k} distinct experts from num_experts {num_experts}; expected at most that many"
        )
    if num_experts % num_ranks:
        raise InvalidInput(f"num_ranks: {num_ranks} does not divide num_experts {num_experts}")
    kind = np.dtype(dtype)
    if kind.kind not in "iu" or np.iinfo(kind).max < num_experts - 1:
        raise InvalidInput(f"dtype: {kind} cannot hold expert ids up to {num_experts - 1}")
    # Walk the slots rank by rank: any run of consecutive steps touches ranks in turn, and any E steps are distinct.
    per_rank = num_experts // num_ranks
    step = np.arange(num_experts)
    slot_of_step = (step % num_ranks) * per_rank + step // num_ranks
    if logical_to_slot is None:
        expert_of_step = np.broadcast_to(slot_of_step, (num_layers, num_experts))
    else:
        slots = checked_placement(logical_to_slot, num_experts)
        if slots.shape[0] != num_layers:
            raise InvalidInput(f"logical_to_slot: {slots.shape[0]} layers, expected num_layers {num_layers}")
        expert_of_step = np.argsort(slots, axis=1)[:, slot_of_step]
    steps = (np.arange(int(num_rows) * top_k, dtype=np.int64) + int(first_row) * top_k) % num_experts
    routes = expert_of_step[:, steps].astype(kind).reshape(num_layers, num_rows, top_k)
    return np.ascontiguousarray(routes.transpose(1, 0, 2))


def remap_routes(routes: Any, logical_to_slot: ArrayLike, *, moe_layers: Sequence[int] | None = None) -> NDArray[Any]:
    """Replace logical expert ids by slots, layer by layer; ids of -1 (missing) stay.

    A permutation per layer, so a token's ids stay distinct if they were. Map after the filler last row was handled:
    an all-zero filler row becomes K copies of one slot and is no longer recognisable.

    Parameters
    ----------
    routes
        [rows, layers, K] integer ids, numpy or torch.
    logical_to_slot
        [L, E], a permutation of 0..E-1 in every layer.
    moe_layers
        Where the dump has more layers than L: the L dump layers to map; the others are copied.

    Returns
    -------
    A new numpy array of the same shape and dtype.
    """
    array = checked_ids(routes, "routes")
    slots = checked_placement(logical_to_slot, None)
    num_layers, num_experts = slots.shape
    layers = np.arange(array.shape[1])
    if moe_layers is not None:
        chosen = checked_moe_layers(moe_layers)
        assert chosen is not None
        layers = chosen if array.shape[1] != chosen.size else layers
    if layers.size != num_layers or int(layers[-1]) >= array.shape[1]:
        raise InvalidInput(
            f"routes: {array.shape[1]} layers but logical_to_slot has {num_layers};"
            " give moe_layers, one dump layer for each layer of the placement"
        )
    if np.iinfo(array.dtype).max < num_experts - 1:
        raise InvalidInput(f"routes: dtype {array.dtype} cannot hold slots up to {num_experts - 1}")
    result = array.copy()
    signed = array.dtype.kind == "i"
    for position, layer in enumerate(layers):
        ids = array[:, layer].astype(np.int64)
        bad = (ids < (-1 if signed else 0)) | (ids >= num_experts)
        if bad.any():
            row, k = np.argwhere(bad)[0]
            raise InvalidInput(
                f"routes[{row},{layer},{k}]: id {array[row, layer, k]} is not a logical expert below {num_experts}"
            )
        table = np.append(slots[position], -1)  # index -1 is the missing id
        result[:, layer] = table[ids].astype(array.dtype)
    return result


def checked_placement(logical_to_slot: ArrayLike, num_experts: int | None) -> NDArray[np.int64]:
    """``logical_to_slot`` as int64 [L, E] with a permutation in every layer, or InvalidInput naming the layer."""
    from routepack_opt.window import integer_array

    slots = integer_array(logical_to_slot, "logical_to_slot", 2, low=0, high=2**31).astype(np.int64)
    if num_experts is not None and slots.shape[1] != num_experts:
        raise InvalidInput(f"logical_to_slot: {slots.shape[1]} experts, expected num_experts {num_experts}")
    wrong = (np.sort(slots, axis=1) != np.arange(slots.shape[1])).any(axis=1)
    if wrong.any():
        raise InvalidInput(
            f"logical_to_slot[{int(np.argmax(wrong))}]: not a permutation of 0..{slots.shape[1] - 1};"
            " every slot must appear once"
        )
    return slots
