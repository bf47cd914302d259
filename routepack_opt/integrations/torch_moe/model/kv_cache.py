"""Keys and values of sequences under generation.

Shape suffixes: S sequences, M token room, T new tokens, Q query heads, G key/value heads, h head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.model.packed_attention import packed_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from routepack_opt.integrations.torch_moe.model.config import MoEConfig
    from routepack_opt.integrations.torch_moe.model.packed_attention import PackedRows


class KVCache:
    """One forward with the prompts fills it; each later one adds one token to every sequence."""

    def __init__(
        self,
        config: MoEConfig,
        num_sequences: int,
        max_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for ``max_tokens`` tokens (prompt and answer) of each sequence."""
        shape = (num_sequences, config.num_kv_heads, max_tokens, config.head_dim)
        self.max_tokens = max_tokens
        self.lengths = [0] * num_sequences
        self.layers = [LayerCache(shape, dtype, device) for _ in range(config.num_layers)]
        self.device = torch.device(device)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    def begin(self, rows: PackedRows) -> None:
        """Checks that the new tokens fit, and prepares what all layers share."""
        if rows.num_sequences != self.num_sequences:
            raise InvalidInput(f"kv cache: {rows.num_sequences} sequences given, the cache holds {self.num_sequences}")
        if rows.num_positions > self.max_tokens:
            raise InvalidInput(f"kv cache: {rows.num_positions} tokens in a sequence, room for {self.max_tokens}")
        if any(self.lengths) and any(length != 1 for length in rows.lengths):
            raise InvalidInput("kv cache: after the prompts every sequence takes exactly one token a forward")

    def end(self, rows: PackedRows) -> None:
        """Counts the new tokens, after the last layer has stored them."""
        self.lengths = [past + new for past, new in zip(self.lengths, rows.lengths, strict=True)]

    def keep(self, sequences: Sequence[int]) -> None:
        """Drops all sequences but those named, which are renumbered in the order given."""
        index = torch.tensor(list(sequences), dtype=torch.long, device=self.device)
        self.lengths = [self.lengths[sequence] for sequence in sequences]
        for layer in self.layers:
            layer.keys_SGMh, layer.values_SGMh = layer.keys_SGMh[index], layer.values_SGMh[index]


class LayerCache:
    """Keys and values of one layer, [S, G, M, h] each."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        """Zeros, so that room not written yet never holds a NaN."""
        self.keys_SGMh = torch.zeros(shape, dtype=dtype, device=device)
        self.values_SGMh = torch.zeros(shape, dtype=dtype, device=device)

    def attend(self, q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
        """Stores the new keys and values and attends over all stored ones of each sequence, [T, Q, h]."""
        self.keys_SGMh[rows.sequence_T, :, rows.positions_T] = k_TGh
        self.values_SGMh[rows.sequence_T, :, rows.positions_T] = v_TGh
        if not rows.is_decode:
            return packed_attention(q_TQh, k_TGh, v_TGh, rows, window)
        size, mask = rows.num_positions, rows.decode_mask(window)
        keys, values = self.keys_SGMh[:, :, :size], self.values_SGMh[:, :, :size]
        # query heads of one key head as rows of one matrix: no head is copied
        q_SGqh = q_TQh.view(q_TQh.shape[0], keys.shape[1], -1, q_TQh.shape[2])
        if q_TQh.is_cuda or q_TQh.dtype != torch.float32:
            y_SGqh = F.scaled_dot_product_attention(q_SGqh, keys, values, mask)
        else:  # three small kernels beat SDPA's one on CPUs at this shape (49 against 74 us)
            scores_SGqM = (q_SGqh * q_TQh.shape[2] ** -0.5) @ keys.transpose(2, 3)
            if mask is not None:
                scores_SGqM = scores_SGqM.masked_fill_(~mask, -torch.inf)
            y_SGqh = scores_SGqM.softmax(-1) @ values
        return y_SGqh.reshape(q_TQh.shape)
