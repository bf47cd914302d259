"""What the ranks of the movement tests run; every function returns JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.materialise import materialise
from routepack_opt.integrations.torch_moe.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.slot_map import SlotMap
from routepack_opt.topology import Topology

LAYERS, EXPERTS = 3, 8


@dataclass(frozen=True)
class Entry:
    """A slot tensor as materialise sees it."""

    name: str
    moe_layer: int
    tensor: torch.Tensor


def make_mesh(ep: int, shards: Any) -> ParallelMesh:
    topology = Topology(ep=ep, shards=shards) if isinstance(shards, int) else Topology(None, ep, shards)
    return ParallelMesh.create(topology)


def contents(layer: int, kind: int, expert: int, shard: int) -> torch.Tensor:
    """What expert ``expert`` carries in one tensor; every value names its owner."""
    size, dtype = ((6, torch.float32), (5, torch.bfloat16), (3, torch.int64), (7, torch.uint8), (1, torch.float64))[
        kind
    ]
    return (torch.arange(size) * 7 + layer * 40 + kind * 11 + expert * 17 + shard * 3).remainder(127).to(dtype)


def tensors_of(slots: np.ndarray, mesh: ParallelMesh) -> list[Entry]:
    """All slot tensors of this rank in a placement."""
    num_slots = EXPERTS // mesh.num_ep
    entries = []
    for layer in range(LAYERS):
        here = np.argsort(slots[layer])[mesh.ep_rank * num_slots : (mesh.ep_rank + 1) * num_slots]
        for kind in range(5):
            value = torch.stack([contents(layer, kind, int(e), mesh.shard) for e in here])
            if kind == 0:
                value = value.reshape(num_slots, 2, 3)
            entries.append(Entry(f"layer{layer}.kind{kind}", layer, value))
    return entries


def random_slots(rng: np.random.Generator) -> np.ndarray:
    return np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]).astype(np.int64)


def same(entries: list[Entry], slots: np.ndarray, mesh: ParallelMesh) -> bool:
    wanted = tensors_of(slots, mesh)
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(entries, wanted, strict=True))


def random_moves(ep: int, shards: Any, seed: int, chunk_bytes: list[int]) -> list[dict[str, Any]]:
    """One random permutation after another; what was wrong with each."""
    mesh = make_mesh(ep, shards)
    rng = np.random.default_rng(seed)
    slots = random_slots(rng)
    slot_map, entries = SlotMap(slots), tensors_of(slots, mesh)
    pointers = [e.tensor.data_ptr() for e in entries]
    results = []
    for version, budget in enumerate(chunk_bytes, start=1):
        slots = random_slots(rng)
        report = materialise(entries, slot_map, slots, mesh, version=version, chunk_bytes=budget, timeout_s=20)
        results.append(
            report.to_json()
            | {
                "right": same(entries, slots, mesh),
                "published": bool((slot_map.logical_to_slot.numpy() == slots).all()) and slot_map.version == version,
                "in_place": pointers == [e.tensor.data_ptr() for e in entries],
            }
        )
    return results


def caught(call: Any) -> dict[str, Any]:
    """The error of a call, and how long it took to come."""
    start = time.monotonic()
    try:
        call()
    except RoutePackError as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "message": "", "seconds": time.monotonic() - start}
