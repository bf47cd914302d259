"""Gradients in flat float32 buffers: accumulated over the rows of a step, reduced over a group bucket by bucket.

A float32 parameter's ``.grad`` *is* its view of a buffer, so that autograd adds in place. A parameter of another type
gets its gradient added to the view after every backward pass, and its own ``.grad`` freed: sums over many rows keep
float32 precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_BUCKET_BYTES = 64 << 20  # large enough for full bandwidth, small enough that reductions start early


class GradientBuffers:
    """Main gradients of some parameters that share a reduction group.

    Parameters
    ----------
    parameters
        Names and parameters, in an order every rank shares.
    group
        Where gradients are summed; None for one process.
    bucket_bytes
        A bucket closes once it holds this many bytes; a parameter is never split.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        group: Any,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.buckets: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        self._allocate(bucket_bytes)
        self.zero_()

    def _allocate(self, bucket_bytes: int) -> None:
        waiting: list[tuple[str, torch.nn.Parameter]] = []
        size = 0
        for name, parameter in self._parameters.items():
            waiting.append((name, parameter))
            size += parameter.numel()
            if 4 * size >= bucket_bytes:
                self._close(waiting, size)
                waiting, size = [], 0
        if waiting:
            self._close(waiting, size)

    def _close(self, members: list[tuple[str, torch.nn.Parameter]], size: int) -> None:
        bucket = torch.zeros(size, dtype=torch.float32, device=members[0][1].device)
        start = 0
        for name, parameter in members:
            self.views[name] = bucket[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        self.buckets.append(bucket)

    def zero_(self) -> None:
        """Zero the buffers and take the parameters' gradients in hand, also where other buffers had them before."""
        for bucket in self.buckets:
            bucket.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = self.views[name] if parameter.dtype == torch.float32 else None
            if parameter.dtype != torch.float32:
                _AddTo.tie(parameter, self.views[name])

    def collect_(self) -> None:
        """Take in gradients that were put elsewhere, as ``model.zero_grad()`` before a backward pass causes."""
        for name, parameter in self._parameters.items():
            view = self.views[name]
            if parameter.grad is None or parameter.grad.data_ptr() == view.data_ptr():
                continue
            view.add_(parameter.grad)
            parameter.grad = view if parameter.dtype == torch.float32 else None

    def reduce_(self) -> None:
        """SUM over the group; every bucket travels at once."""
        self.collect_()
        if self._group is None or dist.get_world_size(self._group) == 1:
            return
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self.buckets]
        for work in works:
            work.wait()

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares, float64 scalar on the buffers' device (zero without buffers)."""
        norms = [torch.linalg.vector_norm(bucket).double() ** 2 for bucket in self.buckets]
        return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)

    def scale_(self, factor: torch.Tensor | float) -> None:
        """Multiply every gradient."""
        for bucket in self.buckets:
            bucket.mul_(factor)


class _AddTo:
    """Hook of a parameter that is not float32; a parameter has one at most, that of the buffers last zeroed."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    @classmethod
    def tie(cls, parameter: torch.Tensor, view: torch.Tensor) -> None:
        former = getattr(parameter, "_routepack_gradient", None)
        if former is not None:
            hook, handle = former
            if hook._view is view:
                return
            handle.remove()
        hook = cls(view)
        parameter._routepack_gradient = (hook, parameter.register_post_accumulate_grad_hook(hook))

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._view.add_(parameter.grad)
            parameter.grad = None
