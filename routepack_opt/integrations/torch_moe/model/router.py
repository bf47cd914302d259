"""Top-k router of one MoE layer; always in logical expert order, whatever the placement.

Shape suffixes: T tokens, D hidden, E experts, K top-k, N groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.model.config import MoEConfig


class Router(nn.Module):
    """Scores every expert, chooses K of them and weighs them.

    ``weight`` [E, D]; with sigmoid scores also the buffer ``selection_bias`` [E] (float32), which takes part in the
    choice and never in the weights (DeepSeek-V3, auxiliary-loss-free balancing).
    """

    selection_bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        """Weights are left uninitialised; the model draws them."""
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        bias = torch.zeros(config.num_experts, device=device) if config.router == "sigmoid" else None
        self.register_buffer("selection_bias", bias)

    def forward(self, x_TD: Tensor, forced_ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, K] and logical expert ids [T, K]; with forced ids the weights are recomputed at those."""
        scores_TE = self.scores(x_TD)
        ids_TK = self.choose(scores_TE) if forced_ids_TK is None else forced_ids_TK
        return self.weigh(scores_TE, ids_TK).to(x_TD.dtype), ids_TK

    def scores(self, x_TD: Tensor) -> Tensor:
        """Unbiased score of every expert in float32, [T, E]; differentiable."""
        if self.config.router == "softmax":
            return F.softmax(F.linear(x_TD, self.weight), dim=-1, dtype=torch.float32)
        return F.linear(x_TD.float(), self.weight.float()).sigmoid()

    @torch.no_grad()
    def choose(self, scores_TE: Tensor) -> Tensor:
        """The router's own choice, int64 [T, K]."""
        config = self.config
        if self.selection_bias is not None:
            scores_TE = scores_TE + self.selection_bias
        if config.num_groups > 1:
            scores_TNe = scores_TE.view(-1, config.num_groups, config.num_experts // config.num_groups)
            group_scores_TN = scores_TNe.topk(2, dim=-1).values.sum(dim=-1)
            best = group_scores_TN.topk(config.num_top_groups, dim=-1, sorted=False).indices
            closed_TN = torch.ones_like(group_scores_TN, dtype=torch.bool).scatter_(1, best, False)
            scores_TE = scores_TNe.masked_fill(closed_TN.unsqueeze(-1), -torch.inf).view_as(scores_TE)
        return scores_TE.topk(config.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weight of each chosen expert in float32, [T, K]; gradients reach every score at the chosen ids."""
        weights_TK = scores_TE.gather(1, ids_TK.long())
        if self.config.normalise_top_k:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)
            # sigmoid scores can all vanish at once (and forced ids need not be the best ones)
            weights_TK = weights_TK / (total_T1 + 1e-20)
        if self.config.routed_scale != 1.0:
            weights_TK = weights_TK * self.config.routed_scale
        return weights_TK
