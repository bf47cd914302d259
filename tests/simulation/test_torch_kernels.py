"""Real kernels on the CPU: every kind runs, forward and backward, from the empty rank up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from step_time_cases import small_plan, small_shape, small_window

from routepack_opt.errors import InvalidInput
from routepack_opt.simulation.kernel_shape import Block, KernelShape
from routepack_opt.simulation.layouts import plan_layout
from routepack_opt.simulation.replay import replay
from routepack_opt.simulation.work import AttentionKernel, ExpertKernel

torch = pytest.importorskip("torch")

from routepack_opt.simulation.torch_kernels import TorchTimer, device_name  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = (
    Block("full", "full", 1, 2, 1, 8, 8, 32),
    Block("full-2", "full", 1, 2, 2, 12, 8, 20, dense_width=16),
    Block("sliding", "sliding", 1, 2, 2, 8, 8, 48, window=4),
    Block("linear", "linear", 1, projection_width=40, dense_width=16),
)
SHAPE = KernelShape("all kinds", 16, 16, BLOCKS, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of several test runs on few cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backward", [True, False])
def test_every_kind_of_kernel_runs(backward: bool) -> None:
    timer = TorchTimer(SHAPE, backward=backward)
    for block in range(len(BLOCKS)):
        assert timer.time_s(AttentionKernel(block, (1, 5, 9))) > 0
    for counts in ((3, 0, 5, 1), (0, 0, 0, 0), (7, 2)):
        assert timer.time_s(ExpertKernel(counts)) > 0


def test_backward_reaches_weights() -> None:
    timer = TorchTimer(SHAPE)
    timer.time_s(ExpertKernel((3, 0)))
    module = timer._experts[2].module
    assert module.gate_up.grad is not None and float(module.gate_up.grad[0].abs().sum()) > 0
    assert float(module.gate_up.grad[1].abs().sum()) == 0
    timer.time_s(AttentionKernel(0, (4,)))
    assert timer._blocks[0].w_in.grad is not None and timer._blocks[0].w_out.grad is not None


def test_replay_on_this_machine() -> None:
    window = small_window()
    layout = plan_layout(small_plan(window), window, "plan")
    result = replay(window, [layout], small_shape(), TorchTimer(small_shape()), repeats=1)
    (step,) = result.step_times
    assert (step.attention_s > 0).all() and (step.experts_s > 0).all()
    assert step.step_s >= step.costs_s.sum(axis=0).max() * (1 - 1e-12)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99", ""])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="device"):
        TorchTimer(SHAPE, device=name)


def test_the_device_has_a_name() -> None:
    assert "CPU" in device_name(TorchTimer(SHAPE).device)


@pytest.mark.gpu
def test_every_kind_of_kernel_runs_on_a_gpu() -> None:
    wide = tuple(
        Block(b.name, b.kind, 1, b.num_heads, b.num_kv_heads, 8 * b.qk_dim, 8 * b.v_dim, 64, b.window, b.dense_width)
        for b in BLOCKS
    )
    timer = TorchTimer(KernelShape("wide", 64, 64, wide, 4), device="cuda")
    for block in range(len(wide)):
        assert timer.time_s(AttentionKernel(block, (1, 5, 90))) > 0
    for counts in ((30, 0, 5, 16), (0, 0, 0, 0)):
        assert timer.time_s(ExpertKernel(counts)) > 0
