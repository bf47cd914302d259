"""Ranks of the mesh, dispatch and exchange tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from training_workers import make_mesh

from routepack_opt import Topology
from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.parallel.dispatch import AllToAllDispatch, LocalDispatch, make_dispatcher
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal, all_reduce_
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.integrations.torch_moe.step.exchange import exchange_samples
from routepack_opt.integrations.torch_moe.step.samples import TrainSample

NUM_EXPERTS, HIDDEN, TOP_K = 8, 6, 2


def mesh_places(ep: int, shards: Any) -> dict[str, Any]:
    """Where this rank stands, and who shares its groups."""
    mesh = make_mesh(ep, shards)
    mark = torch.tensor([float(mesh.rank)])
    total = {
        name: float(all_reduce_(mark.clone(), getattr(mesh, name))) for name in ("dp_group", "ep_group", "edp_group")
    }
    by_ep = [int(t) for t in all_gather_equal(mark, mesh.ep_group)]
    by_edp = [int(t) for t in all_gather_equal(mark, mesh.edp_group)]
    return total | {
        "shard": mesh.shard, "ep_rank": mesh.ep_rank,
        "ep_members": [by_ep[p] for p in mesh.ep_wire_order], "edp_members": [by_edp[p] for p in mesh.edp_wire_order],
    }  # fmt: skip


class ScaledExperts:
    """Expert in slot s multiplies by its own matrix; differentiable, and sensitive to any wrong row."""

    def __init__(self, slot_to_logical: torch.Tensor, first: int, num_slots: int) -> None:
        self.weights = torch.stack([
            torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(int(e)))
            for e in slot_to_logical[first : first + num_slots]
        ]).requires_grad_()  # fmt: skip
        self.counts: list[int] = []

    def __call__(self, x_ND: torch.Tensor, counts_H: torch.Tensor) -> torch.Tensor:
        self.counts = counts_H.tolist()
        parts = [x @ self.weights[h] for h, x in enumerate(x_ND.split(self.counts))]
        return torch.tanh(torch.cat(parts))


def dispatch_against_local(ep: int, shards: Any, tokens: list[int], announce: bool) -> dict[str, float]:
    """All-to-all dispatch of this rank's tokens equals local dispatch of the same tokens, gradients included."""
    mesh = make_mesh(ep, shards)
    rng = np.random.default_rng(3)
    slots = np.stack([rng.permutation(NUM_EXPERTS) for _ in range(2)])
    slot_map = SlotMap(slots)
    num_slots = NUM_EXPERTS // mesh.num_ep
    dispatcher = make_dispatcher(slot_map, mesh)
    assert isinstance(dispatcher, AllToAllDispatch if ep > 1 else LocalDispatch)

    def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(100 + rank)
        x_TD = torch.randn(tokens[rank], HIDDEN, generator=g).requires_grad_()
        scores = torch.rand(2, tokens[rank], NUM_EXPERTS, generator=g)
        ids_LTK = scores.topk(TOP_K, dim=-1).indices if tokens[rank] else torch.zeros(2, 0, TOP_K, dtype=torch.long)
        return x_TD, ids_LTK, torch.rand(tokens[rank], TOP_K, generator=g).requires_grad_()

    def run(run_dispatch: Any, experts: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_TD, ids_LTK, weights_TK = inputs(rank)
        y_TD = x_TD
        for layer in range(2):
            y_TD = run_dispatch(y_TD, ids_LTK[layer], weights_TK, experts[layer], layer)
        (y_TD.square().sum() + y_TD.sum()).backward()
        return y_TD, x_TD.grad, weights_TK.grad

    experts = [
        ScaledExperts(slot_map.slot_to_logical[layer], mesh.ep_rank * num_slots, num_slots) for layer in range(2)
    ]
    if announce and isinstance(dispatcher, AllToAllDispatch):
        assert dispatcher.announce(inputs(mesh.rank)[1].transpose(0, 1))
    mine = run(dispatcher, experts, mesh.rank)
    local = LocalDispatch(slot_map)
    every = [ScaledExperts(slot_map.slot_to_logical[layer], 0, NUM_EXPERTS) for layer in range(2)]
    gap = 0.0
    for rank in mesh.ep_members:  # the whole shard, so that gradients of the experts can be compared
        wanted = run(local, every, rank)
        if rank == mesh.rank:
            gap = max(
                [float((a - b).detach().abs().max()) for a, b in zip(mine, wanted, strict=True) if a.numel()] + [gap]
            )
    first = mesh.ep_rank * num_slots
    for found, whole in zip(experts, every, strict=True):
        wanted_grad = whole.weights.grad[first : first + num_slots]
        gap = max(gap, float((found.weights.grad - wanted_grad).abs().max()))
    return {"gap": gap, "received": sum(experts[0].counts)}


def announce_needs_all_routes() -> list[bool]:
    """One member with an open route, or without any knowledge: nobody uses the counts."""
    mesh = make_mesh(2, 1)
    dispatcher = AllToAllDispatch(SlotMap.identity(1, NUM_EXPERTS), mesh)
    routes = torch.zeros(3, 1, TOP_K, dtype=torch.long)
    full = dispatcher.announce(routes)
    routes[mesh.rank] -= mesh.rank  # rank 1 has a token of -1
    open_route = dispatcher.announce(routes)
    absent = dispatcher.announce(None if mesh.rank == 0 else torch.zeros(0, 1, TOP_K, dtype=torch.int32))
    return [full, open_route, absent]


def exchange(num_samples: int, holders: list[int], owner_of: list[int]) -> dict[str, Any]:
    """Samples arrive whole, and nothing else."""
    mesh = make_mesh(2, 2)

    def sample(index: int) -> TrainSample:
        rng = np.random.default_rng(index)
        length = 1 + index % 5
        routes = None
        if index % 3:
            dtype = np.int16 if index % 2 else np.int32
            routes = torch.from_numpy(rng.integers(0, 8, (length - index % 2, 2, 2)).astype(dtype))
        fields = {"mask": torch.rand(length), "é": torch.full((length,), float(index))} if index % 4 else {}
        return TrainSample(torch.from_numpy(rng.integers(0, 99, length)), routes, fields)

    torch.manual_seed(5)
    everything = {index: sample(index) for index in range(num_samples)}
    # numpy integers, as indices of an array are: JSON refuses them, and the other ranks waited
    mine = {index: everything[index] for index in np.arange(num_samples) if holders[index] == mesh.rank}
    got = exchange_samples(mine, owner_of, mesh)
    right = list(got) == [index for index in range(num_samples) if owner_of[index] == mesh.rank]
    for index, found in got.items():
        wanted = everything[index]
        right &= torch.equal(found.tokens, wanted.tokens) and set(found.fields) == set(wanted.fields)
        right &= all(torch.equal(found.fields[name], wanted.fields[name]) for name in wanted.fields)
        right &= (found.routes is None) == (wanted.routes is None)
        if wanted.routes is not None and found.routes is not None:
            right &= found.routes.dtype == wanted.routes.dtype and torch.equal(found.routes, wanted.routes)
    return {"right": bool(right), "count": len(got)}


def exchange_refuses() -> list[str]:
    """A wrong owner, then an index that only rank 1 has wrong."""
    mesh = ParallelMesh.create(Topology(ep=1, dp=dist.get_world_size()))
    sample = TrainSample(torch.zeros(1, dtype=torch.long))
    messages = []
    for mine, owner_of in (({}, [0, 9]), ({mesh.rank * 5: sample}, [0, 0])):
        try:
            exchange_samples(mine, owner_of, mesh)
        except RoutePackError as error:
            messages.append(str(error))
    return messages


def mesh_places_of(meshes: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    return [mesh_places(ep, shards) for ep, shards in meshes]


def dispatches(cases: list[tuple[int, Any, list[int], bool]]) -> list[dict[str, float]]:
    return [dispatch_against_local(*case) for case in cases]
