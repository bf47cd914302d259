"""The job of tests/torch_moe/test_restart.py: training with RoutePack planning every step, that can be told to fail.

Run by the launcher as a script (``python restart_job.py SETTINGS_JSON``) or by the harness as functions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from same_training_workers import planned, window_of
from training_workers import build, deviations, logical_state, loss_fn, make_mesh, total_tokens

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.checkpoint.manifest import read_manifest
from routepack_opt.integrations.torch_moe.checkpoint.save_load import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import write_tensors
from routepack_opt.integrations.torch_moe.movement.materialise import materialise
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors
from routepack_opt.integrations.torch_moe.processes.process_setup import process_group
from routepack_opt.integrations.torch_moe.step.exchange import exchange_samples, owners
from routepack_opt.integrations.torch_moe.step.train_step import train_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

SAVE_EVERY = 2


class Training:
    """One rank of the job."""

    def __init__(self, ep: int, shards: Any, folder: str, **options: Any) -> None:
        self.mesh = make_mesh(ep, shards)
        self.model, self.optimizer, self.slot_map = build(self.mesh, **options)
        self.folder = Path(folder)
        self.next_step = 0
        self.losses: list[float] = []

    def resume(self) -> None:
        path = latest_checkpoint(self.folder)
        assert path is not None
        extra = load_checkpoint(path, self.model, self.optimizer, self.slot_map, self.mesh)
        self.next_step, self.losses = read_manifest(path).step, extra["losses"]

    def save(self) -> None:
        extra = {"losses": self.losses}
        save_checkpoint(self.folder, self.next_step, self.model, self.optimizer, self.slot_map, self.mesh, extra)

    def step(self, on_round: Callable[[int], None] | None = None) -> None:
        step, mesh = self.next_step, self.mesh
        samples = window_of(step)
        plan = planned(samples, mesh, self.slot_map.logical_to_slot.numpy().copy(), step)
        materialise(
            expert_slot_tensors(self.model, self.optimizer), self.slot_map, np.array(plan["slots"]), mesh,
            version=self.slot_map.version + 1, chunk_bytes=20_000, timeout_s=8, on_round=on_round,
        )  # fmt: skip
        generated = {i: s for i, s in samples.items() if i % mesh.num_ranks == mesh.rank}
        own = exchange_samples(generated, owners(plan["cells"], len(samples)), mesh)
        result = train_step(
            self.model, self.optimizer, mesh, [row[mesh.rank] for row in plan["cells"]], own, loss_fn,
            total_tokens=total_tokens(samples), max_grad_norm=1.0,
        )  # fmt: skip
        self.losses.append(result.loss)
        self.next_step = step + 1

    def run(self, steps: int, fail: dict[str, Any] | None = None) -> None:
        """Train up to ``steps`` steps in all; ``fail`` is {"rank", "step", "round", "how"}."""
        while self.next_step < steps:
            here = fail is not None and (fail["rank"], fail["step"]) == (self.mesh.rank, self.next_step)
            self.step(_failing(fail) if fail is not None and here else None)
            if self.next_step % SAVE_EVERY == 0:
                self.save()

    def state(self) -> dict[str, torch.Tensor]:
        return logical_state(self.model, self.optimizer, self.mesh)


def _failing(fail: dict[str, Any]) -> Callable[[int], None]:
    def on_round(done: int) -> None:
        if done != fail["round"]:
            return
        if fail["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fail["how"] == "hang":
            time.sleep(300)
        raise ValueError("the disk of the moon is full")

    return on_round


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, resumed or not; rank 0 writes the final state, in logical order, to ``settings["result"]``."""
    training = Training(settings["ep"], settings["shards"], settings["folder"], **settings.get("options", {}))
    if settings.get("resume"):
        training.resume()
    first = training.next_step
    training.run(settings["steps"], settings.get("fail"))
    state = training.state()
    if training.mesh.rank == 0:
        write_tensors(Path(settings["result"]), sorted(state.items()), {})
    return {"first": first, "losses": training.losses, "version": training.slot_map.version}


def fail_and_recover(settings: dict[str, Any]) -> dict[str, Any]:
    """An exception in the middle of a move, then the last checkpoint in the same processes, then the rest."""
    training = Training(settings["ep"], settings["shards"], settings["folder"], **settings.get("options", {}))
    result: dict[str, Any] = {"message": None, "save": None}
    try:
        training.run(settings["steps"], settings["fail"])
    except RoutePackError as error:
        result["message"] = str(error)
    try:
        training.save()
    except RoutePackError as error:
        result["save"] = str(error)
    result["broken"] = training.slot_map.is_broken
    training.resume()
    training.run(settings["steps"])
    state = training.state()
    if training.mesh.rank == 0:
        write_tensors(Path(settings["result"]), sorted(state.items()), {})
    return result | {"losses": training.losses}


def next_step_elsewhere(folder: str) -> list[dict[str, Any]]:
    """The step after a checkpoint, in the job that wrote it and in jobs of other sizes and placements."""
    origin = Training(4, 1, folder, seed=3)
    origin.run(2)
    origin.step()
    reference, found = origin.state(), []
    for ep, shards, options in ((4, 1, {}), (2, 2, {}), (2, 2, {"shard_expert_state": True}), (1, 4, {})):
        other = Training(ep, shards, folder, seed=9, **options)
        other.resume()
        other.step()
        found.append(deviations(other.state(), reference) | {"loss": abs(other.losses[-1] / origin.losses[-1] - 1)})
    return found


if __name__ == "__main__":
    try:
        with process_group(backend="gloo", timeout_s=60, num_threads=1):
            train(json.loads(sys.argv[1]))
    except RoutePackError as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
