"""Ranks of tests/torch_moe/test_train_step.py: EP x EDP against one process."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import numpy as np
import torch
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
    round_robin,
    total_tokens,
)

from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.step.train_step import StepFailed, train_step


def run_steps(
    mesh: ParallelMesh, cells: list[list[list[int]]], lengths: list[int], steps: int, max_grad_norm: float | None,
    pad_multiple: int = 1, missing_last: bool = True, replay: bool = True, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train on windows 0, 1, ...; losses, norms and final logical state."""
    model, optimizer, _ = build(mesh, **options)
    losses, norms, tokens, counted = [], [], [], []
    for step in range(steps):
        samples = make_samples(step, lengths, missing_last=missing_last)
        mine = [row[mesh.rank] for row in cells]
        result = train_step(
            model, optimizer, mesh, mine, {i: samples[i] for cell in mine for i in cell}, loss_fn,
            total_tokens=total_tokens(samples), max_grad_norm=max_grad_norm, pad_multiple=pad_multiple, replay=replay,
        )  # fmt: skip
        losses.append(result.loss)
        norms.append(result.grad_norm)
        tokens.append(result.tokens)
        counted.append(result.metrics["counted"])
    state = logical_state(model, optimizer, mesh)
    return {"losses": losses, "norms": norms, "tokens": tokens, "counted": counted, "state": state}


def against_one_process(
    ep: int, shards: Any, lengths: list[int], cells: list[list[list[int]]] | None = None, rows: int = 2, steps: int = 3,
    max_grad_norm: float | None = None, permute: bool = False, single: dict[str, Any] | None = None, **options: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """Deviations of this job from one process that runs all samples in one row; None on ranks other than 0."""
    mesh = make_mesh(ep, shards)
    if permute:
        rng = np.random.default_rng(5)
        options["slots"] = [rng.permutation(CONFIG.num_experts).tolist() for _ in range(LAYERS)]
    cells = cells or round_robin(len(lengths), mesh.num_ranks, rows)
    found = run_steps(mesh, cells, lengths, steps, max_grad_norm, **options)
    if mesh.rank:
        return None
    whole = [[list(range(len(lengths)))]]
    kept = {name: value for name, value in options.items() if name in ("dtype", "missing_last", "replay")}
    wanted = run_steps(ParallelMesh.single(), whole, lengths, steps, max_grad_norm, **kept | (single or {}))
    assert found["tokens"] == wanted["tokens"] and found["counted"] == wanted["counted"]
    return {
        "loss": relative(found["losses"], wanted["losses"]),
        "norm": relative(found["norms"], wanted["norms"]),
        "norms": wanted["norms"],
        **deviations(found["state"], wanted["state"]),
    }


def many(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons in one set of processes."""
    return {name: against_one_process(**kwargs) for name, kwargs in cases.items()}


def refusals() -> list[str]:
    """Uneven rows, a missing sample, a physical id, another top-k: each wrong on rank 0 only."""
    mesh = make_mesh(2, 1)
    model, optimizer, _ = build(mesh)
    samples = make_samples(0, [5, 6, 7])
    wrong = make_samples(0, [5, 6, 7])
    wrong[0].routes[0, 0, 0] = CONFIG.num_experts
    narrow = samples | {0: dataclasses.replace(samples[0], routes=samples[0].routes[:, :, :1])}
    messages = []
    for cells, here in (([[0], [1]], samples), ([[9]], samples), ([[0]], wrong), ([[0]], narrow)):
        mine, held = (cells, here) if mesh.rank == 0 else ([[2]], samples)
        try:
            train_step(model, optimizer, mesh, mine, held, loss_fn, total_tokens=9)
        except ValueError as error:
            messages.append(str(error))
    return messages


def other_refusals() -> list[str]:
    """What used to hang, or to train on wrong numbers, when wrong on rank 0 only: settings, counts, fields."""
    mesh = make_mesh(2, 1)
    model, optimizer, _ = build(mesh)
    samples = make_samples(0, [5, 6, 7])
    odd = samples | {1: dataclasses.replace(samples[1], fields={"mask": samples[1].fields["mask"]})}
    cases: list[dict[str, Any]] = [
        {"total_tokens": 4}, {"total_tokens": "9"}, {"replay": False}, {"max_grad_norm": -1.0}, {"max_grad_norm": 2.0},
        {"pad_multiple": 0}, {"samples": odd, "cells": [[0, 1]]},
    ]  # fmt: skip
    messages = []
    for case in cases:
        given = {"total_tokens": 9, "samples": samples, "cells": [[0]]} | (case if mesh.rank == 0 else {})
        cells, held = given.pop("cells"), given.pop("samples")
        try:
            train_step(model, optimizer, mesh, cells, held, loss_fn, **given)
        except ValueError as error:
            messages.append(str(error))
    return messages


def failing_loss() -> list[Any]:
    """The loss function raises on rank 1 in the first of three rows; then a step that works."""
    mesh = make_mesh(2, 2)
    model, optimizer, _ = build(mesh)
    samples = make_samples(0, [5, 6, 7])
    before = logical_state(model, optimizer, mesh)

    def fails(logits_TV: torch.Tensor, row: Any) -> torch.Tensor:
        if mesh.rank == 1:
            raise KeyError("no such\nfield")
        return loss_fn(logits_TV, row)[0]

    start = time.monotonic()
    try:
        train_step(model, optimizer, mesh, [[0], [1], []], samples, fails, total_tokens=9)
        message = "none"
    except (StepFailed, KeyError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    after = logical_state(model, optimizer, mesh)
    same = optimizer.steps == 0 and all(torch.equal(before[name], after[name]) for name in before)
    result = train_step(model, optimizer, mesh, [[0], [1], []], samples, loss_fn, total_tokens=9)
    return [message, seconds, same, result.loss]


def own_routes_after_replay() -> list[float]:
    """Loss of the router's own routes, on a model that has just replayed others (lr 0), and on a fresh one."""
    mesh = make_mesh(2, 1)
    samples = make_samples(0, [9, 6])
    losses = []
    for runs in ((True, False), (False,)):
        model, optimizer, _ = build(mesh)
        optimizer.lr = 0.0
        for replay in runs:
            result = train_step(
                model, optimizer, mesh, [[mesh.rank]], samples, loss_fn, total_tokens=9, replay=replay
            )  # fmt: skip
        losses.append(result.loss)
    return losses


def uneven_metrics() -> list[Any]:
    """Rank 0 names one metric, rank 1 two, and one of them like a result of the step; numbers instead of tensors."""
    mesh = make_mesh(2, 1)
    model, optimizer, _ = build(mesh)
    samples = make_samples(0, [5, 6])

    def loss(logits_TV: torch.Tensor, row: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        own = {"b": 1.0, "loss": 50} if mesh.rank else {"a": torch.tensor(2.0)}
        return loss_fn(logits_TV, row)[0], own

    result = train_step(model, optimizer, mesh, [[mesh.rank]], samples, loss, total_tokens=1000)
    return [result.metrics, result.loss, result.tokens]


def norm_bits() -> list[str]:
    """The norm on every rank of two shards whose members stand in different orders."""
    mesh = make_mesh(3, [[0, 1, 2], [5, 3, 4]])
    model = build_model(dataclasses.replace(CONFIG, num_experts=9), mesh)
    optimizer = MoEAdamW(model, mesh)
    generator = torch.Generator()
    norms = []
    for seed in range(40):
        generator.manual_seed(3 * seed + mesh.ep_rank)  # copies of an expert have the same gradient
        for bucket in optimizer.expert_gradients.buckets:
            bucket.normal_(generator=generator).mul_((1.0, 1e-2, 3e-3)[mesh.ep_rank])
        norms.append(optimizer.gradient_norm().hex())
    return norms


def state_bytes(shard: bool) -> dict[str, int]:
    """Bytes of expert moments here, sharded or not."""
    mesh = make_mesh(2, 2)
    _, optimizer, _ = build(mesh, shard_expert_state=shard)
    state = optimizer.expert_state(0, "gate_up")
    return {"columns": state.exp_avg.shape[1], "size": state.weight_Hn.shape[1]}


def router_gradient() -> dict[str, float]:
    """Replayed routes: gradients reach the router, and only the replayed experts get any."""
    random.seed(0)
    mesh = ParallelMesh.single()
    model, optimizer, _ = build(mesh)
    samples = make_samples(0, [9])
    samples[0].routes[..., 0], samples[0].routes[..., 1] = 3, 5
    train_step(model, optimizer, mesh, [[0]], samples, loss_fn, total_tokens=4)
    views = optimizer.dense_gradients.views | optimizer.expert_gradients.views
    used = views["model.layers.1.mlp.experts.gate_up"].abs().amax((1, 2))
    return {
        "router": float(views["model.layers.1.mlp.gate.weight"].abs().max()),
        "used": float(used[[3, 5]].min()),
        "unused": float(used[[0, 1, 2, 4, 6, 7]].max()),
        "finite": float(torch.isfinite(used).all()),
    }
