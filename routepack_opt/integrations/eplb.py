"""Drop-ins for the expert load balancers of inference engines: same arguments, same returns, better balance.

Every function takes torch tensors or numpy arrays and returns what it was given, int64 on the CPU. Unlike the
originals, NaN and negative loads are refused, and no rank gets two copies of an expert unless nothing else fits.
Same input, same table on every rank of a job.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput, RoutePackError, TopologyError
from routepack_opt.models.grouped_placement import assign_groups, node_experts
from routepack_opt.models.moves import slots_from_ranks
from routepack_opt.models.placement import solve_placement
from routepack_opt.models.replication import check_table, keep_slots, solve_replication
from routepack_opt.models.token_split import count_copies

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

logger = logging.getLogger(__name__)

_SCALED_BITS = 40
"""Fractional loads are scaled so that the largest has this many bits: far below what balance can resolve."""


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """DeepSeek EPLB's entry point.

    Parameters
    ----------
    weight
        [L, E], load of each logical expert.
    num_replicas
        S, slots over all GPUs, a multiple of ``num_gpus``.
    num_groups
        Routing groups; kept whole on a node where ``num_nodes`` divides them, ignored otherwise.
    num_nodes, num_gpus
        Nodes, and GPUs over all nodes.

    Returns
    -------
    physical_to_logical, logical_to_physical, expert_count
        int64 [L, S]; [L, E, X] padded with -1, X the most copies of an expert; [L, E].
    """
    load = whole_loads(weight)
    table = balanced_table(load, num_replicas, num_groups, num_nodes, num_gpus)
    count = count_copies(table, load.shape[1])
    return _like(weight, table), _like(weight, logical_to_physical(table, load.shape[1])), _like(weight, count)


def rebalance_experts_vllm(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Any = None,
) -> Any:
    """vLLM's policy entry point; slots keep the expert they hold wherever the new balance allows.

    Returns
    -------
    physical_to_logical
        int64 [L, S].
    """
    load = whole_loads(weight)
    old = (
        None if old_global_expert_indices is None else _to_numpy(old_global_expert_indices, "old_global_expert_indices")
    )
    if old is not None and old.dtype.kind not in "iu":
        raise InvalidInput(f"old_global_expert_indices: expected integers, found dtype {old.dtype}")
    if old is not None and old.shape != (len(load), num_replicas):
        old = None  # the engine was resized: there is nothing to keep
    if old is not None:  # a slot that holds nothing, or no expert of this model, has nothing to keep either
        old = np.where((old >= 0) & (old < load.shape[1]), old, -1).astype(np.int64)
    return _like(weight, balanced_table(load, num_replicas, num_groups, num_nodes, num_ranks, standing=old))


def rebalance_experts_sglang(
    tokens_per_expert: Any,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any = None,
) -> tuple[Any, Any, Any]:
    """SGLang's entry point; ``tokens_per_expert`` is [steps, L, E] (summed over steps) or [L, E].

    ``algorithm`` is accepted for compatibility and ignored. Returns as :func:`rebalance_experts`.
    """
    del algorithm
    values = _to_numpy(tokens_per_expert, "tokens_per_expert")
    if values.ndim == 3:
        values = sum_steps(values, "tokens_per_expert")
    load = whole_loads(values, "tokens_per_expert")
    num_physical_experts = whole_number(num_physical_experts, "num_physical_experts")
    num_local_physical_experts = whole_number(num_local_physical_experts, "num_local_physical_experts")
    if num_local_physical_experts < 1 or num_physical_experts % num_local_physical_experts:
        raise InvalidInput(
            f"num_local_physical_experts: {num_local_physical_experts} does not divide {num_physical_experts} slots"
        )
    num_gpus = num_physical_experts // num_local_physical_experts
    table = balanced_table(load, num_physical_experts, num_groups or 1, num_nodes, num_gpus)
    wide = logical_to_physical(table, load.shape[1])
    return (
        _like(tokens_per_expert, table),
        _like(tokens_per_expert, wide),
        _like(tokens_per_expert, count_copies(table, load.shape[1])),
    )


def balanced_table(
    load: NDArray[np.int64],
    num_slots: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    *,
    standing: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """int64 [L, S], the logical expert of every slot; node by node where ``num_nodes`` divides ``num_groups``.

    Parameters
    ----------
    standing
        int64 [L, S], the table in force: slots keep their expert where that costs no balance.
    """
    num_layers, num_experts = load.shape
    num_slots, num_groups, num_nodes, num_ranks = (
        whole_number(value, name)
        for value, name in (
            (num_slots, "num_replicas"),
            (num_groups, "num_groups"),
            (num_nodes, "num_nodes"),
            (num_ranks, "num_ranks"),
        )
    )
    for name, part, whole in (("num_nodes", num_nodes, num_ranks), ("num_ranks", num_ranks, num_slots)):
        if part < 1 or whole % part:
            raise TopologyError(f"{name}: {part} does not divide {whole} {'slots' if name == 'num_ranks' else 'ranks'}")
    one_level = num_groups < 1 or num_groups % num_nodes != 0 or num_nodes == 1
    if num_groups < 1 or (num_experts % num_groups and num_groups % num_nodes == 0):
        raise TopologyError(f"num_groups: {num_groups} does not divide {num_experts} experts")
    if one_level:
        table = _one_level(load, num_slots, num_ranks, standing, seed)
    else:
        node_of = assign_groups(load, num_groups, num_nodes, seed=seed)
        experts = node_experts(node_of, num_nodes).reshape(num_layers * num_nodes, -1)
        node_load = np.take_along_axis(load, experts.reshape(num_layers, -1), axis=1).reshape(experts.shape)
        local = _one_level(node_load, num_slots // num_nodes, num_ranks // num_nodes, None, seed)
        table = np.take_along_axis(experts, local, axis=1).reshape(num_layers, num_slots)
        if standing is not None:
            table = _keep_by_node(table, standing, num_nodes, num_ranks)
    # an expert whose copies all live on one node doubles up as soon as the ranks of that node run out
    return check_table(table, num_experts, num_ranks, "new table", num_nodes=1 if one_level else num_nodes)


def adopt_table(new: ArrayLike, standing: NDArray[np.int64], num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """``new`` when it is sound, otherwise the standing table, with a warning that says what is wrong."""
    try:
        return check_table(new, num_experts, num_ranks, "new table")
    except RoutePackError as error:
        logger.warning("keeping the standing table: %s", error)
        return standing


def logical_to_physical(table: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """int64 [L, E, X], the slots of each expert in rising order, padded with -1; X is the most copies there are."""
    num_layers, num_slots = table.shape
    count = count_copies(table, num_experts)
    order = np.argsort(table, axis=1, kind="stable")
    expert = np.take_along_axis(table, order, axis=1)
    first = np.cumsum(count, axis=1) - count
    nth = np.arange(num_slots) - np.take_along_axis(first, expert, axis=1)
    result = np.full((num_layers, num_experts, int(count.max())), -1, dtype=np.int64)
    result[np.arange(num_layers)[:, None], expert, nth] = order
    return result


def whole_loads(weight: Any, name: str = "weight") -> NDArray[np.int64]:
    """Loads as int64 [L, E]; fractional ones are scaled up, which leaves the balance problem the same.

    Raises
    ------
    InvalidInput
        NaN, infinite or negative loads; names the index.
    """
    values = _to_numpy(weight, name)
    if values.ndim != 2 or not values.size:
        raise InvalidInput(f"{name}: expected [layers, experts], found shape {values.shape}")
    check_counts(values, name)
    limit = load_limit(values.shape[1])
    if values.dtype.kind == "f" and (values.max() > limit or (values != np.floor(values)).any()):
        # layer by layer: layers do not share a scale
        exponent = _SCALED_BITS - np.frexp(values.max(axis=1, keepdims=True))[1]
        values = np.rint(np.ldexp(values.astype(np.float64), exponent))
    if values.max() > limit:
        index = np.argwhere(values > limit)[0].tolist()
        raise InvalidInput(f"{name}{index}: {values[tuple(index)]} is above {limit}; scale the loads down")
    return np.ascontiguousarray(values, dtype=np.int64)


def load_limit(num_experts: int) -> int:
    """The largest load whose sum over experts stays far from the end of int64."""
    return (1 << 60) // num_experts


def check_counts(values: NDArray[Any], name: str) -> None:
    """Refuse what is no number, not finite or negative; names the index."""
    if values.dtype.kind not in "iuf":
        raise InvalidInput(f"{name}: expected numbers, found dtype {values.dtype}")
    for bad, why in ((~np.isfinite(values), "is not a finite number"), (values < 0, "is negative")):
        if bad.any():
            index = np.argwhere(bad)[0].tolist()
            raise InvalidInput(f"{name}{index}: {values[tuple(index)]} {why}; expected loads >= 0")


def sum_steps(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Loads [steps, L, E] summed over steps, every one of them checked: sums may not wrap, nor hide a negative."""
    if not values.size:
        raise InvalidInput(f"{name}: expected [steps, layers, experts], found shape {values.shape}")
    check_counts(values, name)
    rough = values.sum(axis=0, dtype=np.float64)
    if values.dtype.kind == "f":
        return np.asarray(rough)
    limit = load_limit(values.shape[-1])
    if rough.max() > limit:
        layer, expert = np.argwhere(rough == rough.max())[0].tolist()
        raise InvalidInput(
            f"{name}[:,{layer},{expert}]: the steps sum to {rough.max():.4g}, above {limit}; scale the loads down"
        )
    return np.asarray(values.sum(axis=0, dtype=np.int64))


def whole_number(value: Any, name: str) -> int:
    """``value`` as an int; 16.0 and "16" are refused, numpy integers are fine."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidInput(f"{name}: {value!r} is not a whole number") from None


def _one_level(
    load: NDArray[np.int64], num_slots: int, num_ranks: int, standing: NDArray[np.int64] | None, seed: int
) -> NDArray[np.int64]:
    """int64 [L, S]; without replicas the placement search, which also keeps what stands."""
    num_experts = load.shape[1]
    if num_slots != num_experts:
        table = solve_replication(load, num_ranks, num_slots, seed=seed).slot_expert
        return table if standing is None else keep_slots(table, standing, num_ranks)
    old_slots = None
    if standing is not None and (np.sort(standing, axis=1) == np.arange(num_experts)).all():
        old_slots = np.argsort(standing, axis=1, kind="stable").astype(np.int64)
    old_ranks = None if old_slots is None else old_slots // (num_experts // num_ranks)
    rank_of = solve_placement(load, num_ranks, standing=old_ranks, seed=seed).rank_of
    slots = slots_from_ranks(rank_of, num_ranks, old_slots)
    return np.argsort(slots, axis=1, kind="stable").astype(np.int64)


def _keep_by_node(
    table: NDArray[np.int64], standing: NDArray[np.int64], num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    """Rename nodes, then ranks inside each node, then slots: an expert's node-mates stay its node-mates."""
    from scipy.optimize import linear_sum_assignment

    num_layers, num_slots = table.shape
    num_experts = int(max(table.max(), standing.max())) + 1
    new = table.reshape(num_layers, num_nodes, -1)
    old = standing.reshape(num_layers, num_nodes, -1)
    renamed = np.empty_like(new)
    for layer in range(num_layers):
        counts = [count_copies(side[layer], num_experts) for side in (new, old)]
        overlap = np.minimum(counts[0][:, None], counts[1][None]).sum(axis=2)
        groups, nodes = linear_sum_assignment(overlap, maximize=True)
        renamed[layer, nodes] = new[layer, groups]
    flat = (num_layers * num_nodes, num_slots // num_nodes)
    kept = keep_slots(renamed.reshape(flat), old.reshape(flat), num_ranks // num_nodes)
    return kept.reshape(num_layers, num_slots)


def _to_numpy(values: Any, name: str) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a torch tensor; bfloat16 has no numpy counterpart
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.double()
        return np.asarray(values.numpy())
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInput(f"{name}: not a rectangular array ({error})") from None
    return array.astype(np.float64) if array.dtype == np.float16 else array  # 65504 is too small for any limit


def _like(given: Any, array: NDArray[np.int64]) -> Any:
    if not hasattr(given, "detach"):
        return array
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))
