"""Causal attention over packed sequences of unequal length; no token ever sees another sequence.

Shape suffixes: T packed tokens, S sequences, D hidden, Q query heads, G key/value heads, h head size, M longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routepack_opt.integrations.torch_moe.model.packed_attention import PackedRows, packed_attention

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.model.config import MoEConfig
    from routepack_opt.integrations.torch_moe.model.kv_cache import LayerCache


class RotaryTable(nn.Module):
    """cos and signed sin of every position seen so far, float32; grows by doubling.

    sin carries the minus of the first half, which saves a kernel in every layer.
    """

    def __init__(self, head_dim: int, theta: float, *, device: torch.device | str = "cpu") -> None:
        """Frequencies theta^(-2i/h) of the half-split layout (first half with second half)."""
        super().__init__()
        self.inverse_frequency = 1.0 / theta ** (
            torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        )
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def forward(self, positions_T: Tensor, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) [T, 1, h] of positions below ``num_positions``."""
        if num_positions > self._cos.shape[0]:
            size = max(256, 1 << (num_positions - 1).bit_length())
            frequency = self.inverse_frequency
            angles = torch.outer(torch.arange(size, dtype=torch.float32, device=frequency.device), frequency)
            cos, sin = angles.cos(), angles.sin()
            self._cos, self._sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return self._cos[positions_T].unsqueeze(1).to(dtype), self._sin[positions_T].unsqueeze(1).to(dtype)


def rotate(x_TQh: Tensor, cos_T1h: Tensor, sin_T1h: Tensor) -> Tensor:
    """Rotary embedding of every head."""
    first, second = x_TQh.chunk(2, dim=-1)
    return torch.addcmul(x_TQh * cos_T1h, torch.cat((second, first), dim=-1), sin_T1h)


class Attention(nn.Module):
    """Projections, optional RMSNorm of query and key heads, rotary embedding, packed or cached attention."""

    def __init__(self, config: MoEConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Weights are left uninitialised; the model draws them."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.sliding_window
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        kinds: dict[str, Any] = {"bias": config.attention_bias, "dtype": dtype, "device": device}
        self.q_proj = nn.utils.skip_init(nn.Linear, config.hidden_size, query_size, **kinds)
        self.k_proj = nn.utils.skip_init(nn.Linear, config.hidden_size, kv_size, **kinds)
        self.v_proj = nn.utils.skip_init(nn.Linear, config.hidden_size, kv_size, **kinds)
        self.o_proj = nn.utils.skip_init(nn.Linear, query_size, config.hidden_size, **kinds)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype, device=device)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype, device=device)

    def forward(
        self, x_TD: Tensor, rows: PackedRows, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """[T, D] -> [T, D]; with a cache the tokens continue its sequences."""
        num_tokens = x_TD.shape[0]
        q_TQh = self.q_proj(x_TD).view(num_tokens, self.num_heads, self.head_dim)
        k_TGh = self.k_proj(x_TD).view(num_tokens, self.num_kv_heads, self.head_dim)
        v_TGh = self.v_proj(x_TD).view(num_tokens, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_TQh, k_TGh = self.q_norm(q_TQh), self.k_norm(k_TGh)
        q_TQh, k_TGh = rotate(q_TQh, *rotary), rotate(k_TGh, *rotary)
        if cache is None:
            y_TQh = packed_attention(q_TQh, k_TGh, v_TGh, rows, self.window)
        else:
            y_TQh = cache.attend(q_TQh, k_TGh, v_TGh, rows, self.window)
        return self.o_proj(y_TQh.reshape(num_tokens, self.num_heads * self.head_dim))
