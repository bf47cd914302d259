"""What a step refuses before it starts, on all ranks together.

A rank that raised alone would leave the others waiting in a collective, and an expert id that no table has would end a
GPU job with a device-side assert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_reduce_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from routepack_opt.integrations.torch_moe.step.samples import TrainSample


_CLOSE = 1e-6  # token counts may be sums that ranks took in different orders


@dataclass(frozen=True)
class StepSettings:
    """Arguments of ``train_step`` that must be the same on all ranks."""

    total_tokens: float
    max_grad_norm: float | None
    pad_multiple: int
    replay: bool

    def problem(self) -> str | None:
        """What is out of range."""
        if not (_is_number(self.total_tokens) and math.isfinite(self.total_tokens) and self.total_tokens > 0):
            return f"total_tokens: {self.total_tokens!r} is not a number above 0"
        clip = self.max_grad_norm
        if clip is not None and not (_is_number(clip) and clip > 0):
            return f"max_grad_norm: {clip!r} is not a number above 0, nor None"
        pad = self.pad_multiple
        if isinstance(pad, bool) or not isinstance(pad, int) or not 1 <= pad < 2**31:
            return f"pad_multiple: {pad!r} is not an integer of at least 1"
        return None

    def numbers(self) -> dict[str, float]:
        """By name, to compare over ranks; a norm of -1 stands for None."""
        clip = -1.0 if self.max_grad_norm is None else float(self.max_grad_norm)
        return {
            "total_tokens": float(self.total_tokens),
            "max_grad_norm": min(clip, 1e300),
            "pad_multiple": float(self.pad_multiple),
            "replay": float(self.replay),
        }


def check_step(
    model: Any,
    mesh: ParallelMesh,
    cells_of_rank: Sequence[Sequence[int]],
    samples: Mapping[int, TrainSample],
    settings: StepSettings,
) -> None:
    """One small reduction; every rank calls it.

    Raises
    ------
    InvalidInput
        On every rank when any has a problem: with the problem where it is, with the rank's number elsewhere.
    """
    problem = settings.problem() or _problem(model, cells_of_rank, samples)
    mine = {"rows": float(len(cells_of_rank))} | (dict.fromkeys(_NAMES, 0.0) if problem else settings.numbers())
    values = [-1.0 if problem is None else float(mesh.rank), *mine.values(), *(-value for value in mine.values())]
    extremes = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    all_reduce_(extremes, mesh.dp_group, dist.ReduceOp.MAX if mesh.dp_group is not None else None)
    wrong_rank, *rest = extremes.tolist()
    if problem is not None:
        raise InvalidInput(problem)
    if wrong_rank >= 0:
        raise InvalidInput(f"rank {wrong_rank:.0f} cannot run its cells; its own message says why")
    for name, most, negated in zip(mine, rest[: len(mine)], rest[len(mine) :], strict=True):
        if most + negated > _CLOSE * abs(most):
            what = f"cells: {mine[name]:.0f} rows" if name == "rows" else f"{name}: {mine[name]:.10g}"
            raise InvalidInput(f"{what} here, {-negated:.10g} to {most:.10g} over the ranks; expected the same on all")


_NAMES = tuple(field.name for field in fields(StepSettings))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _problem(model: Any, cells_of_rank: Sequence[Sequence[int]], samples: Mapping[int, TrainSample]) -> str | None:
    config = model.config
    for row, cell in enumerate(cells_of_rank):
        for index in cell:
            if index not in samples:
                return f"cells[{row}]: sample {index} is not on this rank; exchange the samples first"
            wrong = _sample_problem(samples[index], config.vocab_size, config)
            if wrong:
                return f"sample {index}: {wrong}"
            first, own = sorted(samples[cell[0]].fields), sorted(samples[index].fields)
            if own != first:
                return f"sample {index}: has fields {own}, sample {cell[0]} of its cell {first}; expected the same"
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
