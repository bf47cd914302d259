"""Expert slots: every way to multiply equals a dense einsum, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from routepack_opt.integrations.torch_moe.model import experts as experts_module  # noqa: E402
from routepack_opt.integrations.torch_moe.model.experts import ExpertSlots  # noqa: E402

COUNTS = {
    "even": [5, 5, 5, 5],
    "skewed": [40, 0, 1, 0],
    "last_only": [0, 0, 0, 3],
    "none": [0, 0, 0, 0],
}


def make(hidden=12, size=10, slots=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    experts = ExpertSlots(slots, hidden, size)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return experts, generator


def reference(x, counts, gate_up, down):
    """Every expert on every row, the right one picked: SwiGLU in float64."""
    slot = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    gate, up = torch.einsum("nd,hid->nhi", x, gate_up).chunk(2, dim=-1)
    y = torch.einsum("nhi,hdi->nhd", gate * torch.sigmoid(gate) * up, down)
    return y[torch.arange(len(x)), slot]


@pytest.mark.parametrize("way", ["loop", "padded"])
@pytest.mark.parametrize("case", COUNTS)
def test_equals_a_dense_einsum(way, case, monkeypatch):
    monkeypatch.setattr(experts_module, "_SLOT_COST", 0 if way == "loop" else 10**9)
    counts = COUNTS[case]
    experts, generator = make()
    x = torch.randn(sum(counts), 12, generator=generator).requires_grad_()
    weight = torch.randn(sum(counts), 12, generator=generator)
    y = experts(x, torch.tensor(counts))
    (y * weight).sum().backward()

    copies = [t.detach().double().requires_grad_() for t in (x, experts.gate_up, experts.down)]
    expected = reference(copies[0], counts, copies[1], copies[2])
    (expected * weight).sum().backward()
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)
    for mine, other in zip((x, experts.gate_up, experts.down), copies, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("way", ["loop", "padded"])
def test_an_expert_without_rows_gets_a_zero_gradient(way, monkeypatch):
    monkeypatch.setattr(experts_module, "_SLOT_COST", 0 if way == "loop" else 10**9)
    experts, _ = make()
    experts(torch.ones(3, 12), [1, 0, 2, 0]).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad[[1, 3]].abs().max() == 0 and parameter.grad[[0, 2]].abs().amin(dim=(1, 2)).min() >= 0
        assert parameter.grad[0].abs().max() > 0


@pytest.mark.parametrize("case", ["even", "skewed", "last_only"])
@pytest.mark.parametrize("expanded", [True, False])
def test_grouped_products_equal_the_loop(case, expanded):
    """On CPUs torch runs a slow stand-in of ``_grouped_mm``: same arguments, same checks of strides."""
    experts, generator = make(hidden=16, size=8)
    counts = COUNTS[case]
    x = torch.randn(sum(counts), 16, generator=generator).requires_grad_()
    try:
        torch._grouped_mm(
            x.detach(), experts.gate_up.detach().transpose(1, 2), offs=torch.tensor(counts).cumsum(0).int()
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        pytest.skip("this torch has no grouped product on CPUs")
    found = []
    for y in (experts._grouped(x, torch.tensor(counts)), experts._loop(x, counts)):
        loss = y.sum() if expanded else y.pow(2).sum()  # sum() sends back one value with strides of 0
        found.append([y, *torch.autograd.grad(loss, [x, *experts.parameters()])])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
def test_grouped_product_equals_the_loop_on_a_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU of compute capability 9")
    experts, generator = make(hidden=64, size=32)
    experts = experts.to("cuda", torch.bfloat16)
    x = torch.randn(50, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    counts = torch.tensor([20, 0, 29, 1], device="cuda")
    y = experts(x, counts)
    y.float().pow(2).sum().backward()
    grads = [x.grad.clone()] + [p.grad.clone() for p in experts.parameters()]
    x.grad = None
    experts.zero_grad()
    other = experts._loop(x, counts.tolist())
    other.float().pow(2).sum().backward()
    torch.testing.assert_close(y, other, atol=2.0, rtol=2e-2)
    for mine, theirs in zip(grads, [x.grad] + [p.grad for p in experts.parameters()], strict=True):
        scale = theirs.float().abs().max()
        assert (mine.float() - theirs.float()).abs().max() < 0.03 * scale
