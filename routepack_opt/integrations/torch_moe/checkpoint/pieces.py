"""Which ranges of which logical tensors this rank holds: one list that both writes and reads a checkpoint.

A logical tensor is a parameter or its state under a Hugging Face name, one per logical expert
(``model.layers.3.mlp.experts.17.up_proj.weight``; state: ``exp_avg.`` + that name). A *piece* is a range of its
entries in row-major order: a whole tensor, one of the matrices packed into a slot, or the part of an expert's
optimizer state that this EDP shard keeps. Placement, EP size and EDP size decide who holds which piece, and nothing
else: a checkpoint written under one of them is read under any other.

Shape suffixes: H local slots, I expert intermediate, D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.integrations.torch_moe.parallel.slot_tensors import SlotTensor, expert_slot_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Piece:
    """Entries [start, stop) of a logical tensor, as they lie on this rank.

    Attributes
    ----------
    name, shape
        Of the logical tensor.
    entries
        The live storage: contiguous, stop - start entries.
    writer
        The DP rank that stores it; all who hold it hold the same.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    entries: torch.Tensor
    writer: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.start == 0 and self.stop == math.prod(self.shape)

    @property
    def key(self) -> str:
        """Name in a file: the tensor's, with the first entry's number where it is a part."""
        return self.name if self.is_whole else f"{self.name}@{self.start}"


def local_pieces(model: Any, optimizer: Any | None, mesh: ParallelMesh, experts_of_slot: Any) -> list[Piece]:
    """Every piece this rank holds.

    Parameters
    ----------
    optimizer
        Whose state goes along; None: weights only.
    experts_of_slot
        int [L, E], the logical expert in each slot (``slot_to_logical``).
    """
    return [*_dense_pieces(model, optimizer, mesh), *_expert_pieces(model, optimizer, mesh, experts_of_slot)]


def dense_tensors(model: Any, optimizer: Any | None) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Logical name -> (shape, live tensor) of all that every rank holds alike."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.experts." not in name}
    result = {name: (tuple(tensor.shape), tensor.detach()) for name, tensor in weights.items()}
    for name, tensor in (optimizer.state_for_checkpoint() if optimizer is not None else {}).items():
        result[name] = (tuple(weights[name.partition(".")[2]].shape), tensor)
    return result


def _dense_pieces(model: Any, optimizer: Any | None, mesh: ParallelMesh) -> Iterator[Piece]:
    """Spread over all ranks by bytes, so that none writes the dense part alone."""
    loads = [0] * mesh.num_ranks
    tensors = dense_tensors(model, optimizer)
    for name, (shape, tensor) in sorted(tensors.items(), key=lambda item: (-item[1][1].nbytes, item[0])):
        writer = loads.index(min(loads))
        loads[writer] += tensor.nbytes
        yield Piece(name, shape, 0, tensor.numel(), tensor, writer)


def _expert_pieces(model: Any, optimizer: Any | None, mesh: ParallelMesh, experts_of_slot: Any) -> Iterator[Piece]:
    for slot_tensor in expert_slot_tensors(model, optimizer):
        num_slots = slot_tensor.tensor.shape[0]
        size = math.prod(slot_tensor.row_shape)
        part_size = -(-size // slot_tensor.num_parts)
        low = min(slot_tensor.part * part_size, size)
        high = min(low + part_size, size)
        for slot in range(num_slots):
            expert = int(experts_of_slot[slot_tensor.moe_layer][mesh.ep_rank * num_slots + slot])
            row = slot_tensor.tensor[slot].reshape(-1)
            shard = slot_tensor.part if slot_tensor.num_parts > 1 else slot % mesh.num_edp
            writer = mesh.edp_members[shard]
            for name, shape, offset in _matrices(slot_tensor, model.config):
                start, stop = max(low, offset), min(high, offset + math.prod(shape))
                if start < stop:
                    entries = row[start - low : stop - low]
                    full_name = expert_name(model.config, slot_tensor, expert, name)
                    yield Piece(full_name, shape, start - offset, stop - offset, entries, writer)


def _matrices(slot_tensor: SlotTensor, config: Any) -> Sequence[tuple[str, tuple[int, ...], int]]:
    """The logical tensors packed into one slot: name, shape, first entry."""
    if slot_tensor.matrix == "gate_up":
        shape = (config.expert_size, config.hidden_size)
        return ("gate_proj.weight", shape, 0), ("up_proj.weight", shape, math.prod(shape))
    name = "down_proj.weight" if slot_tensor.matrix == "down" else slot_tensor.matrix
    return ((name, slot_tensor.row_shape, 0),)


def expert_name(config: Any, slot_tensor: SlotTensor, expert: int, matrix: str) -> str:
    """Logical name of an expert's matrix or its state."""
    layer = config.moe_layers[slot_tensor.moe_layer]
    name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"
    return f"{slot_tensor.kind}.{name}" if slot_tensor.kind in STATE_KINDS else name


def logical_names(model: Any, optimizer: Any | None) -> set[str]:
    """Names of all logical tensors of the job, whoever holds them."""
    names = set(dense_tensors(model, optimizer))
    for slot_tensor in expert_slot_tensors(model, optimizer):
        for matrix, _, _ in _matrices(slot_tensor, model.config):
            for expert in range(model.config.num_experts):
                names.add(expert_name(model.config, slot_tensor, expert, matrix))
    return names
