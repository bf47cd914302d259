"""One MoE layer: router (logical ids), route tape, dispatch to the experts' slots, optional shared expert.

Shape suffixes: T tokens, D hidden, I intermediate, K top-k, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routepack_opt.integrations.torch_moe.model.experts import ExpertSlots
from routepack_opt.integrations.torch_moe.model.router import Router

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.model.config import MoEConfig
    from routepack_opt.integrations.torch_moe.parallel.dispatch import Dispatcher
    from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape


class SwiGLU(nn.Module):
    """Dense gated block of a layer without experts, or the shared expert of one with."""

    def __init__(self, hidden_size: int, inner_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Weights are left uninitialised; the model draws them."""
        super().__init__()
        self.gate_proj = nn.utils.skip_init(nn.Linear, hidden_size, inner_size, bias=False, dtype=dtype, device=device)
        self.up_proj = nn.utils.skip_init(nn.Linear, hidden_size, inner_size, bias=False, dtype=dtype, device=device)
        self.down_proj = nn.utils.skip_init(nn.Linear, inner_size, hidden_size, bias=False, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class MoEBlock(nn.Module):
    """Routed experts in local slots plus what every token shares.

    The placement enters after top-k only (in the dispatcher), so the router and its groups never see it.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        moe_layer: int,
        dispatcher: Dispatcher,
        num_local_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``moe_layer`` counts MoE layers only."""
        super().__init__()
        self.moe_layer = moe_layer
        self.dispatcher = dispatcher
        self.gate = Router(config, dtype=dtype, device=device)
        self.experts = ExpertSlots(num_local_slots, config.hidden_size, config.expert_size, dtype=dtype, device=device)
        self.shared_experts: SwiGLU | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if config.shared_size:
            self.shared_experts = SwiGLU(config.hidden_size, config.shared_size, dtype=dtype, device=device)
            if config.shared_gate:
                self.shared_expert_gate = nn.utils.skip_init(
                    nn.Linear, config.hidden_size, 1, bias=False, dtype=dtype, device=device
                )

    @property
    def router(self) -> Router:
        """The layer's router (``gate`` in Hugging Face names)."""
        return self.gate

    def forward(self, x_TD: Tensor, tape: RouteTape) -> Tensor:
        """[T, D] -> [T, D]; the tape records the routes or replaces the router's choice."""
        scores_TE = self.gate.scores(x_TD)
        ids_TK = tape.choose(self.moe_layer, self.gate.choose(scores_TE))
        weights_TK = self.gate.weigh(scores_TE, ids_TK).to(x_TD.dtype)
        y_TD = self.dispatcher(x_TD, ids_TK, weights_TK, self.experts, self.moe_layer)
        if self.shared_experts is not None:
            shared_TD = self.shared_experts(x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = shared_TD * torch.sigmoid(self.shared_expert_gate(x_TD))
            y_TD = y_TD + shared_TD
        return y_TD
