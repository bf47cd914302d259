"""What the ranks of the training tests run: tiny models, seeded windows with recorded routes, and comparisons.

Every function returns JSON. Logical state is gathered to every rank, so rank 0 compares with one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from routepack_opt import Topology
from routepack_opt.integrations.torch_moe.model.config import MoEConfig
from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors
from routepack_opt.integrations.torch_moe.step.samples import PackedRow, TrainSample

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG = MoEConfig(
    vocab_size=48, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=8, top_k=2,
    expert_size=15, dense_layers=(0,), dense_size=24, shared_size=8, qk_norm=True,
)  # fmt: skip
LAYERS = CONFIG.num_moe_layers


def make_mesh(ep: int, shards: Any) -> ParallelMesh:
    topology = Topology(ep=ep, shards=shards) if isinstance(shards, int) else Topology(None, ep, shards)
    return ParallelMesh.create(topology)


def popularity(rng: np.random.Generator, step: int) -> np.ndarray:
    """[L, E] skewed towards a few experts, other ones every step (seeds with which each step's plan moves experts)."""
    del rng
    hot = np.random.default_rng(1300 + step).permuted(np.tile(np.arange(CONFIG.num_experts), (LAYERS, 1)), axis=1)
    return np.exp(-0.7 * hot)


def make_samples(step: int, lengths: Sequence[int], *, missing_last: bool = True) -> dict[int, TrainSample]:
    """A window: random tokens, routes drawn from :func:`popularity`, half of each sample is response."""
    rng = np.random.default_rng(step)
    scores_LE = np.log(popularity(rng, step))
    samples = {}
    for index, length in enumerate(lengths):
        rows = length - 1 if missing_last else length
        noise = rng.gumbel(size=(rows, LAYERS, CONFIG.num_experts))
        routes = np.argsort(-(scores_LE + noise), axis=-1)[:, :, : CONFIG.top_k]
        mask = (np.arange(length) >= length // 2).astype(np.float32)
        mask[-1] = 0.0
        samples[index] = TrainSample(
            torch.from_numpy(rng.integers(0, CONFIG.vocab_size, length)),
            torch.from_numpy(routes.astype(np.int16)),
            {
                "mask": torch.from_numpy(mask),
                "advantage": torch.from_numpy(rng.normal(1, 0.5, length).astype(np.float32)),
            },
        )
    return samples


def loss_fn(logits_TV: torch.Tensor, row: PackedRow) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted next-token loss, summed."""
    targets_T, valid_T = row.next_tokens()
    weight_T = row.fields["mask"] * valid_T if row.fields else valid_T.float()
    losses_T = F.cross_entropy(logits_TV.float(), targets_T, reduction="none") * weight_T
    advantage_T = row.fields["advantage"] if row.fields else weight_T
    return (losses_T * advantage_T).sum(), {"counted": weight_T.sum()}


def total_tokens(samples: dict[int, TrainSample]) -> float:
    return sum(float(sample.fields["mask"].sum()) for sample in samples.values())


def round_robin(num_samples: int, num_ranks: int, num_rows: int) -> list[list[list[int]]]:
    """``cells[row][rank]``: whatever is not first-fit."""
    cells = [[list(range(r * num_ranks + d, num_samples, num_ranks * num_rows)) for d in range(num_ranks)]
             for r in range(num_rows)]  # fmt: skip
    assert sorted(i for row in cells for cell in row for i in cell) == list(range(num_samples))
    return cells


def build(
    mesh: ParallelMesh,
    *,
    dtype: str = "float32",
    slots: Any = None,
    seed: int = 0,
    recompute: bool = False,
    **options: Any,
) -> Any:
    """Model, optimizer and slot map of this rank."""
    slot_map = SlotMap.identity(LAYERS, CONFIG.num_experts) if slots is None else SlotMap(np.asarray(slots))
    model = build_model(CONFIG, mesh, slot_map=slot_map, dtype=getattr(torch, dtype), seed=seed, recompute=recompute)
    # eps above the rounding noise of gradients that are nearly zero: Adam would make steps of full size of it
    return model, MoEAdamW(model, mesh, lr=1e-3, weight_decay=0.05, eps=1e-6, **options), slot_map


def logical_state(model: Any, optimizer: MoEAdamW, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Every weight, master and moment of the whole model, experts in logical order, the same on every rank."""
    state = {f"weight.{n}": p.detach().clone() for n, p in model.named_parameters() if not model.is_expert_parameter(n)}
    state |= {name: tensor.clone() for name, tensor in optimizer.state_for_checkpoint().items()}
    for entry in expert_slot_tensors(model, optimizer):
        rows = entry.tensor.reshape(entry.tensor.shape[0], -1)
        if entry.num_parts > 1:
            parts = all_gather_equal(rows, mesh.edp_group)
            rows = torch.cat([parts[p] for p in mesh.edp_wire_order], dim=1)[:, : int(np.prod(entry.row_shape))]
        by_rank = all_gather_equal(rows, mesh.ep_group)
        by_slot = torch.cat([by_rank[p] for p in mesh.ep_wire_order])
        state[f"expert.{entry.name}"] = by_slot[model.slot_map.logical_to_slot[entry.moe_layer]]
    return state


def deviations(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Largest difference by kind of tensor, relative to the largest entry of its tensor, and where that is.

    "<kind> rms" is the norm of all differences over that of all entries: for low precision, where single entries say
    little (Adam makes a step of full size of a gradient that is only rounding).
    """
    assert mine.keys() == reference.keys()
    worst: dict[str, Any] = {"weight": 0.0, "master": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    squares = {kind: [0.0, 0.0] for kind in worst}
    for name, tensor in mine.items():
        kind = name.rpartition(".")[2] if name.startswith("expert.") else name.partition(".")[0]
        other = reference[name].double()
        squares[kind][0] += float((tensor.double() - other).square().sum())
        squares[kind][1] += float(other.square().sum())
        gap = float((tensor.double() - other).abs().max() / other.abs().max().clamp_min(1e-30))
        if not gap <= worst[kind]:  # not a number, too
            worst[kind], worst[f"{kind} in"] = gap, name
    return worst | {f"{kind} rms": (a / b) ** 0.5 for kind, (a, b) in squares.items() if b}


def relative(values: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
