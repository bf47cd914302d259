"""Back-ends of packed causal attention: which kernel runs a row of sequences, and what each needs.

Shape suffixes: T packed tokens, S sequences, Q query heads, G key/value heads, h head size, M longest.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedRows:
    """Where each sequence of a packed row lies; made once per forward and shared by all layers."""

    def __init__(self, cu_seqlens_S1: Tensor, num_tokens: int, past: list[int] | None = None) -> None:
        """``past`` is the number of tokens each sequence already has in a cache."""
        self.cu_seqlens_S1 = cu_seqlens_S1
        borders = cu_seqlens_S1.tolist()
        self.lengths = [end - begin for begin, end in zip(borders, borders[1:], strict=False)]
        assert sum(self.lengths) == num_tokens and (not borders or borders[0] == 0), "cu_seqlens and tokens disagree"
        self.longest = max(self.lengths, default=0)
        self.past = past
        self._mask: Tensor | None = None
        self._mask_made = False

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @cached_property
    def sequence_T(self) -> Tensor:
        """Sequence of each token."""
        starts = self.cu_seqlens_S1
        lengths = (starts[1:] - starts[:-1]).long()
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=starts.device), lengths, output_size=sum(self.lengths)
        )

    @cached_property
    def positions_T(self) -> Tensor:
        """Position of each token in its sequence, past tokens counted."""
        starts = self.cu_seqlens_S1
        positions = torch.arange(sum(self.lengths), device=starts.device) - starts[:-1].long()[self.sequence_T]
        if self.past is not None:
            positions = positions + torch.tensor(self.past, device=starts.device)[self.sequence_T]
        return positions

    @property
    def num_positions(self) -> int:
        """One more than the largest position."""
        if self.past is None:
            return self.longest
        return max((p + n for p, n in zip(self.past, self.lengths, strict=True)), default=0)

    def decode_mask(self, window: int | None) -> Tensor | None:
        """Mask [S, 1, 1, M] of the stored tokens that the one new token of each sequence sees; None: all of them."""
        if not self._mask_made:
            self._mask, self._mask_made = self._decode_mask(window), True
        return self._mask

    def _decode_mask(self, window: int | None) -> Tensor | None:
        last_S1 = self.positions_T.unsqueeze(1)
        size = self.num_positions
        assert self.past is not None
        if min(self.past) == max(self.past) and (window is None or size <= window):
            return None
        stored_1M = torch.arange(size, device=last_S1.device).unsqueeze(0)
        mask_SM = stored_1M <= last_S1
        if window is not None:
            mask_SM &= stored_1M > last_S1 - window
        return mask_SM[:, None, None]


def packed_attention(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    """Causal attention inside each sequence, [T, Q, h]."""
    return _per_sequence(q_TQh, k_TGh, v_TGh, rows, window)


def _per_sequence(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    q_QTh, k_GTh, v_GTh = q_TQh.transpose(0, 1), k_TGh.transpose(0, 1), v_TGh.transpose(0, 1)
    grouped = q_TQh.shape[1] != k_TGh.shape[1]
    parts = []
    for q, k, v in zip(
        q_QTh.split(rows.lengths, 1), k_GTh.split(rows.lengths, 1), v_GTh.split(rows.lengths, 1), strict=True
    ):
        length = q.shape[1]
        mask = None
        if window is not None and length > window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        parts.append(
            F.scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None, enable_gqa=grouped)[
                0
            ]
        )
    return torch.cat(parts, 1).transpose(0, 1) if parts else torch.zeros_like(q_TQh)
