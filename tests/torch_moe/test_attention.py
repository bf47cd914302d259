"""Packed attention: equal to each sequence alone, on every back-end that runs here."""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from routepack_opt.errors import InvalidInput  # noqa: E402
from routepack_opt.integrations.torch_moe.model import packed_attention as pa  # noqa: E402
from routepack_opt.integrations.torch_moe.model.attention import RotaryTable, rotate  # noqa: E402


def borders_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def reference(q, k, v, lengths, window):
    """Dense scores with a mask written out, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(len(q))
    distance = index[:, None] - index[None]
    sees = (sequence[:, None] == sequence[None]) & (distance >= 0)
    if window is not None:
        sees &= distance < window
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("nqk,knh->qnh", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def tensors(lengths, heads=4, kv_heads=2, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads,), (kv_heads,), (kv_heads,))
    return [torch.randn(sum(lengths), *n, head_dim, generator=generator).requires_grad_() for n in sizes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["batched", "flex"])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_forward_and_backward_equal_a_dense_mask(backend, window, kv_heads):
    lengths = [7, 1, 30, 2, 8, 7]
    q, k, v = tensors(lengths, kv_heads=kv_heads)
    if backend == "flex":  # on CPUs it has no backward pass
        q, k, v = q.detach(), k.detach(), v.detach()
    rows = pa.PackedRows(borders_of(lengths), sum(lengths), backend=backend)
    y = pa.packed_attention(q, k, v, rows, window)
    expected = reference(q, k, v, lengths, window)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=2e-6)
    if backend == "flex":
        return
    weight = torch.randn_like(y)
    ours = torch.autograd.grad((y * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=12), window=st.sampled_from([None, 3]), heads=st.sampled_from([2, 64])
)
def test_any_row_equals_its_sequences_alone(lengths, window, heads):
    q, k, v = tensors(lengths, heads=heads, kv_heads=2)
    y = pa.packed_attention(q, k, v, pa.PackedRows(borders_of(lengths), sum(lengths)), window)
    parts = [x.split(lengths) if lengths else [] for x in (y, q, k, v)]
    for alone, *inputs in zip(*parts, strict=True):
        row = pa.PackedRows(borders_of([len(alone)]), len(alone))
        torch.testing.assert_close(alone, pa.packed_attention(*inputs, row, window), atol=2e-6, rtol=2e-6)


def test_short_sequences_share_calls_and_long_ones_do_not():
    assert pa.PackedRows(borders_of([9, 8, 9, 0, 7]), 33).batches(64).shapes == [(4, 9)]
    rows = pa.PackedRows(borders_of([500, 100, 300]), 900)
    assert rows.batches(64).alone and rows.batches(64).num_rows == 900


def test_a_token_of_another_sequence_never_matters():
    lengths = [5, 6, 4]
    q, k, v = tensors(lengths)
    rows = pa.PackedRows(borders_of(lengths), 15)
    before = pa.packed_attention(q, k, v, rows, None)
    poisoned = v.detach().clone()
    poisoned[5:11] = 1e6
    after = pa.packed_attention(q, k, poisoned, rows, None)
    assert torch.equal(before[:5], after[:5]) and torch.equal(before[11:], after[11:])
    assert not torch.equal(before[5:11], after[5:11])


@pytest.mark.parametrize("borders", [[0, 4], [1, 5], [0, 6, 5], []])
def test_borders_that_do_not_cover_the_tokens_are_refused(borders):
    with pytest.raises(InvalidInput, match="cu_seqlens"):
        pa.PackedRows(torch.tensor(borders, dtype=torch.int32), 5)


def _varlen_stand_in(q, k, v, window):
    """What both variable-length kernels promise, from borders: used to check that we call them right."""

    def kernel(borders):
        return reference(q, k, v, (borders[1:] - borders[:-1]).tolist(), window).float()

    return kernel


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_is_called_as_its_interface_says(window, monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, causal, window_size):
        assert causal and max_q == max_k == 9 and cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k)
        assert window_size == ((-1, -1) if window is None else (window - 1, -1))
        return _varlen_stand_in(q, k, v, window)(cu_q)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k, v = tensors([4, 9])
    row = pa.PackedRows(borders_of([4, 9]), 13, backend="flash")
    y = pa.packed_attention(q, k, v, row, window)
    plain = pa.packed_attention(q, k, v, pa.PackedRows(borders_of([4, 9]), 13), window)
    torch.testing.assert_close(y, plain, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_of_torch_is_called_as_its_interface_says(window, grouped, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, window_size):
        assert max_q == max_k == 9 and torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32
        assert window_size == ((-1 if window is None else window - 1), 0)
        return _varlen_stand_in(q, k, v, window)(cu_q)

    if grouped:

        def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
            assert enable_gqa
            return kernel(q, k, v, cu_q, cu_k, max_q, max_k, window_size)
    else:

        def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
            assert q.shape == k.shape == v.shape
            return kernel(q, k, v, cu_q, cu_k, max_q, max_k, window_size)

    pa._varlen_arguments.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    try:
        q, k, v = tensors([4, 9])
        y = pa.packed_attention(q, k, v, pa.PackedRows(borders_of([4, 9]), 13, backend="varlen"), window)
    finally:
        pa._varlen_arguments.cache_clear()
    plain = pa.packed_attention(q, k, v, pa.PackedRows(borders_of([4, 9]), 13), window)
    torch.testing.assert_close(y, plain, atol=2e-6, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flash", "varlen", "flex"])
@pytest.mark.parametrize("window", [None, 100])
def test_every_backend_of_a_gpu_equals_float32(backend, window):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if backend == "flash":
        pytest.importorskip("flash_attn")
    lengths = [700, 3, 512, 129, 900]
    q, k, v = (x.detach() for x in tensors(lengths, head_dim=64))
    expected = reference(q, k, v, lengths, window)
    half = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
    rows = pa.PackedRows(borders_of(lengths).cuda(), sum(lengths), backend=backend)
    y = pa.packed_attention(*half, rows, window)
    assert (y.float().cpu() - expected.float()).abs().max() < 0.05
    y.float().pow(2).sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in half)


def test_rotary_scores_depend_on_distance_only():
    table = RotaryTable(8, 100.0)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).unsqueeze(1).unbind(0)

    def score(query_at, key_at):
        positions = torch.tensor([query_at, key_at])
        cos, sin = table(positions, 1 + max(query_at, key_at), torch.float32)
        return (rotate(q[None], cos[:1], sin[:1]) * rotate(k[None], cos[1:], sin[1:])).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(0, 0), (q * k).sum())
    assert abs(score(3, 1) - score(5, 1)) > 1e-3
