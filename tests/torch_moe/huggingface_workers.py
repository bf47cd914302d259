"""Ranks of the distributed Hugging Face test: load under a placement, train a step, export."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from routepack_opt import Topology
from routepack_opt.integrations.torch_moe.huggingface.weights import config_from_hf, export_hf, load_hf
from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape
from routepack_opt.integrations.torch_moe.step.samples import TrainSample
from routepack_opt.integrations.torch_moe.step.train_step import train_step

LENGTHS = (7, 5, 12, 3)


def window() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (length,), generator=generator) for length in LENGTHS]


def loss_fn(logits_TV: torch.Tensor, row: Any) -> torch.Tensor:
    targets_T, valid_T = row.next_tokens()
    return (F.cross_entropy(logits_TV, targets_T, reduction="none") * valid_T).sum()


def train_and_export(
    source: str, target: str, shards: list[list[int]] | None = None, permute: bool = True
) -> dict[str, Any]:
    """Load, permute, one step of Adam, export; logits of the first sample (``shards`` None: one process)."""
    mesh = ParallelMesh.single() if shards is None else ParallelMesh.create(Topology(None, len(shards[0]), shards))
    config = config_from_hf(source)
    generator = np.random.default_rng(4)
    experts = config.num_experts
    slots = [generator.permutation(experts) if permute else np.arange(experts) for _ in config.moe_layers]
    model = build_model(config, mesh, slot_map=SlotMap(np.stack(slots)), seed=None)
    load_hf(model, source)
    tokens = window()
    optimizer = MoEAdamW(model, mesh, lr=1e-2, eps=1e-3)
    mine = list(range(len(tokens)))[mesh.rank :: mesh.num_ranks]
    samples = {index: TrainSample(tokens[index], None, {}) for index in mine}
    train_step(model, optimizer, mesh, [mine], samples, loss_fn, total_tokens=sum(LENGTHS) - len(LENGTHS))
    export_hf(model, target, max_file_bytes=30_000)
    with torch.no_grad():
        borders = torch.tensor([0, LENGTHS[0]], dtype=torch.int32)
        logits = model(tokens[0], borders, tape=RouteTape.off())
    return {"logits": logits.tolist()}
