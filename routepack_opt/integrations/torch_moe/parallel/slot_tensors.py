"""Everything that belongs to an expert: the tensors that travel when it moves.

Movement, checkpoints and tests work on this one list, so that nothing an expert owns can be forgotten in one of them.

Names: H local slots, G EDP shards, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW

KINDS = ("weight", "master", "exp_avg", "exp_avg_sq", "buffer")


@dataclass(frozen=True, eq=False)
class SlotTensor:
    """One tensor whose dimension 0 is the local slots.

    Attributes
    ----------
    name
        "<MoE layer>.<matrix>.<kind>", the same on every rank; ``kind`` is one of ``KINDS``.
    moe_layer
        Position among MoE layers.
    tensor
        [H, ...], the live storage: writing row h changes the expert in slot h.
    matrix, kind
        The parts of ``name``.
    row_shape
        Shape of one expert's entry when whole (the weight's shape without dimension 0).
    part, num_parts
        With optimizer state sharded inside EDP groups, row h holds range ``part`` of ``num_parts`` equal ranges of the
        expert's flat state, the last one padded. Range k lives in EDP shard k, so an expert's ranges travel inside that
        shard and are never cut again.
    """

    name: str
    moe_layer: int
    tensor: torch.Tensor
    matrix: str
    kind: str
    row_shape: tuple[int, ...]
    part: int = 0
    num_parts: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot."""
        return int(self.tensor[0].numel()) * int(self.tensor.element_size())


def expert_slot_tensors(model: Any, optimizer: MoEAdamW | None = None) -> list[SlotTensor]:
    """Weights, buffers and, with an optimizer, masters and moments of every expert, by layer.

    Parameters
    ----------
    model
        Has ``moe_blocks``; each block's ``experts`` holds parameters and buffers [H, ...].
    optimizer
        Whose state goes along; None while there is none.
    """
    result = []
    for layer, block in enumerate(model.moe_blocks):
        for matrix, parameter in block.experts.named_parameters():
            shape = tuple(parameter.shape[1:])
            result.append(SlotTensor(f"{layer}.{matrix}.weight", layer, parameter.data, matrix, "weight", shape))
            if optimizer is None:
                continue
            state = optimizer.expert_state(layer, matrix)
            if state is None:  # frozen: it travels without state
                continue
            for kind, tensor in (
                ("master", state.master),
                ("exp_avg", state.exp_avg),
                ("exp_avg_sq", state.exp_avg_sq),
            ):
                if tensor is not None:
                    name = f"{layer}.{matrix}.{kind}"
                    result.append(SlotTensor(name, layer, tensor, matrix, kind, shape, state.part, state.num_parts))
        num_slots = next(iter(block.experts.parameters())).shape[0]
        for matrix, buffer in block.experts.named_buffers():
            if buffer.ndim and buffer.shape[0] == num_slots:
                shape = tuple(buffer.shape[1:])
                result.append(SlotTensor(f"{layer}.{matrix}.buffer", layer, buffer, matrix, "buffer", shape))
    return result
