"""AdamW as torch's, gradients in buffers, everything an expert owns in one list."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from training_workers import CONFIG, build, loss_fn, make_samples, total_tokens

from routepack_opt import Topology
from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.parallel.gradients import GradientBuffers
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.parallel.optimizer import MoEAdamW
from routepack_opt.integrations.torch_moe.parallel.slot_tensors import expert_slot_tensors
from routepack_opt.integrations.torch_moe.step.pad_tokens import pad_row, route_last_tokens
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape
from routepack_opt.integrations.torch_moe.step.samples import pack_row
from routepack_opt.integrations.torch_moe.step.train_step import count_tokens, train_step

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = [5, 8, 3, 9]
MESH = ParallelMesh.single()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def backward(model: Any, step: int) -> float:
    samples = make_samples(step, LENGTHS)
    row = pack_row(range(len(LENGTHS)), samples)
    logits_TV = model(row.tokens_T, row.cu_seqlens_S1, tape=RouteTape.replaying(row.routes_TLK))
    loss = loss_fn(logits_TV, row)[0] / total_tokens(samples)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_equals_torch_adamw(max_norm: float | None, eps: float) -> None:
    settings: dict[str, Any] = {"lr": 2e-3, "betas": (0.8, 0.95), "eps": eps, "weight_decay": 0.1}
    mine, _, _ = build(MESH)
    optimizer = MoEAdamW(mine, MESH, **settings)
    theirs, _, _ = build(MESH)
    reference = torch.optim.AdamW(theirs.parameters(), foreach=False, **settings)
    for parameter in theirs.parameters():  # ``build`` tied them to its own optimizer's buffers
        parameter.grad = None
    for step in range(4):
        optimizer.zero_grad()
        assert backward(mine, step) == pytest.approx(backward(theirs, step), rel=1e-6)
        optimizer.reduce_gradients()
        norm = optimizer.clip_(max_norm)
        wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
        assert norm == pytest.approx(float(wanted), rel=1e-6)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        optimizer.lr = reference.param_groups[0]["lr"] = 1e-3 / (step + 1)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0 if max_norm is None else 1e-5, atol=0 if max_norm is None else 1e-7), name


def test_selected_parameters_decay() -> None:
    model, _, _ = build(MESH)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MoEAdamW(model, MESH, lr=0.1, weight_decay=0.5, decays=lambda name: "norm" not in name)
    optimizer.zero_grad()
    optimizer.step()  # zero gradients: only decay is left
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, before[name] * (1.0 if "norm" in name else 0.95)), name


def test_gradients_put_elsewhere_are_taken_in() -> None:
    model, optimizer, _ = build(MESH)
    optimizer.zero_grad()
    backward(model, 0)
    wanted = [bucket.clone() for bucket in optimizer.dense_gradients.buckets]
    optimizer.zero_grad()
    model.zero_grad(set_to_none=True)
    backward(model, 0)
    optimizer.reduce_gradients()
    assert all(torch.equal(a, b) for a, b in zip(wanted, optimizer.dense_gradients.buckets, strict=True))


def test_bfloat16_gradients_accumulate_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    buffers = GradientBuffers([("weight", weight)], None)
    for _ in range(300):  # bf16 stops counting at 256
        weight.sum().backward()
    assert weight.grad is None and float(buffers.views["weight"]) == 300


def test_buckets_hold_every_parameter_once() -> None:
    parameters = [(str(n), torch.nn.Parameter(torch.zeros(n))) for n in (3, 1, 10, 2, 5)]
    buffers = GradientBuffers(parameters, None, bucket_bytes=16)
    assert [bucket.numel() for bucket in buffers.buckets] == [4, 10, 7]
    for n, (_, parameter) in enumerate(parameters):
        (parameter * n).sum().backward()
    assert torch.cat(buffers.buckets).tolist() == [0] * 3 + [1] + [2] * 10 + [3] * 2 + [4] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slot_tensors_are_all_an_expert_owns(dtype: str) -> None:
    model, optimizer, _ = build(MESH, dtype=dtype)
    model.moe_blocks[1].experts.register_buffer("scale", torch.zeros(CONFIG.num_experts, 3))
    model.moe_blocks[1].experts.register_buffer("shared", torch.zeros(2))
    entries = expert_slot_tensors(model, optimizer)
    kinds = ["weight", "exp_avg", "exp_avg_sq"] if dtype == "float32" else ["weight", "master", "exp_avg", "exp_avg_sq"]
    wanted = [f"{layer}.{matrix}.{kind}" for layer in range(2) for matrix in ("gate_up", "down") for kind in kinds]
    assert [entry.name for entry in entries] == [*wanted, "1.scale.buffer"]
    for entry in entries:
        assert entry.tensor.shape[0] == CONFIG.num_experts and entry.row_bytes * 8 == entry.tensor.nbytes
    weight = next(entry for entry in entries if entry.name == "0.down.weight")
    assert weight.tensor.data_ptr() == model.moe_blocks[0].experts.down.data_ptr()
    assert len(expert_slot_tensors(model)) == 5


def test_dense_state_round_trip() -> None:
    model, optimizer, _ = build(MESH, dtype="bfloat16")
    samples = make_samples(0, LENGTHS)
    train_step(model, optimizer, MESH, [[0, 1], [2, 3]], samples, loss_fn, total_tokens=total_tokens(samples))
    saved = {name: tensor.clone() for name, tensor in optimizer.state_for_checkpoint().items()}
    other = MoEAdamW(build(MESH, dtype="bfloat16")[0], MESH)
    other.load_state(optimizer.steps, saved)
    assert other.steps == 1
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.state_for_checkpoint().items())
    name = next(iter(saved))
    with pytest.raises(InvalidInput, match="has 1 entries"):
        other.load_state(1, saved | {name: torch.zeros(1)})
    saved.pop(name)
    with pytest.raises(InvalidInput, match="is missing"):
        other.load_state(1, saved)


def test_masters_follow_loaded_weights() -> None:
    model, optimizer, _ = build(MESH, dtype="bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    optimizer.refresh_masters()
    optimizer.zero_grad()
    optimizer.lr = 0.0
    optimizer.step()
    assert all(float(p.detach().float().mean()) > 0.5 for p in model.parameters())


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("eps", float("nan")), ("betas", (0.9, 1.0))])
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    model, _, _ = build(MESH)
    with pytest.raises(InvalidInput, match=name):
        MoEAdamW(model, MESH, **{name: value})


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    model, optimizer, _ = build(MESH)
    before = [p.detach().clone() for p in model.parameters()]
    samples = make_samples(0, LENGTHS)
    result = train_step(
        model, optimizer, MESH, [[0, 1, 2, 3]], samples, lambda logits, row: logits.sum() * float("inf"), total_tokens=1
    )
    assert result.skipped and optimizer.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_total_tokens_must_be_positive() -> None:
    model, optimizer, _ = build(MESH)
    samples = make_samples(0, LENGTHS)
    assert count_tokens(samples, "mask", MESH) == total_tokens(samples)
    with pytest.raises(InvalidInput, match="sample 0: no field 'masc'; it has advantage, mask"):
        count_tokens(samples, "masc", MESH)
    with pytest.raises(InvalidInput, match="total_tokens"):
        train_step(model, optimizer, MESH, [[0]], samples, loss_fn, total_tokens=0)


def test_pad_tokens_load_experts_evenly_and_stay_apart() -> None:
    model, _, _ = build(MESH)
    row = pack_row([0, 1], make_samples(0, [5, 6]))
    padded = pad_row(row, 16, model, MESH)
    assert padded.num_tokens == 16 and padded.cu_seqlens_S1.tolist() == [0, 5, 11, 16]
    counts = torch.bincount(padded.routes_TLK[11:, 0].flatten(), minlength=CONFIG.num_experts)
    assert int(counts.max() - counts.min()) <= 1
    assert pad_row(row, 11, model, MESH) is row
    routed = route_last_tokens(row, model, MESH)
    assert (row.routes_TLK[[4, 10]] == -1).all() and (routed.routes_TLK >= 0).all()
    assert torch.equal(routed.routes_TLK[:4], row.routes_TLK[:4])


def test_second_optimizer_of_a_bf16_model_gets_its_gradients() -> None:
    """The hooks of the first one took them: the norm was 0 and nothing was trained, without a word."""
    model, first, _ = build(MESH, dtype="bfloat16")
    second = MoEAdamW(model, MESH)
    samples = make_samples(0, LENGTHS)
    norms = [
        train_step(model, optimizer, MESH, [[0, 1]], samples, loss_fn, total_tokens=1e3).grad_norm
        for optimizer in (second, first)
    ]
    model, only, _ = build(MESH, dtype="bfloat16")
    wanted = train_step(model, only, MESH, [[0, 1]], samples, loss_fn, total_tokens=1e3).grad_norm
    assert norms[0] == pytest.approx(wanted) and norms[1] > 0.1 * wanted > 0


def test_frozen_experts_travel_without_state_and_stay_as_they_are() -> None:
    """Freezing experts ended in a StopIteration."""
    model, _, _ = build(MESH)
    for block in model.moe_blocks:
        block.experts.down.requires_grad_(False)
    before = model.moe_blocks[0].experts.down.clone()
    optimizer = MoEAdamW(model, MESH)
    names = {entry.name for entry in expert_slot_tensors(model, optimizer)}
    assert "0.down.weight" in names and "0.down.exp_avg" not in names and "0.gate_up.exp_avg" in names
    result = train_step(model, optimizer, MESH, [[0, 1]], make_samples(0, LENGTHS), loss_fn, total_tokens=9)
    assert result.grad_norm > 0 and torch.equal(before, model.moe_blocks[0].experts.down)


def test_pads_of_all_ranks_are_even_together() -> None:
    """One pad on each of four EP ranks: were all to begin at the same expert, two of them would get everything."""
    model, _, _ = build(MESH)
    row = pack_row([0], make_samples(0, [5]))
    loads = torch.zeros(4, dtype=torch.long)
    for ep_rank in range(4):
        mesh = dataclasses.replace(MESH, topology=Topology(ep=4, shards=1), rank=ep_rank, ep_rank=ep_rank)
        pads = pad_row(row, 6, model, mesh).routes_TLK[5:, 0]
        loads += torch.bincount(pads.flatten() // (CONFIG.num_experts // 4), minlength=4)
    assert loads.tolist() == [CONFIG.top_k] * 4
