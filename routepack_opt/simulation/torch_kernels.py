"""The trainer's kernels on one device: experts as grouped GEMM, packed causal attention with its projections.

Shape suffixes: T tokens of a cell, N assignments of a rank, D hidden, H heads, K key/value heads, I intermediate.
"""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.model.experts import ExpertSlots
from routepack_opt.integrations.torch_moe.model.packed_attention import PackedRows, packed_attention
from routepack_opt.simulation.work import ExpertKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from routepack_opt.simulation.kernel_shape import Block, KernelShape
    from routepack_opt.simulation.work import AttentionKernel, Kernel

_SPIN_CYCLES = 2_000_000  # about a millisecond: the device waits while the host queues the kernels to time


class TorchTimer:
    """Times kernels of one shape on one device.

    Parameters
    ----------
    shape
        Tensor sizes.
    device
        "cpu", "cuda" or "cuda:N".
    dtype
        Of weights and activations; None takes bfloat16 on a GPU, float32 on a CPU.
    backward
        Whether each run is forward and backward, or forward alone.
    seed
        Of weights and activations.

    Raises
    ------
    InvalidInput
        A device that is not there.
    """

    def __init__(
        self,
        shape: KernelShape,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        backward: bool = True,
        seed: int = 0,
    ) -> None:
        """Weights are made here; activations when a kernel first needs more of them."""
        self.device = _device(device)
        self.shape, self.backward = shape, backward
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self._generator = torch.Generator(device=self.device).manual_seed(seed)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self.packed: dict[AttentionKernel, PackedRows] = {}
        self._blocks = [_BlockRunner(block, self) for block in shape.blocks]
        self._experts: dict[int, _ExpertRunner] = {}

    def time_s(self, kernel: Kernel) -> float:
        """Seconds of one run.

        CUDA events on a GPU. On a CPU with one thread that thread's own CPU time, so that other programs are not
        counted; with more threads the wall clock.
        """
        run = self._runner(kernel)
        if self.device.type != "cuda":
            clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            start = clock()
            run()
            return clock() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0

    def _runner(self, kernel: Kernel) -> Callable[[], None]:
        """Inputs are made before the clock starts."""
        if isinstance(kernel, ExpertKernel):
            num_slots = len(kernel.counts)
            if num_slots not in self._experts:
                self._experts[num_slots] = _ExpertRunner(self.shape, num_slots, self)
            return self._experts[num_slots].runner(kernel)
        return self._blocks[kernel.block].runner(kernel)

    def weight(self, *sizes: int) -> Tensor:
        """A leaf of small random numbers."""
        values = torch.randn(*sizes, generator=self._generator, device=self.device, dtype=torch.float32)
        return (values * sizes[-1] ** -0.5).to(self.dtype).requires_grad_(self.backward)

    def rows(self, name: str, count: int, *tail: int) -> Tensor:
        """``count`` rows of a buffer that grows to the largest request; a fresh leaf for each run."""
        key = (name, int(torch.Size(tail).numel()))
        held = self._buffers.get(key)
        if held is None or held.shape[0] < count:
            values = torch.randn(count, key[1], generator=self._generator, device=self.device, dtype=torch.float32)
            held = self._buffers[key] = values.to(self.dtype)
        return held[:count].view(count, *tail).detach().requires_grad_(self.backward)

    def finish(self, outputs: list[Tensor]) -> None:
        """The backward pass, with an all-ones gradient of each output that has rows."""
        if self.backward:
            outputs = [y for y in outputs if y.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


class _BlockRunner:
    """One decoder layer without its routed experts: projections, attention, shared experts or dense network."""

    def __init__(self, block: Block, timer: TorchTimer) -> None:
        self.block, self.timer = block, timer
        hidden = timer.shape.hidden
        heads_out = block.num_heads * block.v_dim
        if block.kind == "linear":  # in and out, half the columns each
            half = max(1, block.projection_width // 2)
            self.w_in, self.w_out = timer.weight(half, hidden), timer.weight(hidden, half)
        else:
            self.w_in = timer.weight(block.projection_width, hidden)
            self.w_out = timer.weight(hidden, heads_out)
        if block.dense_width:
            self.w_gate_up = timer.weight(2 * block.dense_width, hidden)
            self.w_down = timer.weight(hidden, block.dense_width)

    def runner(self, kernel: AttentionKernel) -> Callable[[], None]:
        timer, num_tokens = self.timer, kernel.tokens
        x_TD = timer.rows("x", num_tokens, timer.shape.hidden)
        mix = None if self.block.kind == "linear" else self._mixer(kernel)

        def run() -> None:
            projected = functional.linear(x_TD, self.w_in)
            if mix is None:
                outputs = [functional.linear(projected, self.w_out)]
            else:  # heads read buffers of their own, since latent attention projects in more steps than one
                outputs = [projected, functional.linear(mix(), self.w_out)]
            if self.block.dense_width:
                gate, up = functional.linear(x_TD, self.w_gate_up).chunk(2, dim=-1)
                outputs.append(functional.linear(functional.silu(gate) * up, self.w_down))
            timer.finish(outputs)

        return run

    def _mixer(self, kernel: AttentionKernel) -> Callable[[], Tensor]:
        """The trainer's own packed attention; values narrower than keys are padded, as trainers do."""
        block, timer, num_tokens = self.block, self.timer, kernel.tokens
        q_THd = timer.rows("q", num_tokens, block.num_heads, block.qk_dim)
        k_TKd = timer.rows("k", num_tokens, block.num_kv_heads, block.qk_dim)
        v_TKd = timer.rows("v", num_tokens, block.num_kv_heads, block.qk_dim)
        if kernel not in timer.packed:  # kept: masks and batches are made once a forward, not once a layer
            borders = torch.tensor([0, *kernel.lengths], device=timer.device).cumsum(0).to(torch.int32)
            timer.packed[kernel] = PackedRows(borders, num_tokens)
        rows = timer.packed[kernel]
        return lambda: packed_attention(q_THd, k_TKd, v_TKd, rows, block.window or None)[..., : block.v_dim].flatten(1)


class _ExpertRunner:
    """The trainer's own expert module."""

    def __init__(self, shape: KernelShape, num_slots: int, timer: TorchTimer) -> None:
        self.timer, self.hidden = timer, shape.hidden
        self.module: Any = ExpertSlots(
            num_slots, shape.hidden, shape.expert_width, dtype=timer.dtype, device=timer.device
        )
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_(std=shape.hidden**-0.5, generator=timer._generator)
                parameter.requires_grad_(timer.backward)

    def runner(self, kernel: ExpertKernel) -> Callable[[], None]:
        timer = self.timer
        x_ND = timer.rows("x", kernel.tokens, self.hidden)
        # the loop wants a list, the grouped kernel wants the counts where it runs
        counts: Any = list(kernel.counts)
        if timer.device.type == "cuda":
            counts = torch.tensor(counts, device=timer.device)

        def run() -> None:
            timer.finish([self.module(x_ND, counts)])

        return run


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    known = name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit())
    if not known:
        raise InvalidInput(f"device: {name!r} is unknown; expected cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(name[5:] or 0):
        raise InvalidInput(f"device: {name!r} is not there; this machine has {count} CUDA devices")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What a table should call it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, " + ("1 thread (its CPU time)" if threads == 1 else f"{threads} threads")
