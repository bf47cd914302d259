"""AdamW for a model whose experts are spread over EP ranks and copied over EDP shards.

Dense gradients are summed over DP, expert gradients over EDP. Losses are divided by the global token count before the
backward pass, so a SUM is the whole step's mean. Weights in bf16 keep float32 masters; a float32 weight is its own.

Names: H local slots, n parameters of one expert's matrix, G EDP shards, r = ceil(n / G).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.parallel.gradients import DEFAULT_BUCKET_BYTES, GradientBuffers
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal, all_reduce_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, eq=False)
class ParameterState:
    """Optimizer state of one parameter, as rows: [H, n] for experts (or [H, r], this shard's range), [1, n] for others.

    ``columns`` are the entries of each row updated here; state beyond them is padding.
    """

    weight_Hn: torch.Tensor
    grad_Hn: torch.Tensor
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    columns: slice
    weight_decay: float
    part: int = 0
    num_parts: int = 1


class MoEAdamW:
    """AdamW (decoupled weight decay), equal to ``torch.optim.AdamW`` of the whole model in one process.

    Parameters
    ----------
    model
        Has ``moe_blocks`` and ``is_expert_parameter(name)``.
    mesh
        Groups of the reductions.
    lr, betas, eps, weight_decay
        As in torch; ``lr`` and ``weight_decay`` default to torch's. ``optimizer.lr`` may change between steps.
    shard_expert_state
        Keep 1/G of every expert's master and moments in each EDP shard.
    decays
        Which parameters decay, by name; default all.
    bucket_bytes
        Size of the buffers that gradients are reduced in.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self,
        model: Any,
        mesh: ParallelMesh,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        shard_expert_state: bool = False,
        decays: Callable[[str], bool] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        _check_settings(lr, betas, eps, weight_decay)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.steps = 0
        self.mesh = mesh
        self.shard_expert_state = shard_expert_state and mesh.num_edp > 1
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        expert = [(name, p) for name, p in named if model.is_expert_parameter(name)]
        dense = [(name, p) for name, p in named if not model.is_expert_parameter(name)]
        self.dense_gradients = GradientBuffers(dense, mesh.dp_group, bucket_bytes=bucket_bytes)
        self.expert_gradients = GradientBuffers(expert, mesh.edp_group, bucket_bytes=bucket_bytes)
        views = self.dense_gradients.views | self.expert_gradients.views
        self._states: dict[str, ParameterState] = {}
        for name, parameter in named:
            rows = parameter.shape[0] if model.is_expert_parameter(name) else 1
            decay = weight_decay if decays is None or decays(name) else 0.0
            parts = mesh.num_edp if self.shard_expert_state and model.is_expert_parameter(name) else 1
            self._states[name] = _new_state(parameter, views[name], rows, decay, mesh.shard if parts > 1 else 0, parts)
        self._dense_names = [name for name, _ in dense]
        self._expert_names = {
            (layer, matrix): _name_of(expert, parameter)
            for layer, block in enumerate(model.moe_blocks)
            for matrix, parameter in block.experts.named_parameters()
            if parameter.requires_grad
        }

    def zero_grad(self) -> None:
        """Start a step."""
        self.dense_gradients.zero_()
        self.expert_gradients.zero_()

    def reduce_gradients(self) -> None:
        """Sum dense gradients over DP and expert gradients over EDP; once a step, after its last row."""
        self.dense_gradients.reduce_()
        self.expert_gradients.reduce_()

    def gradient_norm(self) -> float:
        """Norm of the whole model's reduced gradient, the same on every rank."""
        squares = self.expert_gradients.squared_norm().to(self.mesh.device) / self.mesh.num_edp
        # every expert is counted on each of its shards: one sum over all ranks, because sums inside the shards could
        # differ in their last bit, and the copies of a weight drift apart after clipping
        all_reduce_(squares, self.mesh.dp_group)
        return float((squares + self.dense_gradients.squared_norm().to(self.mesh.device)).sqrt())

    def clip_(self, max_norm: float | None) -> float:
        """Scale the reduced gradients to at most ``max_norm`` (None only measures); returns the norm before."""
        norm = self.gradient_norm()
        if max_norm is not None and norm > max_norm:
            for buffers in (self.dense_gradients, self.expert_gradients):
                buffers.scale_(max_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update masters and weights from the reduced gradients; gathers sharded experts' weights inside EDP."""
        self.steps += 1
        for state in self._states.values():
            self._update(state)
        if self.shard_expert_state:
            self._gather_expert_weights()

    def _update(self, state: ParameterState) -> None:
        width = state.columns.stop - state.columns.start
        weight, grad = state.weight_Hn[:, state.columns], state.grad_Hn[:, state.columns]
        target = weight if state.master is None else state.master[:, :width]
        exp_avg, exp_avg_sq = state.exp_avg[:, :width], state.exp_avg_sq[:, :width]
        beta1, beta2 = self.betas
        target.mul_(1 - self.lr * state.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = exp_avg_sq.sqrt().div_((1 - beta2**self.steps) ** 0.5).add_(self.eps)
        target.addcdiv_(exp_avg, denominator, value=-self.lr / (1 - beta1**self.steps))
        if state.master is not None:
            weight.copy_(target)

    def _gather_expert_weights(self) -> None:
        """Every EDP shard updated its range of each expert: put the ranges together in all of them."""
        for name in self._expert_names.values():
            state = self._states[name]
            num_slots, size = state.weight_Hn.shape
            part_size = state.exp_avg.shape[1]
            own = state.weight_Hn.new_zeros(num_slots, part_size)
            own[:, : state.columns.stop - state.columns.start] = state.weight_Hn[:, state.columns]
            gathered = all_gather_equal(own, self.mesh.edp_group)
            for shard, position in enumerate(self.mesh.edp_wire_order):
                if shard != self.mesh.shard:
                    columns = _columns(size, shard, state.num_parts)
                    state.weight_Hn[:, columns] = gathered[position][:, : columns.stop - columns.start]

    def expert_state(self, moe_layer: int, matrix: str) -> ParameterState | None:
        """State of one matrix of one MoE layer's experts; None where it is frozen (``requires_grad`` is off)."""
        name = self._expert_names.get((moe_layer, matrix))
        return None if name is None else self._states[name]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters from the weights, after weights were loaded from elsewhere."""
        for state in self._states.values():
            if state.master is not None:
                state.master.zero_()
                width = state.columns.stop - state.columns.start
                state.master[:, :width].copy_(state.weight_Hn[:, state.columns])

    def state_for_checkpoint(self) -> dict[str, torch.Tensor]:
        """Live float32 state of dense parameters, "<kind>.<parameter>" -> tensor of the parameter's number of entries.

        Expert state is in :func:`~routepack_opt.integrations.torch_moe.parallel.slot_tensors.expert_slot_tensors`;
        ``steps`` is an attribute.
        """
        result = {}
        for name in self._dense_names:
            state = self._states[name]
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                tensor = getattr(state, kind)
                if tensor is not None:
                    result[f"{kind}.{name}"] = tensor[0]
        return result

    @torch.no_grad()
    def load_state(self, steps: int, dense: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`state_for_checkpoint`; raises InvalidInput naming a missing or misshapen tensor."""
        for name, tensor in self.state_for_checkpoint().items():
            if name not in dense:
                raise InvalidInput(f"optimizer state: {name!r} is missing")
            if dense[name].numel() != tensor.numel():
                raise InvalidInput(f"optimizer state: {name!r} has {dense[name].numel()} entries, not {tensor.numel()}")
            tensor.copy_(dense[name].flatten())
        self.steps = int(steps)


def _new_state(
    parameter: torch.nn.Parameter, grad: torch.Tensor, rows: int, weight_decay: float, part: int, num_parts: int
) -> ParameterState:
    if not parameter.is_contiguous():
        raise InvalidInput(f"parameter of shape {tuple(parameter.shape)}: not contiguous; expected plain row order")
    weight_Hn = parameter.data.view(rows, -1)
    size = weight_Hn.shape[1]
    columns = _columns(size, part, num_parts)
    shape = (rows, -(-size // num_parts))
    master = None
    if parameter.dtype != torch.float32:
        master = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        master[:, : columns.stop - columns.start] = weight_Hn[:, columns]
    moments = [torch.zeros(shape, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    return ParameterState(
        weight_Hn, grad.view(rows, -1), master, moments[0], moments[1], columns, weight_decay, part, num_parts
    )


def _columns(size: int, part: int, num_parts: int) -> slice:
    """Range ``part`` of a row of ``size`` entries cut into equal ranges, without the padding."""
    part_size = -(-size // num_parts)
    start = min(part * part_size, size)
    return slice(start, min(start + part_size, size))


def _name_of(named: list[tuple[str, torch.nn.Parameter]], parameter: torch.nn.Parameter) -> str:
    return next(name for name, candidate in named if candidate is parameter)


def _check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise InvalidInput(f"{name}: {value!r} is not a number >= 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidInput(f"betas: {betas!r}; expected two numbers in [0, 1)")
