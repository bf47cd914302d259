"""Small jobs the checkpoint and restart tests run on several ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from routepack_opt.integrations.torch_moe.checkpoint.pieces import local_pieces
from routepack_opt.integrations.torch_moe.model.config import MoEConfig
from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.topology import Topology

NUM_EXPERTS = 8


def small_config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "num_layers": 3,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "num_experts": NUM_EXPERTS,
        "top_k": 2,
        "expert_size": 9,  # odd, so that ranges of sharded state cut matrices apart and end in padding
        "dense_layers": (1,),
        "dense_size": 20,
        "shared_size": 8,
        "router": "sigmoid",
    }
    return MoEConfig(**(sizes | changes))


def random_placement(config: MoEConfig, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(config.num_experts) for _ in range(config.num_moe_layers)])


class Job:
    """Model, optimizer, slot map and mesh of this rank."""

    def __init__(
        self,
        ep: int,
        *,
        placement: Any = None,
        sharded: bool = False,
        dtype: torch.dtype = torch.float32,
        config: MoEConfig | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self.config = config or small_config()
        if dist.is_available() and dist.is_initialized():
            self.mesh = ParallelMesh.create(Topology(dp=dist.get_world_size(), ep=ep))
        else:
            assert ep == 1
            self.mesh = ParallelMesh.single()
        if placement is None:
            placement = np.tile(np.arange(self.config.num_experts), (self.config.num_moe_layers, 1))
        self.slot_map = SlotMap(placement, version)
        self.model = build_model(self.config, self.mesh, slot_map=self.slot_map, dtype=dtype, seed=seed)
        self.optimizer = MoEAdamW(self.model, self.mesh, lr=0.01, shard_expert_state=sharded)

    def pieces(self) -> list[Any]:
        return local_pieces(self.model, self.optimizer, self.mesh, self.slot_map.slot_to_logical.numpy())

    @torch.no_grad()
    def fill_by_name(self) -> None:
        """Every logical tensor gets values that depend on its name only."""
        for piece in self.pieces():
            values = named_values(piece.name, piece.shape, piece.entries.dtype).flatten()
            piece.entries.view(-1).copy_(values[piece.start : piece.stop])
        self.optimizer.steps = 7

    def wrong_names(self) -> list[str]:
        """Pieces that do not hold the values of their name; [] after a right load."""
        wrong = []
        for piece in self.pieces():
            values = named_values(piece.name, piece.shape, piece.entries.dtype).flatten()
            if not torch.equal(piece.entries.reshape(-1), values[piece.start : piece.stop]):
                wrong.append(piece.key)
        return wrong


def named_values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator).to(dtype)
