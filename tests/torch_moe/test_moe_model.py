"""The decoder: packing, cache, recomputation, replay, initialisation, placements."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from routepack_opt.errors import InvalidInput  # noqa: E402
from routepack_opt.integrations.torch_moe.model.config import MoEConfig  # noqa: E402
from routepack_opt.integrations.torch_moe.model.decoder import MoETransformer, build_model  # noqa: E402
from routepack_opt.integrations.torch_moe.model.kv_cache import KVCache  # noqa: E402
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh  # noqa: E402
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap  # noqa: E402
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape  # noqa: E402

PLAIN = {"vocab_size": 19, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
PLAIN |= {"num_experts": 8, "top_k": 2, "expert_size": 16}
KINDS = {
    "plain": {},
    "qwen": {"qk_norm": True, "normalise_top_k": False, "tie_embeddings": True},
    "window": {"sliding_window": 3, "attention_bias": True},
    "deepseek": {
        "dense_layers": (0,), "dense_size": 24, "shared_size": 16, "router": "sigmoid", "num_groups": 4,
        "num_top_groups": 2, "routed_scale": 2.5,
    },
    "shared_gate": {"shared_size": 16, "shared_gate": True},
}  # fmt: skip


def make(kind="plain", **kwargs):
    model = build_model(MoEConfig(**PLAIN | KINDS[kind]), ParallelMesh.single(), **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():  # away from ones, zeros and tiny weights
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def row(lengths=(5, 1, 9), seed=0):
    tokens = torch.randint(0, 19, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def permuted(config, seed=1):
    generator = np.random.default_rng(seed)
    return SlotMap(np.stack([generator.permutation(config.num_experts) for _ in config.moe_layers]))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_each_sequence_alone(kind):
    model, (tokens, borders) = make(kind), row()
    with torch.no_grad():
        packed = model(tokens, borders, tape=RouteTape.off())
        for begin, end in zip(borders.tolist(), borders.tolist()[1:], strict=False):
            alone = model(tokens[begin:end], torch.tensor([0, end - begin], dtype=torch.int32), tape=RouteTape.off())
            torch.testing.assert_close(packed[begin:end], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_equals_the_full_forward(kind):
    model, lengths = make(kind), (5, 1, 9)
    tokens, _ = row(tuple(n + 4 for n in lengths))
    parts = tokens.split([n + 4 for n in lengths])
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    one = torch.arange(4, dtype=torch.int32)
    cache = KVCache(model.config, 3, 13)
    tape = RouteTape.recording()
    with torch.no_grad():
        prompts = torch.cat([p[:n] for p, n in zip(parts, lengths, strict=True)])
        steps = [model(prompts, borders, tape=RouteTape.off(), cache=cache, logits_at=borders[1:].long() - 1)]
        for step in range(4):
            tape = RouteTape.recording()
            news = torch.stack([p[n + step] for p, n in zip(parts, lengths, strict=True)])
            steps.append(model(news, one, tape=tape, cache=cache))
            assert tape.recorded().shape == (3, model.config.num_moe_layers, 2)
        assert cache.lengths == [n + 4 for n in lengths]
        for sequence, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            full = model(part, torch.tensor([0, len(part)], dtype=torch.int32), tape=RouteTape.off())
            ours = torch.stack([logits[sequence] for logits in steps])
            torch.testing.assert_close(ours, full[length - 1 :], atol=1e-5, rtol=1e-5)


def test_cache_keeps_the_named_sequences_only():
    model, (tokens, borders) = make(), row()
    both = [KVCache(model.config, 3, 12) for _ in range(2)]
    with torch.no_grad():
        for cache in both:
            model(tokens, borders, tape=RouteTape.off(), cache=cache)
        both[1].keep([2, 0])
        assert both[1].lengths == [9, 5]
        news = torch.tensor([1, 2, 3])
        whole = model(news, torch.arange(4, dtype=torch.int32), tape=RouteTape.off(), cache=both[0])
        kept = model(news[[2, 0]], torch.arange(3, dtype=torch.int32), tape=RouteTape.off(), cache=both[1])
        torch.testing.assert_close(kept, whole[[2, 0]], atol=1e-5, rtol=1e-5)
        both[1].keep([])
        empty = model(news[:0], torch.zeros(1, dtype=torch.int32), tape=RouteTape.off(), cache=both[1])
    assert empty.shape == (0, 19)


def test_cache_refuses_what_does_not_fit():
    model, (tokens, borders) = make(), row()
    with torch.no_grad():
        with pytest.raises(InvalidInput, match="9 tokens in a sequence, room for 8"):
            model(tokens, borders, tape=RouteTape.off(), cache=KVCache(model.config, 3, 8))
        with pytest.raises(InvalidInput, match="3 sequences given, the cache holds 2"):
            model(tokens, borders, tape=RouteTape.off(), cache=KVCache(model.config, 2, 20))
        cache = KVCache(model.config, 3, 20)
        model(tokens, borders, tape=RouteTape.off(), cache=cache)
        with pytest.raises(InvalidInput, match="exactly one token"):
            model(tokens, borders, tape=RouteTape.off(), cache=cache)


@pytest.mark.parametrize("kind", ["plain", "deepseek"])
def test_recomputation_gives_the_same_gradients_and_routes(kind):
    results = []
    for recompute in (False, True):
        model, (tokens, borders) = make(kind, recompute=recompute), row()
        tape, runs = RouteTape.recording(), []
        own_scores = model.moe_blocks[0].gate.scores
        model.moe_blocks[0].gate.scores = lambda x, own=own_scores, runs=runs: runs.append(1) or own(x)
        model(tokens, borders, tape=tape).logsumexp(-1).sum().backward()
        assert len(runs) == 1 + recompute  # it does run again
        results.append((gradients(model), tape.recorded()))
    assert torch.equal(results[0][1], results[1][1])
    for name, gradient in results[0][0].items():
        torch.testing.assert_close(gradient, results[1][0][name], atol=1e-6, rtol=1e-6)


def test_replaying_the_own_routes_changes_nothing_and_others_reach_the_router():
    model, (tokens, borders) = make(), row()
    tape = RouteTape.recording()
    own = model(tokens, borders, tape=tape)
    routes = tape.recorded()
    assert torch.equal(model(tokens, borders, tape=RouteTape.replaying(routes)), own)
    forced = (routes + 3) % 8
    other = model(tokens, borders, tape=RouteTape.replaying(forced))
    assert not torch.allclose(other, own, atol=1e-3)
    other.logsumexp(-1).sum().backward()
    for block in model.moe_blocks:
        assert block.router.weight.grad.abs().max() > 0
        used = set(forced[:, block.moe_layer].flatten().tolist())
        norms = block.experts.gate_up.grad.abs().amax(dim=(1, 2))
        assert {e for e in range(8) if norms[e] > 0} == used  # slot = expert here


@pytest.mark.parametrize("kind", ["plain", "deepseek"])
def test_a_placement_changes_neither_logits_nor_logical_gradients(kind):
    straight, (tokens, borders) = make(kind), row()
    moved = make(kind, slot_map=permuted(straight.config))
    logits = [m(tokens, borders, tape=RouteTape.off()) for m in (straight, moved)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=1e-6)
    for output in logits:
        output.logsumexp(-1).sum().backward()
    for name, parameter in straight.named_parameters():
        other = dict(moved.named_parameters())[name]
        slots = torch.arange(8)
        if straight.is_expert_parameter(name):
            layer = straight.config.moe_layers.index(int(name.split(".")[2]))
            slots = moved.slot_map.logical_to_slot[layer]
            torch.testing.assert_close(parameter.grad, other.grad[slots], atol=1e-5, rtol=1e-5)
        else:
            torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_initial_weights_are_logical_whatever_ep_size_and_placement():
    config = MoEConfig(**PLAIN | KINDS["deepseek"])
    whole = build_model(config, ParallelMesh.single(), seed=5)
    slot_map = permuted(config)
    for num_ep in (2, 4):
        num_slots = 8 // num_ep
        for ep_rank in range(num_ep):
            part = MoETransformer(
                config,
                slot_map=slot_map,
                dispatcher=None,
                num_local_slots=num_slots,
                first_slot=ep_rank * num_slots,
                seed=5,
            )
            for name, parameter in part.named_parameters():
                expected = dict(whole.named_parameters())[name]
                if part.is_expert_parameter(name):
                    expected = expected[part.local_experts(config.moe_layers.index(int(name.split(".")[2])))]
                assert torch.equal(parameter, expected)
    other = build_model(config, ParallelMesh.single(), seed=6)
    assert not torch.equal(other.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    gate_up = whole.moe_blocks[0].experts.gate_up
    assert not torch.equal(gate_up[0], gate_up[1])
    assert not torch.equal(gate_up, whole.moe_blocks[1].experts.gate_up)


def test_no_global_random_state_is_used():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make()
    assert torch.equal(before, torch.get_rng_state())


def test_logits_of_some_tokens_and_of_none():
    model, (tokens, borders) = make(), row()
    full = model(tokens, borders, tape=RouteTape.off())
    some = model(tokens, borders, tape=RouteTape.off(), logits_at=torch.tensor([0, 14]))
    torch.testing.assert_close(some, full[[0, 14]])
    none = model(tokens[:0], torch.zeros(1, dtype=torch.int32), tape=RouteTape.off())
    none.sum().backward()  # a rank without samples still takes part; every gradient exists
    assert none.shape == (0, 19)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_shared_gate_scales_the_shared_expert():
    model = make("shared_gate")
    block = model.moe_blocks[0]
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = block(x, RouteTape.off())
        shared = block.shared_experts(x) * torch.sigmoid(x @ block.shared_expert_gate.weight.T)
        block.shared_experts = None
        torch.testing.assert_close(whole, block(x, RouteTape.off()) + shared)


def test_bf16_runs_and_stays_near_float32():
    tokens, borders = row()
    full, half = make(), make(dtype=torch.bfloat16)
    tape = RouteTape.recording()
    expected = full(tokens, borders, tape=tape)
    logits = half(tokens, borders, tape=RouteTape.replaying(tape.recorded()))
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_experts_that_do_not_split_are_refused():
    from routepack_opt.topology import Topology

    mesh = ParallelMesh(Topology(dp=3, ep=3, shards=1), 0, 0, 0, torch.device("cpu"))
    with pytest.raises(InvalidInput, match="8 experts do not split over 3 EP ranks"):
        build_model(MoEConfig(**PLAIN), mesh)


@pytest.mark.distributed
def test_recomputation_on_four_ranks_with_empty_rows():
    from harness import run_ranks

    gaps = run_ranks("recompute_workers:largest_gradient_gap", 4, timeout_s=180)
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("sizes", [(1, 0), (0, 8)])
def test_slot_map_of_another_model_is_refused(sizes: tuple[int, int]) -> None:
    """Tokens would have gone to slots that nobody has, or never to some experts."""
    config = MoEConfig(
        vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=8, top_k=2,
        expert_size=4,
    )  # fmt: skip
    slot_map = SlotMap.identity(config.num_moe_layers + sizes[0], config.num_experts + sizes[1])
    with pytest.raises(InvalidInput, match=r"slot_map: .* the model has \(2, 8\)"):
        build_model(config, ParallelMesh.single(), slot_map=slot_map)
