"""Back-ends of packed causal attention: which kernel runs a row of sequences, and what each needs.

Shape suffixes: T packed tokens, S sequences, Q query heads, G key/value heads, h head size, M longest of a batch,
R rows of the padded batches, one after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from functools import cache, cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from routepack_opt.errors import InvalidInput

Backend = Literal["auto", "flash", "varlen", "flex", "batched"]

# One more kernel call costs as much as this many multiply-adds on padding (measured on CPUs; small heads).
_CALL_COST = 60_000
_FLEX_MIN_TOKENS = 1024  # below it the block mask costs more than the attention


class PackedRows:
    """Where each sequence of a packed row lies; made once per forward and shared by all layers."""

    def __init__(
        self, cu_seqlens_S1: Tensor, num_tokens: int, *, past: list[int] | None = None, backend: Backend = "auto"
    ) -> None:
        """``past`` is the number of tokens each sequence already has in a cache; ``backend`` forces a kernel.

        Raises
        ------
        InvalidInput
            When the borders do not run from 0 to the number of tokens, or descend.
        """
        borders: list[int] = cu_seqlens_S1.tolist()
        self.cu_seqlens_S1, self.num_tokens, self.past, self.backend = cu_seqlens_S1, num_tokens, past, backend
        self.lengths = [end - begin for begin, end in itertools.pairwise(borders)]
        if not borders or borders[0] != 0 or borders[-1] != num_tokens or min(self.lengths, default=0) < 0:
            raise InvalidInput(f"cu_seqlens: expected ascending borders from 0 to {num_tokens}, found {borders[:8]}...")
        self.longest = max(self.lengths, default=0)
        self._batches: Batches | None = None
        self._decode_mask: tuple[Tensor | None] | None = None
        self._flex_mask: Any = None

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every sequence has past tokens in a cache (and therefore one new one)."""
        return self.past is not None and any(self.past)

    @cached_property
    def sequence_T(self) -> Tensor:
        """Sequence of each token."""
        device = self.cu_seqlens_S1.device
        sequences_S = torch.arange(self.num_sequences, device=device)
        if self.is_decode:
            return sequences_S
        lengths_S = torch.tensor(self.lengths, dtype=torch.long, device=device)
        return torch.repeat_interleave(sequences_S, lengths_S, output_size=self.num_tokens)

    @cached_property
    def positions_T(self) -> Tensor:
        """Position of each token in its sequence, past tokens counted."""
        device = self.cu_seqlens_S1.device
        if self.is_decode:
            return torch.tensor(self.past, dtype=torch.long, device=device)
        return torch.arange(self.num_tokens, device=device) - self.cu_seqlens_S1.long()[self.sequence_T]

    @cached_property
    def num_positions(self) -> int:
        """One more than the largest position."""
        return self.longest + (max(self.past, default=0) if self.past is not None else 0)

    def batches(self, head_cost: int) -> Batches:
        """The padded batches of this row (the same for all layers)."""
        if self._batches is None:
            self._batches = Batches(self, head_cost)
        return self._batches

    def decode_mask(self, window: int | None) -> Tensor | None:
        """Mask [S, 1, 1, M] of the stored tokens that the one new token of each sequence sees; None: all of them."""
        if self._decode_mask is None:
            assert self.past is not None
            size, mask = self.num_positions, None
            if min(self.past, default=0) + 1 < size or (window is not None and size > window):
                last_S1 = self.positions_T.unsqueeze(1)
                stored_1M = torch.arange(size, device=last_S1.device).unsqueeze(0)
                mask_SM = stored_1M <= last_S1
                if window is not None:
                    mask_SM &= stored_1M > last_S1 - window
                mask = mask_SM[:, None, None]
            self._decode_mask = (mask,)
        return self._decode_mask[0]

    def flex_mask(self, window: int | None) -> Any:
        """Block mask of flex_attention: same sequence, not later, inside the window."""
        if self._flex_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            sequence_T, positions_T = self.sequence_T, self.positions_T

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                distance = positions_T[query] - positions_T[key]
                visible = (sequence_T[query] == sequence_T[key]) & (distance >= 0)
                return visible if window is None else visible & (distance < window)

            num, device = self.num_tokens, sequence_T.device
            self._flex_mask = create_block_mask(sees, None, None, num, num, device=device)
        return self._flex_mask


class Batches:
    """Sequences of like length padded into batches, so that short ones share a kernel call.

    Padding goes to the end, where a causal mask hides it; no mask tensor is needed.
    """

    def __init__(self, rows: PackedRows, head_cost: int) -> None:
        """``head_cost`` is multiply-adds per query-key pair (query heads x head size)."""
        lengths = rows.lengths
        order = sorted((s for s in range(len(lengths)) if lengths[s]), key=lambda s: -lengths[s])
        self.shapes: list[tuple[int, int]] = []  # (sequences, longest) of each batch
        first_row = [0] * len(lengths)
        num_rows = num_members = longest = 0
        for sequence in order:
            length = lengths[sequence]
            if num_members and (longest * longest - length * length) * head_cost < _CALL_COST:
                num_members += 1
                self.shapes[-1] = (num_members, longest)
            else:
                num_members, longest = 1, length
                self.shapes.append((1, length))
            first_row[sequence] = num_rows
            num_rows += longest
        self.num_rows = num_rows
        self.alone = all(num == 1 for num, _ in self.shapes)
        self.row_T = rows.positions_T
        if not self.alone:
            first_row_S = torch.tensor(first_row, device=rows.positions_T.device)
            self.row_T = rows.positions_T + first_row_S[rows.sequence_T]


def packed_attention(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    """Causal attention inside each sequence, [T, Q, h]; ``window`` counts the token itself."""
    if not rows.num_tokens:  # nothing to do, but keys and values must end with zero gradients, not None
        return q_TQh + 0.0 * (k_TGh.sum() + v_TGh.sum())
    backend = choose_backend(q_TQh, rows) if rows.backend == "auto" else rows.backend
    if backend == "flash":
        return _flash(q_TQh, k_TGh, v_TGh, rows, window)
    if backend == "varlen":
        return _varlen(q_TQh, k_TGh, v_TGh, rows, window)
    if backend == "flex":
        return _flex(q_TQh, k_TGh, v_TGh, rows, window)
    return _batched(q_TQh, k_TGh, v_TGh, rows, window)


def choose_backend(q_TQh: Tensor, rows: PackedRows) -> Backend:
    """Fused kernels on GPUs, where one is installed that takes the type; batches of SDPA elsewhere."""
    if not q_TQh.is_cuda:
        return "batched"
    if q_TQh.dtype in (torch.bfloat16, torch.float16):
        if _is_installed("flash_attn"):
            return "flash"
        if "window_size" in _varlen_arguments():
            return "varlen"
    head_dim = q_TQh.shape[-1]
    if rows.num_tokens >= _FLEX_MIN_TOKENS and head_dim >= 16 and head_dim & (head_dim - 1) == 0:
        return "flex"
    return "batched"


@cache
def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@cache
def _varlen_arguments() -> frozenset[str]:
    """Argument names of torch's own variable-length attention, which differ between releases; empty without it."""
    if not _is_installed("torch.nn.attention.varlen"):
        return frozenset()
    varlen = importlib.import_module("torch.nn.attention.varlen")
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def _flash(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    borders = rows.cu_seqlens_S1.to(torch.int32)
    left = -1 if window is None else window - 1
    flash = importlib.import_module("flash_attn").flash_attn_varlen_func
    return flash(q_TQh, k_TGh, v_TGh, borders, borders, rows.longest, rows.longest, causal=True, window_size=(left, -1))


def _varlen(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    borders = rows.cu_seqlens_S1.to(torch.int32)
    heads: dict[str, bool] = {}
    if q_TQh.shape[1] != k_TGh.shape[1]:
        if "enable_gqa" in _varlen_arguments():
            heads["enable_gqa"] = True
        else:
            k_TGh, v_TGh = (x.repeat_interleave(q_TQh.shape[1] // x.shape[1], dim=1) for x in (k_TGh, v_TGh))
    left = -1 if window is None else window - 1
    sizes = (rows.longest, rows.longest)
    return varlen_attn(q_TQh, k_TGh, v_TGh, borders, borders, *sizes, window_size=(left, 0), **heads)


@cache
def _flex_kernel(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def _flex(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    q_1QTh, k_1GTh, v_1GTh = (x.transpose(0, 1).unsqueeze(0) for x in (q_TQh, k_TGh, v_TGh))
    kernel = _flex_kernel(q_TQh.is_cuda)  # uncompiled it is a slow reference, which tests use
    grouped = q_TQh.shape[1] != k_TGh.shape[1]
    y_1QTh = kernel(q_1QTh, k_1GTh, v_1GTh, block_mask=rows.flex_mask(window), enable_gqa=grouped)
    return y_1QTh.squeeze(0).transpose(0, 1)


def _batched(q_TQh: Tensor, k_TGh: Tensor, v_TGh: Tensor, rows: PackedRows, window: int | None) -> Tensor:
    batches = rows.batches(q_TQh.shape[1] * q_TQh.shape[2])
    if batches.alone:
        lengths = [length for length in rows.lengths if length]
        parts = zip(q_TQh.split(lengths), k_TGh.split(lengths), v_TGh.split(lengths), strict=True)
        return torch.cat([_sdpa(q[None], k[None], v[None], window)[0] for q, k, v in parts])
    padded = [_Pad.apply(x, batches.row_T, batches.num_rows) for x in (q_TQh, k_TGh, v_TGh)]
    sizes = [num * longest for num, longest in batches.shapes]
    answers = []
    for shape, q_RQh, k_RGh, v_RGh in zip(batches.shapes, *(x.split(sizes) for x in padded), strict=True):
        y_SMQh = _sdpa(q_RQh.unflatten(0, shape), k_RGh.unflatten(0, shape), v_RGh.unflatten(0, shape), window)
        answers.append(y_SMQh.flatten(0, 1))
    return _Unpad.apply(torch.cat(answers) if len(answers) > 1 else answers[0], batches.row_T)


def _sdpa(q_SMQh: Tensor, k_SMGh: Tensor, v_SMGh: Tensor, window: int | None) -> Tensor:
    longest, mask = q_SMQh.shape[1], None
    if window is not None and longest > window:
        mask = torch.ones(longest, longest, dtype=torch.bool, device=q_SMQh.device).tril().triu(1 - window)
    y_SQMh = F.scaled_dot_product_attention(
        q_SMQh.transpose(1, 2),
        k_SMGh.transpose(1, 2),
        v_SMGh.transpose(1, 2),
        mask,
        is_causal=mask is None,
        enable_gqa=q_SMQh.shape[2] != k_SMGh.shape[2],
    )
    return y_SQMh.transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Token rows to their places in the padded batches, zeros elsewhere; a gather backwards."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, row_T: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(row_T)
        return x_T.new_zeros(num_rows, *x_T.shape[1:]).index_copy_(0, row_T, x_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_T,) = ctx.saved_tensors
        return grads[0].index_select(0, row_T), None, None


class _Unpad(torch.autograd.Function):
    """Inverse of _Pad."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        ctx.num_rows = x_R.shape[0]
        return x_R.index_select(0, row_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (row_T,) = ctx.saved_tensors
        (grad_T,) = grads
        return grad_T.new_zeros(ctx.num_rows, *grad_T.shape[1:]).index_copy_(0, row_T, grad_T.contiguous()), None
