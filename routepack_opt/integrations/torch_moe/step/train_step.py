"""One optimizer step: a forward and backward pass per row, gradients summed, one update.

Every sum over tokens is divided by the whole step's token count, never by a cell's, a row's or a rank's: how samples
are laid out cannot change the gradient.

Names: T tokens of a packed row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.parallel.dispatch import AllToAllDispatch
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_reduce_
from routepack_opt.integrations.torch_moe.step.checks import StepSettings, check_step
from routepack_opt.integrations.torch_moe.step.pad_tokens import pad_row, route_last_tokens
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape
from routepack_opt.integrations.torch_moe.step.samples import PackedRow, TrainSample, pack_row
from routepack_opt.integrations.torch_moe.step.sums import RowSums, StepFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW

_log = logging.getLogger(__name__)

__all__ = ["LossFunction", "StepFailed", "StepResult", "count_tokens", "train_step"]

# (logits [T, V], row) -> the SUM of the row's token losses, or that and named SUMS to report
LossFunction = Callable[[torch.Tensor, PackedRow], "torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]"]


@dataclass(frozen=True)
class StepResult:
    """What a step did; all but ``seconds`` is the same on every rank.

    Attributes
    ----------
    loss
        Sum of all token losses / ``total_tokens``.
    grad_norm
        Before clipping.
    tokens
        Tokens run by all ranks, pad tokens excluded.
    metrics
        The loss function's sums over the whole step.
    seconds
        By part, this rank: ``pack``, ``forward``, ``backward``, ``reduce``, ``update``. On a GPU without
        ``wait_for_device`` these are the times to launch.
    skipped
        The gradient was not finite; no weight changed.
    """

    loss: float
    grad_norm: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: bool = False


def train_step(
    model: Any,
    optimizer: MoEAdamW,
    mesh: ParallelMesh,
    cells_of_rank: Sequence[Sequence[int]],
    samples: Mapping[int, TrainSample],
    loss_fn: LossFunction,
    *,
    total_tokens: float,
    max_grad_norm: float | None = None,
    pad_multiple: int = 1,
    replay: bool = True,
    route_last: bool = True,
    wait_for_device: bool = False,
) -> StepResult:
    """Run this rank's cells, row by row, and update; every rank calls it with the same number of rows.

    Parameters
    ----------
    cells_of_rank
        ``cells_of_rank[row]`` -> sample indices of this rank's cell.
    samples
        At least those, see :func:`~routepack_opt.integrations.torch_moe.step.exchange.exchange_samples`.
    loss_fn
        Sum, not mean; sees no pad token.
    total_tokens
        What the loss is divided by: loss tokens of the whole step, over all ranks; the same number on all.
    max_grad_norm
        Clip the norm of the whole model's gradient; None does not.
    pad_multiple
        Pad each row's tokens to a multiple (kernels, fp8); pads attend to themselves and load the EP ranks evenly.
    replay
        Force the samples' recorded routes; False lets the router choose anew.
    route_last
        Give the last token of a rollout, which has no recorded route, an even one (see
        :func:`~routepack_opt.integrations.torch_moe.step.pad_tokens.route_last_tokens`); False leaves it to the router.
    wait_for_device
        Synchronise around each part, for honest seconds.

    Raises
    ------
    InvalidInput
        Ranks disagree on the number of rows, ``total_tokens`` or a setting, a sample is missing or does not fit the
        model, a setting is out of range; on every rank, before any row runs.
    StepFailed
        ``loss_fn`` raised on another rank (which raises that error itself); on every rank, after the last row, and
        nothing is updated.
    """
    settings = StepSettings(total_tokens, max_grad_norm, pad_multiple, replay)
    check_step(model, mesh, cells_of_rank, samples, settings)
    clock = _Clock(mesh.device if wait_for_device else None)
    runner = _RowRunner(model, mesh, loss_fn, total_tokens, pad_multiple, replay, route_last, clock)
    optimizer.zero_grad()
    for cell in cells_of_rank:
        runner.run(cell, samples)
    with clock.part("reduce"):
        optimizer.reduce_gradients()
        norm = optimizer.clip_(max_grad_norm)
        loss, tokens, metrics = runner.sums.over_ranks(mesh)
    skipped = not math.isfinite(norm)
    if skipped:
        _log.warning("the gradient's norm is %s: step skipped", norm)
    else:
        with clock.part("update"):
            optimizer.step()
    return StepResult(loss / total_tokens, norm, int(tokens), metrics, clock.seconds, skipped)


@dataclass
class _RowRunner:
    """Forward and backward of one row after another; ``sums`` collects what they report, a failed loss included."""

    model: Any
    mesh: ParallelMesh
    loss_fn: LossFunction
    total_tokens: float
    pad_multiple: int
    replay: bool
    route_last: bool
    clock: _Clock
    sums: RowSums = field(default_factory=RowSums)

    def run(self, cell: Sequence[int], samples: Mapping[int, TrainSample]) -> None:
        with self.clock.part("pack"):
            row = pack_row(cell, samples, self.mesh.device)
            padded = self._with_all_routes(row)
        with self._announced(padded):
            with self.clock.part("forward"):
                loss = self._forward(row, padded)
            with self.clock.part("backward"):
                (loss / self.total_tokens).backward()

    def _with_all_routes(self, row: PackedRow) -> PackedRow:
        if not self.replay:
            row = dataclasses.replace(row, routes_TLK=None)
        elif self.route_last:
            row = route_last_tokens(row, self.model, self.mesh)
        return pad_row(row, self.pad_multiple, self.model, self.mesh)

    @contextmanager
    def _announced(self, row: PackedRow) -> Iterator[None]:
        """Replay knows all counts beforehand: one exchange for all layers. Every member of the EP group takes part."""
        dispatcher = self.model.moe_blocks[0].dispatcher if self.replay and self.model.moe_blocks else None
        if not isinstance(dispatcher, AllToAllDispatch):
            yield
            return
        routes_TLK = row.routes_TLK
        if routes_TLK is None and row.num_tokens == 0:
            routes_TLK = torch.zeros(0, dispatcher.slot_map.num_layers, 1, dtype=torch.int32)
        dispatcher.announce(routes_TLK)
        try:
            yield
        finally:
            dispatcher.forget()

    def _forward(self, row: PackedRow, padded: PackedRow) -> torch.Tensor:
        routes_TLK = padded.routes_TLK
        tape = RouteTape.off() if routes_TLK is None else RouteTape.replaying(routes_TLK)
        logits_TV = self.model(padded.tokens_T, padded.cu_seqlens_S1, tape=tape)[: row.num_tokens]
        return self.sums.loss_of(self.loss_fn, logits_TV, row)


def count_tokens(samples: Mapping[int, TrainSample], mask_field: str, mesh: ParallelMesh) -> float:
    """Sum of a mask over all samples of all ranks (each sample on one rank only): the step's ``total_tokens``.

    Raises
    ------
    InvalidInput
        On every rank when a sample of any has no such field, or one that is not finite.
    """
    lacking = [index for index, sample in samples.items() if mask_field not in sample.fields]
    own = math.nan if lacking else sum(float(sample.fields[mask_field].sum()) for sample in samples.values())
    total = float(all_reduce_(torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.dp_group))
    if lacking:
        known = ", ".join(sorted(samples[lacking[0]].fields)) or "none"
        raise InvalidInput(f"sample {lacking[0]}: no field {mask_field!r}; it has {known}")
    if not math.isfinite(total):
        raise InvalidInput(f"field {mask_field!r}: missing or not finite in a sample of some rank")
    return total


class _Clock:
    def __init__(self, device: torch.device | None) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device if device is not None and device.type == "cuda" else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
