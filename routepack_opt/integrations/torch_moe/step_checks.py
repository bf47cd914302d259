"""What a step refuses before it starts, on all ranks together.

A rank that raised alone would leave the others waiting in a collective, and an expert id that no table has would end a
GPU job with a device-side assert.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.mesh import ParallelMesh, all_reduce_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from routepack_opt.integrations.torch_moe.samples import TrainSample


def check_step(
    model: Any,
    mesh: ParallelMesh,
    cells_of_rank: Sequence[Sequence[int]],
    samples: Mapping[int, TrainSample],
    total_tokens: float,
) -> None:
    """One small reduction; every rank calls it.

    Raises
    ------
    InvalidInput
        On every rank when any has a problem: with the problem where it is, with the rank's number elsewhere.
    """
    problem = _problem(model, cells_of_rank, samples, total_tokens)
    num_rows = len(cells_of_rank)
    extremes = torch.tensor([num_rows, -num_rows, -1 if problem is None else mesh.rank], device=mesh.device)
    all_reduce_(extremes, mesh.dp_group, dist.ReduceOp.MAX if mesh.dp_group is not None else None)
    most, least, wrong_rank = extremes[0].item(), -extremes[1].item(), extremes[2].item()
    if problem is not None:
        raise InvalidInput(problem)
    if wrong_rank >= 0:
        raise InvalidInput(f"rank {wrong_rank} cannot run its cells; its own message says why")
    if most != least:
        raise InvalidInput(f"cells: {num_rows} rows here, {least} to {most} over the ranks; expected the same on all")


def _problem(
    model: Any, cells_of_rank: Sequence[Sequence[int]], samples: Mapping[int, TrainSample], total_tokens: float
) -> str | None:
    if not (math.isfinite(total_tokens) and total_tokens > 0):
        return f"total_tokens: {total_tokens!r} is not above 0"
    config = model.config
    for row, cell in enumerate(cells_of_rank):
        for index in cell:
            if index not in samples:
                return f"cells[{row}]: sample {index} is not on this rank; exchange the samples first"
            wrong = _sample_problem(samples[index], config.vocab_size, config)
            if wrong:
                return f"sample {index}: {wrong}"
    return None


def _sample_problem(sample: TrainSample, vocab_size: int, config: Any) -> str | None:
    low, high = sample.tokens.aminmax()
    if low < 0 or high >= vocab_size:
        return f"tokens: ids from {low} to {high}; expected 0..{vocab_size - 1}"
    if sample.routes is None:
        return None
    wanted = (config.num_moe_layers, config.top_k)
    if tuple(sample.routes.shape[1:]) != wanted:
        return f"routes: (layers, top-k) {tuple(sample.routes.shape[1:])}; expected {wanted}"
    if sample.routes.numel() == 0:
        return None
    low, high = sample.routes.aminmax()
    if low < -1 or high >= config.num_experts:
        return f"routes: ids from {low} to {high}; expected logical experts 0..{config.num_experts - 1}, or -1"
    missing_tLK = sample.routes < 0
    if bool((missing_tLK.any(-1) & ~missing_tLK.all(-1)).any()):
        return "routes: -1 in part of a row; expected K ids, or all -1"
    return None
