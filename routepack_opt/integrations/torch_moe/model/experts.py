"""SwiGLU experts of one MoE layer held in local slots.

Shape suffixes: N rows (one per token and chosen expert, sorted by slot), H local slots, D hidden, I expert
intermediate, C rows of the fullest slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

# One more slot in the loop costs as much as this many padded rows x D x I (measured on CPUs).
_SLOT_COST = 16_000
_FEW_ROWS = 64  # rows per slot up to which calls, not products, are what takes time


class ExpertSlots(nn.Module):
    """The experts this rank holds; which logical expert sits in a slot is the slot map's business.

    Parameters ``gate_up`` [H, 2I, D] (gate rows first) and ``down`` [H, D, I]: dimension 0 is the local slot, so
    moving an expert is copying one row of each.
    """

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        expert_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Weights are left uninitialised; the model draws them per logical expert."""
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_slots, 2 * expert_size, hidden_size, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(num_slots, hidden_size, expert_size, dtype=dtype, device=device))

    def forward(self, x_ND: Tensor, counts_H: Tensor | Sequence[int]) -> Tensor:
        """Output of each row's expert, [N, D].

        Parameters
        ----------
        x_ND
            Rows sorted by slot: the first ``counts_H[0]`` belong to slot 0, and so on.
        counts_H
            Rows of each slot, integers, summing to N.
        """
        if x_ND.shape[0] and has_grouped_mm(x_ND, self.down.shape[2]):
            return self._grouped(x_ND, torch.as_tensor(counts_H, device=x_ND.device))
        counts = counts_H.tolist() if isinstance(counts_H, Tensor) else list(counts_H)
        padding = len(counts) * max(counts) - x_ND.shape[0]
        few = 0 < x_ND.shape[0] <= _FEW_ROWS * len(counts)
        if few and padding * x_ND.shape[1] * self.down.shape[2] < _SLOT_COST * len(counts):
            return self._padded(x_ND, counts)
        return self._loop(x_ND, counts)

    def _grouped(self, x_ND: Tensor, counts_H: Tensor) -> Tensor:
        ends_H = torch.cumsum(counts_H, 0).to(torch.int32)
        gate_up_N2I = torch._grouped_mm(x_ND, self.gate_up.transpose(1, 2), offs=ends_H)
        gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
        y_ND = torch._grouped_mm(F.silu(gate_NI) * up_NI, self.down.transpose(1, 2), offs=ends_H)
        if y_ND.requires_grad:
            y_ND.register_hook(torch.Tensor.contiguous)  # its backward refuses expanded gradients, as sum() sends
        return y_ND

    def _padded(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        """Few rows (decoding): all slots in one batched product."""
        fullest = max(counts)
        index_N = torch.tensor([slot * fullest + row for slot, count in enumerate(counts) for row in range(count)])
        index_N = index_N.to(x_ND.device)
        x_HCD = x_ND.new_zeros(len(counts) * fullest, x_ND.shape[1]).index_copy(0, index_N, x_ND)
        gate_up_HC2I = torch.bmm(x_HCD.view(len(counts), fullest, -1), self.gate_up.transpose(1, 2))
        gate_HCI, up_HCI = gate_up_HC2I.chunk(2, dim=-1)
        y_HCD = torch.bmm(F.silu(gate_HCI) * up_HCI, self.down.transpose(1, 2))
        return y_HCD.flatten(0, 1).index_select(0, index_N)

    def _loop(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        # unbind, not indexing: its backward writes one gradient for all slots, an index writes one of full size each.
        parts = []
        for x_nD, gate_up_2ID, down_DI in zip(
            x_ND.split(counts), self.gate_up.unbind(), self.down.unbind(), strict=True
        ):
            if x_nD.shape[0]:
                gate_nI, up_nI = F.linear(x_nD, gate_up_2ID).chunk(2, dim=-1)
                parts.append(F.linear(F.silu(gate_nI) * up_nI, down_DI))
        if parts:
            return torch.cat(parts)
        # No row anywhere: input and weights stay in the graph, so that gradients are zero and not None, and the
        # all-to-all before takes part in the backward pass as it does on the other ranks.
        return x_ND + 0.0 * (self.gate_up[:0].sum() + self.down[:0].sum()).to(x_ND.dtype)


def has_grouped_mm(x_ND: Tensor, expert_size: int) -> bool:
    """Whether ``torch._grouped_mm`` runs this input: bf16 on a GPU of compute capability 9 or more, sizes aligned."""
    return (
        x_ND.is_cuda
        and x_ND.dtype == torch.bfloat16
        and x_ND.shape[1] % 8 == 0  # rows must begin at multiples of 16 bytes
        and expert_size % 8 == 0
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x_ND.device)[0] >= 9
    )
