"""Samples as training sees them, and the packed row of one cell.

Names: t tokens of a sample, T of a packed row, S samples of a row, L MoE layers, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One prompt + response.

    Attributes
    ----------
    tokens
        int64 [t].
    routes
        int16 or int32 [t or t-1, L, K], logical experts the rollout used; None lets the router choose. A rollout has
        no row for its last token; the router chooses there.
    fields
        float32 [t] each: masks, advantages, old log-probabilities; what the loss function reads.
    """

    tokens: torch.Tensor
    routes: torch.Tensor | None = None
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate shapes."""
        num_tokens = self.tokens.shape[0] if self.tokens.ndim == 1 else 0
        if num_tokens == 0 or self.tokens.dtype != torch.int64:
            raise InvalidInput(
                f"tokens: expected int64 [t], t >= 1, found {self.tokens.dtype} {tuple(self.tokens.shape)}"
            )
        if self.routes is not None and (
            self.routes.ndim != 3
            or self.routes.shape[0] not in (num_tokens, num_tokens - 1)
            or self.routes.dtype not in (torch.int16, torch.int32)
        ):
            raise InvalidInput(
                f"routes: expected int16 or int32 [{num_tokens} or {num_tokens - 1}, L, K],"
                f" found {self.routes.dtype} {tuple(self.routes.shape)}"
            )
        for name, values in self.fields.items():
            if values.shape != self.tokens.shape or values.dtype != torch.float32:
                raise InvalidInput(
                    f"fields[{name!r}]: expected float32 [{num_tokens}], found {values.dtype} {tuple(values.shape)}"
                )

    @property
    def num_tokens(self) -> int:
        """Its length t."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The samples of one cell behind one another; attention stays inside a sample.

    Attributes
    ----------
    tokens_T, cu_seqlens_S1
        int64 [T]; int32 [S + 1], where each sample starts and the last ends.
    routes_TLK
        Routes to replay, -1 where the router chooses; None when no sample has any.
    fields
        float32 [T] each.
    sample_indices
        Which sample stands where, [S].
    """

    tokens_T: torch.Tensor
    cu_seqlens_S1: torch.Tensor
    routes_TLK: torch.Tensor | None
    fields: dict[str, torch.Tensor]
    sample_indices: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.tokens_T.shape[0])

    def next_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The token each position predicts, int64 [T], and whether it has one (no sample's last does), bool [T]."""
        targets_T = torch.cat([self.tokens_T[1:], self.tokens_T[:1]])
        valid_T = torch.ones_like(self.tokens_T, dtype=torch.bool)
        valid_T[self.cu_seqlens_S1[1:].long() - 1] = False
        return targets_T, valid_T


def pack_row(cell: Sequence[int], samples: Mapping[int, TrainSample], device: torch.device | str = "cpu") -> PackedRow:
    """One cell's samples as a row; an empty cell gives a row of no tokens.

    Raises
    ------
    InvalidInput
        A sample is not here, or samples disagree on fields or route shapes; names it.
    """
    missing = [index for index in cell if index not in samples]
    if missing:
        raise InvalidInput(f"sample {missing[0]}: not on this rank; exchange the samples first")
    members = [samples[index] for index in cell]
    lengths = torch.tensor([0, *(sample.num_tokens for sample in members)], dtype=torch.int32)
    tokens_T = torch.cat([sample.tokens for sample in members]) if members else torch.zeros(0, dtype=torch.int64)
    names = set(members[0].fields) if members else set()
    for index, sample in zip(cell, members, strict=True):
        if set(sample.fields) != names:
            raise InvalidInput(
                f"sample {index}: has fields {sorted(sample.fields)}, sample {cell[0]} has {sorted(names)}"
            )
    fields = {name: torch.cat([sample.fields[name] for sample in members]).to(device) for name in sorted(names)}
    return PackedRow(
        tokens_T.to(device),
        torch.cumsum(lengths, 0, dtype=torch.int32).to(device),
        _pack_routes(cell, members, device),
        fields,
        tuple(cell),
    )


def _pack_routes(cell: Sequence[int], members: list[TrainSample], device: torch.device | str) -> torch.Tensor | None:
    shapes = {tuple(sample.routes.shape[1:]): index for index, sample in zip(cell, members, strict=True)
              if sample.routes is not None}  # fmt: skip
    if not shapes:
        return None
    if len(shapes) > 1:
        raise InvalidInput(f"routes: samples {sorted(shapes.values())} disagree on (layers, top-k): {sorted(shapes)}")
    num_layers, top_k = next(iter(shapes))
    rows = []
    for sample in members:
        routes = sample.routes if sample.routes is not None else torch.zeros(0, num_layers, top_k, dtype=torch.int32)
        rows.append(routes.to(torch.int32))
        rows.append(torch.full((sample.num_tokens - len(routes), num_layers, top_k), -1, dtype=torch.int32))
    return torch.cat(rows).to(device)
