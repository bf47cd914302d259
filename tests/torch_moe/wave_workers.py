"""What the ranks of the wave tests run; every function returns JSON."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from movement_workers import EXPERTS, LAYERS, caught, make_mesh, same, tensors_of

from routepack_opt import Constraints, CostModel, Stage, Window
from routepack_opt.integrations.torch_moe.movement.waves import PlacementWaves, WaveSettings
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.planner import warmup

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

CAP = 60
COST = CostModel((Stage("full", 1.0, 0.5),))

warmup()  # before the ranks are forked: kernels are loaded once and not by every rank


def make_window(seed: int, num_samples: int = 24) -> Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 30, num_samples)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    own = rng.dirichlet(np.full(EXPERTS, 0.5), (num_samples, LAYERS))
    demand = rng.poisson((popularity + own) * lengths[:, None, None])
    return Window(lengths, demand)


def steps(ep: int, shards: int, runs: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Several steps under each of several settings; the facts of every step."""
    mesh = make_mesh(ep, shards)
    return [_steps(mesh, dict(settings), num_steps) for settings in runs]


def _steps(mesh: ParallelMesh, settings: dict[str, Any], num_steps: int) -> dict[str, Any]:
    start = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    slot_map, entries = SlotMap(start), tensors_of(start, mesh)
    limits, measured = Constraints(**settings.pop("constraints", {})), settings.pop("measured", False)
    chosen = WaveSettings(token_cap=CAP, cost=COST, constraints=limits, chunk_bytes=300, timeout_s=20, **settings)
    waves = PlacementWaves(entries, slot_map, mesh, chosen)
    facts = []
    for step in range(num_steps):
        window = make_window(step)
        before = slot_map.logical_to_slot.numpy().copy()
        plan, movement = waves.run(window if waves.plans_here else None, seed=step)
        plan.verify(window)
        if measured:
            waves.observe_step(plan, 0.5)
        per_rank = EXPERTS // mesh.num_ep
        moved = (plan.logical_to_slot // per_rank != before // per_rank).sum(axis=1)
        facts.append(
            {
                "right": same(entries, plan.logical_to_slot, mesh),
                "in_force": bool((slot_map.logical_to_slot.numpy() == plan.logical_to_slot).all()),
                "counted": moved.tolist() == plan.moved_experts.tolist(),
                "num_moved": int(moved.sum()),
                "digest": hashlib.sha256(json.dumps(plan.to_json() | {"timings": {}}).encode()).hexdigest(),
                "movement": movement.to_json(),
                "notes": list(plan.notes),
                "max_moved": plan.constraints.max_moved,
                "worse_than_seed": (plan.rows, *plan.score) > (plan.seed_rows or 0, *(plan.seed_score or ())),
            }
        )
    return {"steps": facts, "version": slot_map.version}


def impossible(ep: int, shards: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A window that no layout fits, then one that some does, under each of several settings."""
    mesh = make_mesh(ep, shards)
    results = []
    for settings in runs:
        start = np.tile(np.arange(EXPERTS), (LAYERS, 1))
        slot_map, entries = SlotMap(start), tensors_of(start, mesh)
        waves = PlacementWaves(
            entries, slot_map, mesh, WaveSettings(token_cap=CAP, cost=COST, timeout_s=20, **settings)
        )
        result = caught(lambda waves=waves: waves.run(make_window(0, num_samples=2)))
        result["whole"] = not slot_map.is_broken and same(entries, slot_map.logical_to_slot.numpy(), mesh)
        waves.run(make_window(1))
        results.append(result | {"afterwards": same(entries, slot_map.logical_to_slot.numpy(), mesh)})
    return results


def wrong_windows(ep: int, shards: int) -> list[dict[str, Any]]:
    """No window where one is needed, and one of another model, with and without overlap."""
    mesh = make_mesh(ep, shards)
    start = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    right = make_window(0)
    results = []
    for overlap in (True, False):
        slot_map, entries = SlotMap(start), tensors_of(start, mesh)
        settings = WaveSettings(token_cap=CAP, cost=COST, budget_steps=10, timeout_s=20, overlap=overlap)
        waves = PlacementWaves(entries, slot_map, mesh, settings)
        for window in (None, Window(right.lengths, right.demand[:, 1:])):
            result = caught(lambda waves=waves, window=window: waves.run(window))
            results.append(result | {"whole": not slot_map.is_broken and same(entries, start, mesh)})
    return results


def different_windows(ep: int, shards: int) -> dict[str, Any]:
    """Every rank plans, but one counted differently."""
    mesh = make_mesh(ep, shards)
    start = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    slot_map, entries = SlotMap(start), tensors_of(start, mesh)
    settings = WaveSettings(token_cap=CAP, cost=COST, budget_steps=20, planner="every", timeout_s=20)
    waves = PlacementWaves(entries, slot_map, mesh, settings)
    result = caught(lambda: waves.run(make_window(5 if mesh.rank == 3 else 4)))
    return result | {"untouched": same(entries, start, mesh), "version": slot_map.version}
