"""What the rows of a step add up to over all ranks, and whether all ranks got through them.

A loss function that raises on one rank would leave the others waiting in the next exchange. So its error is kept, the
rank runs on with losses of zero, and here, before anything is updated, every rank hears of it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal, all_reduce_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from routepack_opt.integrations.torch_moe.step.samples import PackedRow

_RECORD = struct.Struct("<?q32s240s")  # all well, bytes of the names, their sha256, what went wrong


class StepFailed(RoutePackError):
    """The loss function failed on a rank; no rank has updated anything."""


class RowSums:
    """Named sums over the rows of one rank: the loss function's, and how many tokens ran."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.failure: Exception | None = None
        self._sums: dict[str, torch.Tensor] = {}

    def loss_of(self, loss_fn: Any, logits_TV: torch.Tensor, row: PackedRow) -> torch.Tensor:
        """The row's loss, whose backward pass reaches all logits; zero once the loss function has failed."""
        own, metrics = self._call(loss_fn, logits_TV, row)
        if self.failure is None:
            self._add("loss", own)
            for name, value in metrics.items():
                self._add(f"metric.{name}", value)
        self._add("tokens", torch.tensor(float(row.num_tokens)))
        if row.num_tokens and own.requires_grad:
            return own
        return own + 0.0 * logits_TV.sum()  # the backward pass is collective: a cell without loss takes its part in it

    def _call(
        self, loss_fn: Any, logits_TV: torch.Tensor, row: PackedRow
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.failure is None:
            try:
                answer = loss_fn(logits_TV, row)
                own, metrics = answer if isinstance(answer, tuple) else (answer, {})
                values = {name: _scalar(value, f"metric {name!r}") for name, value in metrics.items()}
                return _scalar(own, "the loss"), values
            except Exception as error:
                self.failure = error
        return torch.zeros((), device=logits_TV.device), {}

    def _add(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def over_ranks(self, mesh: ParallelMesh) -> tuple[float, float, dict[str, float]]:
        """Loss, tokens and metrics, summed over all ranks; every rank calls it.

        A metric that some ranks never saw (none of their rows had it) counts zero there.

        Raises
        ------
        StepFailed
            The loss function raised on another rank; the rank itself raises the error of the loss function.
        """
        names = _agree(sorted(self._sums), self.failure, mesh)
        if not names:
            return 0.0, 0.0, {}
        zero = torch.zeros((), dtype=torch.float64)
        totals = torch.stack([self._sums.get(name, zero).to(mesh.device) for name in names])
        found = dict(zip(names, all_reduce_(totals, mesh.dp_group).tolist(), strict=True))
        metrics = {name.removeprefix("metric."): value for name, value in found.items() if name.startswith("metric.")}
        return found.get("loss", 0.0), found["tokens"], metrics


def _scalar(value: Any, what: str) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    if tensor.numel() != 1:
        raise StepFailed(f"loss_fn: {what} has shape {tuple(tensor.shape)}; expected one number, the sum over the row")
    return tensor.reshape(())


def _agree(names: list[str], failure: Exception | None, mesh: ParallelMesh) -> list[str]:
    """The names that any rank has, in one order."""
    text = json.dumps(names).encode()
    why = "" if failure is None else " ".join(f"{type(failure).__name__}: {failure}".splitlines())
    record = _RECORD.pack(failure is None, len(text), hashlib.sha256(text).digest(), why.encode(errors="replace")[:240])
    records = [_RECORD.unpack(raw) for raw in _gather(record, mesh)]
    if failure is not None:
        raise failure
    for rank, (well, *_, said) in enumerate(records):
        if not well:
            reason = said.rstrip(b"\0").decode(errors="replace")
            raise StepFailed(f"rank {rank}: its loss function failed ({reason}); nothing was updated")
    if len({record[1:3] for record in records}) == 1:
        return names
    longest = max(length for _, length, *_ in records)
    everyone: Mapping[str, None] = {}
    for raw in _gather(text.ljust(longest), mesh):
        everyone = {**everyone, **dict.fromkeys(json.loads(raw))}
    return sorted(everyone)


def _gather(record: bytes, mesh: ParallelMesh) -> list[bytes]:
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(mesh.device)
    return [bytes(row.tolist()) for row in all_gather_equal(mine, mesh.dp_group)]
