"""What the ranks of the movement tests run; every function returns JSON."""

from __future__ import annotations

import json
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.movement.materialise import materialise
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
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


def disagreements(ep: int, shards: Any, kinds: list[str]) -> list[dict[str, Any]]:
    """One odd rank in many ways; after each a right move must still work."""
    mesh = make_mesh(ep, shards)
    return [_disagreement(mesh, what) for what in kinds]


def _disagreement(mesh: ParallelMesh, what: str) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    old, new = random_slots(rng), random_slots(rng)
    slot_map, entries = SlotMap(old), tensors_of(old, mesh)
    arguments: dict[str, Any] = {"version": 1, "chunk_bytes": 4096, "timeout_s": 20}
    wanted, given = new, entries
    if mesh.rank == 2:
        if what == "placement":
            wanted = new[::-1].copy()
        elif what == "tensors":
            given = entries[:-1]
        elif what == "bijection":
            wanted = np.zeros_like(new)
        else:
            arguments |= {"version": 2} if what == "version" else {"chunk_bytes": 5000 if what == "budget" else 3}
    result = caught(lambda: materialise(given, slot_map, wanted, mesh, **arguments))
    result |= {"untouched": same(entries, old, mesh), "version": slot_map.version}
    report = materialise(entries, slot_map, new, mesh, version=1, timeout_s=20)
    return result | {"afterwards": same(entries, new, mesh), "version_after": report.version}


def failure(ep: int, shards: Any, what: str, timeout_s: float, folder: str = "") -> dict[str, Any]:
    """Rank 1 raises, hangs, dies or never comes; every rank must raise, and refuse to go on."""
    mesh = make_mesh(ep, shards)
    rng = np.random.default_rng(2)
    old, new = random_slots(rng), random_slots(rng)
    slot_map, entries = SlotMap(old), tensors_of(old, mesh)

    def on_round(number: int) -> None:
        if mesh.rank != 1 or number != 2:
            return
        if what == "raise":
            raise ValueError("no more rounds")
        if what == "hang":
            time.sleep(2.5 * timeout_s)
        if what == "die":
            os._exit(7)

    if what == "absent" and mesh.rank == 1:
        time.sleep(2.5 * timeout_s)
    result = caught(
        lambda: materialise(
            entries, slot_map, new, mesh, version=1, chunk_bytes=64, timeout_s=timeout_s, on_round=on_round
        )
    )
    result["broken"] = slot_map.is_broken
    result["refused"] = caught(lambda: slot_map.logical_to_slot)["message"]
    if folder:
        (Path(folder) / f"rank{mesh.rank}.json").write_text(json.dumps(result))
    return result


def unchanged(ep: int, shards: Any) -> dict[str, Any]:
    """The placement in force once more: a new version, and not one message between EP ranks."""
    mesh = make_mesh(ep, shards)
    slots = random_slots(np.random.default_rng(3))
    slot_map, entries = SlotMap(slots), tensors_of(slots, mesh)
    messages = []
    original = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: messages.append(len(operations)) or original(operations)
    report = materialise(entries, slot_map, slots, mesh, version=1, timeout_s=20)
    still = len(messages)
    inside = slots.copy()  # slots change, ranks do not
    num_slots = EXPERTS // mesh.num_ep
    inside = inside // num_slots * num_slots + (inside % num_slots + 1) % num_slots
    second = materialise(entries, slot_map, inside, mesh, version=2, chunk_bytes=64, timeout_s=20)
    return {
        "messages": still,
        "messages_inside": len(messages),
        "version": slot_map.version,
        "right": same(entries, inside, mesh),
        "reports": [report.to_json(), second.to_json()],
    }


class _Allocations(TorchDispatchMode):
    """Bytes of storage that operations allocate, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: set[int] = set()

    def _freed(self, key: int, size: int) -> None:
        self.alive -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in _flat((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _flat(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in before and key not in self.seen and size:
                self.seen.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._freed, key, size)
        return result


def _flat(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def allocations(ep: int, shards: Any, chunk_bytes: int, width: int) -> dict[str, Any]:
    """Bytes torch allocates while large tensors move."""
    mesh = make_mesh(ep, shards)
    rng = np.random.default_rng(4)
    old, new = random_slots(rng), random_slots(rng)
    num_slots = EXPERTS // mesh.num_ep
    entries = [Entry(f"w{layer}", layer, torch.zeros(num_slots, width)) for layer in range(LAYERS)]
    with _Allocations() as watch:
        report = materialise(entries, SlotMap(old), new, mesh, version=1, chunk_bytes=chunk_bytes, timeout_s=20)
    return report.to_json() | {"peak": watch.peak}
