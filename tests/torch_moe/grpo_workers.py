"""What the ranks of the GRPO tests run; every function returns JSON."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from routepack_opt.integrations.torch_moe.grpo.job import Job
from routepack_opt.integrations.torch_moe.grpo.loop import run_training
from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors


def configured(table: dict[str, dict[str, Any]]) -> RunConfig:
    return RunConfig.from_table(table)


def train(tables: list[dict[str, dict[str, Any]]], resume: bool = False) -> list[dict[str, Any]]:
    """Run or resume one run after another; the summary (rank 0) and the state at the end of each."""
    results = []
    for table in tables:
        summary = run_training(configured(table), torch.device("cpu"), resume=resume)
        results.append({"summary": summary and summary.to_json(), "state": state_of_checkpoint(table)})
    return results


def state_of_checkpoint(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The newest checkpoint: its placement, and a digest of every tensor this rank then holds."""
    job = Job.build(configured(table), torch.device("cpu"))
    step = job.resume()
    tensors = dict(job.model.named_parameters())
    tensors |= {entry.name: entry.tensor for entry in expert_slot_tensors(job.model, job.optimizer)}
    digests = {name: hashlib.sha256(t.detach().float().numpy().tobytes()).hexdigest() for name, t in tensors.items()}
    slots = job.slot_map.logical_to_slot.numpy()
    moved = int((slots != np.arange(slots.shape[1])).sum())
    return {"step": step, "slots": slots.tolist(), "digests": digests, "moved": moved}
