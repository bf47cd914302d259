"""Names of the logical tensors: one per dense parameter, three matrices per routed expert, whatever the placement.

They are Qwen3-MoE's names on the hub, which checkpoints use too; other families' names are translated to them and back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from routepack_opt.integrations.torch_moe.huggingface.config import Family
    from routepack_opt.integrations.torch_moe.model.decoder import MoETransformer

Matrix = Literal["gate_proj", "up_proj", "down_proj"]
MATRICES: tuple[Matrix, ...] = ("gate_proj", "up_proj", "down_proj")
_TO_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FROM_MIXTRAL = {new: old for old, new in _TO_MIXTRAL.items()}
_EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts\.\d+\.)(\w+)\.weight$")


class ExpertName(NamedTuple):
    """Where one expert's matrix lies in a file."""

    layer: int
    expert: int
    matrix: Matrix

    def __str__(self) -> str:
        """The logical name."""
        return f"model.layers.{self.layer}.mlp.experts.{self.expert}.{self.matrix}.weight"

    def shape(self, model: MoETransformer) -> tuple[int, int]:
        """Rows and columns."""
        size, hidden = model.config.expert_size, model.config.hidden_size
        return (hidden, size) if self.matrix == "down_proj" else (size, hidden)


def dense_tensors(model: MoETransformer) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor) of everything every rank holds whole, buffers of the routers included."""
    for name, parameter in model.named_parameters():
        if not model.is_expert_parameter(name):
            yield name, parameter
    for block, layer in zip(model.moe_blocks, model.config.moe_layers, strict=True):
        if block.router.selection_bias is not None:
            yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", block.router.selection_bias


def to_logical(name: str) -> str:
    """Logical name of a tensor as any supported family spells it (fused names stay as they are)."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    match = _EXPERT.match(name)
    if match and match[2] in _FROM_MIXTRAL:
        return f"{match[1]}{_FROM_MIXTRAL[match[2]]}.weight"
    return name


def to_family(name: str, family: Family) -> str:
    """The hub's spelling of a logical name in one family."""
    if family != "mixtral":
        return name
    match = _EXPERT.match(name)
    if match:
        name = f"{match[1]}{_TO_MIXTRAL[match[2]]}.weight"
    return name.replace(".mlp.", ".block_sparse_moe.")


def fused_names(layer: int) -> tuple[str, str]:
    """Names of all experts of a layer as transformers 5 holds them: gate and up [E, 2I, D], down [E, D, I]."""
    prefix = f"model.layers.{layer}.mlp.experts."
    return prefix + "gate_up_proj", prefix + "down_proj"
