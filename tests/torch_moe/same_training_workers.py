"""Ranks of tests/torch_moe/test_same_training.py: the same windows with and without RoutePack."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from training_workers import (
    CONFIG,
    LAYERS,
    build,
    deviations,
    logical_state,
    loss_fn,
    make_mesh,
    make_samples,
    relative,
    total_tokens,
)

from routepack_opt import Window, plan_window
from routepack_opt.integrations.torch_moe.movement.materialise import materialise
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors
from routepack_opt.integrations.torch_moe.step.exchange import exchange_samples, owners
from routepack_opt.integrations.torch_moe.step.train_step import train_step

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.step.samples import TrainSample

NUM_SAMPLES, TOKEN_CAP = 16, 40
Cells = list[list[list[int]]]


@dataclass
class Run:
    """What one training run did."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # experts that changed EP rank, by step
    sent_bytes: list[int] = field(default_factory=list)
    cells: list[Cells] = field(default_factory=list)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # logical, after a step


def window_of(step: int) -> dict[int, TrainSample]:
    lengths = np.random.default_rng(77 + step).integers(3, 25, NUM_SAMPLES)
    return make_samples(step, lengths.tolist())


def to_window(samples: dict[int, TrainSample]) -> Window:
    demand = np.zeros((len(samples), LAYERS, CONFIG.num_experts), dtype=np.int64)
    for index, sample in samples.items():
        routes = sample.routes.numpy()
        for layer in range(LAYERS):
            demand[index, layer] = np.bincount(routes[:, layer].ravel(), minlength=CONFIG.num_experts)
    return Window([sample.num_tokens for sample in samples.values()], demand, top_k=CONFIG.top_k)


def first_fit(samples: dict[int, TrainSample], num_ranks: int) -> Cells:
    """First-fit decreasing into cells, dealt out rank by rank; rows without enough cells split the largest."""
    bins: list[list[int]] = []
    lengths = {index: sample.num_tokens for index, sample in samples.items()}
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        room = next((b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= TOKEN_CAP), None)
        if room is None:
            bins.append([index])
        else:
            room.append(index)
    while len(bins) % num_ranks:
        largest = max(bins, key=len)
        bins.append([largest.pop()])
    return [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]


def planned(samples: dict[int, TrainSample], mesh: ParallelMesh, standing: np.ndarray, step: int) -> dict[str, Any]:
    """Rank 0 plans, all ranks get the cells and the placement."""
    answer: list[Any] = [None]
    if mesh.rank == 0:
        plan = plan_window(
            to_window(samples), mesh.topology, token_cap=TOKEN_CAP, budget_steps=300, previous=standing, seed=step
        )
        answer = [json.dumps({"cells": plan.cells, "slots": plan.logical_to_slot.tolist()})]
    dist.broadcast_object_list(answer, src=0)
    result: dict[str, Any] = json.loads(answer[0])
    return result


def train(
    mesh: ParallelMesh, steps: int, *, routepack: bool, keep: tuple[int, ...] = (), wrong: str | None = None,
    wrong_at: int = 2, **options: Any,
) -> Run:  # fmt: skip
    """Train ``steps`` steps; ``wrong`` spoils the movement before step ``wrong_at``."""
    model, optimizer, slot_map = build(mesh, **options)
    run = Run()
    for step in range(steps):
        samples = window_of(step)
        standing = slot_map.logical_to_slot.numpy().copy()
        if routepack:
            plan = planned(samples, mesh, standing, step)
            cells, slots = plan["cells"], np.array(plan["slots"])
            tensors = expert_slot_tensors(model, optimizer)
            if wrong == "left behind" and step == wrong_at:
                tensors = [t for t in tensors if t.name != "0.gate_up.exp_avg"]
            report = materialise(tensors, slot_map, slots, mesh, version=slot_map.version + 1)
            if wrong == "swapped" and step == wrong_at and mesh.ep_rank == 0:
                (moment,) = (t.tensor for t in tensors if t.name == "1.down.exp_avg_sq")
                moment[[0, 1]] = moment[[1, 0]].clone()
            num_slots = CONFIG.num_experts // mesh.num_ep
            run.moved.append(int((slots // num_slots != standing // num_slots).sum()))
            run.sent_bytes.append(report.moved_bytes)
        else:
            cells = first_fit(samples, mesh.num_ranks)
        # a sample was generated on rank index % D: it goes to the rank of its cell
        generated = {i: s for i, s in samples.items() if i % mesh.num_ranks == mesh.rank}
        own = exchange_samples(generated, owners(cells, len(samples)), mesh)
        result = train_step(
            model, optimizer, mesh, [row[mesh.rank] for row in cells], own, loss_fn,
            total_tokens=total_tokens(samples), max_grad_norm=1.0,
        )  # fmt: skip
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.cells.append(cells)
        if step + 1 in keep:
            run.states[step + 1] = logical_state(model, optimizer, mesh)
    return run


def compare(mine: Run, reference: Run, step: int) -> dict[str, Any]:
    """Deviations after ``step`` steps."""
    return {
        "loss": relative(mine.losses[:step], reference.losses[:step]),
        "norm": relative(mine.norms[:step], reference.norms[:step]),
        **deviations(mine.states[step], reference.states[step]),
    }


def canonical(cells: Cells) -> list[list[list[int]]]:
    return [[sorted(cell) for cell in row] for row in cells]


def with_and_without(
    ep: int, shards: Any, steps: int, wrong: list[str], wrong_steps: int = 5, dtype: str = "float32", **options: Any
) -> dict[str, Any]:
    """20 steps each way; ``options`` (optimizer) apply to the run with RoutePack."""
    mesh = make_mesh(ep, shards)
    baseline = train(mesh, steps, routepack=False, keep=(wrong_steps, steps), dtype=dtype)
    routepack = train(mesh, steps, routepack=True, keep=(wrong_steps, steps), dtype=dtype, **options)
    result: dict[str, Any] = {
        "same": compare(routepack, baseline, steps),
        "losses": baseline.losses,
        "moved": routepack.moved,
        "sent_bytes": routepack.sent_bytes,
        "packed_differently": sum(
            canonical(a) != canonical(b) for a, b in zip(routepack.cells, baseline.cells, strict=True)
        ),
        "early": compare(routepack, baseline, wrong_steps),
    }
    for kind in wrong:
        spoiled = train(mesh, wrong_steps, routepack=True, keep=(wrong_steps,), wrong=kind, dtype=dtype, **options)
        result[kind] = compare(spoiled, baseline, wrong_steps)
    return result
