"""Router: both score kinds, groups, forced routes, and the numerics of DeepSeek-V3."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from routepack_opt.integrations.torch_moe.model.config import MoEConfig  # noqa: E402
from routepack_opt.integrations.torch_moe.model.router import Router  # noqa: E402


def make(seed=0, **changes):
    config = MoEConfig(11, 32, 1, 2, 2, 16, 16, 4, 8, **changes)
    generator = torch.Generator().manual_seed(seed)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 32, generator=generator))
        if router.selection_bias is not None:
            router.selection_bias.copy_(torch.randn(16, generator=generator))
    return router, torch.randn(40, 32, generator=generator)


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_top_k(normalise):
    router, x = make(normalise_top_k=normalise, routed_scale=1.5)
    weights, ids = router(x)
    probabilities = (x @ router.weight.T).softmax(-1)
    values, expected = probabilities.topk(4)
    assert torch.equal(ids, expected)
    values = values / values.sum(-1, keepdim=True) if normalise else values
    torch.testing.assert_close(weights, 1.5 * values)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
def test_deepseek_v3_routing_equals_transformers(groups, top_groups):
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    router, x = make(router="sigmoid", num_groups=groups, num_top_groups=top_groups, routed_scale=2.5)
    theirs = modeling.DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=groups, topk_group=top_groups,
            routed_scaling_factor=2.5, norm_topk_prob=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
        theirs.e_score_correction_bias.copy_(router.selection_bias)
        _, expected, expected_ids = theirs(x)
        weights, ids = router(x)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, expected_order))


def test_groups_bound_where_a_token_goes():
    router, x = make(router="sigmoid", num_groups=4, num_top_groups=2)
    _, ids = router(x)
    assert all(len(set(row)) <= 2 for row in (ids // 4).tolist())
    free, _ = make(router="sigmoid")
    assert any(len(set(row)) > 2 for row in (free(x)[1] // 4).tolist())


def test_bias_chooses_but_does_not_weigh():
    router, x = make(router="sigmoid")
    with torch.no_grad():
        router.selection_bias[3] = 100.0
    weights, ids = router(x)
    assert (ids == 3).any(-1).all()
    scores = torch.sigmoid(x @ router.weight.T).gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_forced_ids_recompute_weights_with_gradients(kind):
    router, x = make(router=kind)
    own, ids = router(x)
    assert torch.equal(router(x, ids)[0], own)
    forced = (ids + 1) % 16
    weights, used = router(x, forced.to(torch.int32))
    assert torch.equal(used, forced.to(torch.int32))
    torch.testing.assert_close(weights.sum(-1), torch.ones(40))
    (weights[:, 0] ** 2).sum().backward()

    weight = router.weight.detach().double().requires_grad_()
    scores = x.double() @ weight.T
    scores = scores.softmax(-1) if kind == "softmax" else scores.sigmoid()
    chosen = scores.gather(1, forced)
    ((chosen / chosen.sum(-1, keepdim=True))[:, 0] ** 2).sum().backward()
    torch.testing.assert_close(router.weight.grad, weight.grad.float(), atol=1e-5, rtol=1e-4)


def test_no_tokens():
    router, x = make(router="sigmoid", num_groups=4, num_top_groups=2)
    weights, ids = router(x[:0])
    assert weights.shape == ids.shape == (0, 4)
