"""What sampling records is what training replays: routes and log-probabilities; draws belong to samples, not ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout, sample_answers, sampling_uniforms
from routepack_opt.integrations.torch_moe.grpo.sealing import seal_window
from routepack_opt.integrations.torch_moe.grpo.tokenizer import END, VOCAB_SIZE
from routepack_opt.integrations.torch_moe.model.config import MoEConfig
from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape

CONFIG = MoEConfig(VOCAB_SIZE, 32, 2, 2, 1, 16, 8, 2, 16)
PROMPTS = [[1, 10, 2, 11], [5, 11], [3, 10, 3, 10, 3, 11], [7, 11]]
MAX_NEW = 6


@pytest.fixture(scope="module")
def drawn() -> tuple[object, list[Rollout]]:
    torch.manual_seed(0)
    mesh = ParallelMesh.single()
    model = build_model(CONFIG, mesh, seed=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # unequal logits
    uniforms = sampling_uniforms(range(4), MAX_NEW, seed=0, step=0)
    return model, sample_answers(model, mesh, PROMPTS, uniforms, temperature=0.8, max_new_tokens=MAX_NEW)


def test_answers_end_with_end_or_the_limit(drawn: tuple[object, list[Rollout]]) -> None:
    for prompt, rollout in zip(PROMPTS, drawn[1], strict=True):
        assert rollout.tokens[: rollout.prompt_len].tolist() == prompt
        assert rollout.completion[-1] == END or len(rollout.completion) == MAX_NEW
        assert END not in rollout.completion[:-1]
        assert rollout.routes.shape == (len(rollout.tokens) - 1, 2, 2)
        assert len(rollout.log_probs) == len(rollout.completion)


def test_a_packed_forward_pass_repeats_routes_and_log_probabilities(drawn: tuple[object, list[Rollout]]) -> None:
    model, rollouts = drawn
    tokens = torch.cat([torch.from_numpy(r.tokens) for r in rollouts])
    borders = torch.tensor([0, *(len(r.tokens) for r in rollouts)]).cumsum(0).to(torch.int32)
    tape = RouteTape.recording()
    with torch.no_grad():
        logits = model(tokens, borders, tape=tape) / 0.8
    for start, rollout in zip(borders.tolist(), rollouts, strict=False):
        rows = tape.recorded()[start : start + len(rollout.tokens) - 1].numpy()
        assert np.array_equal(np.sort(rows, axis=2), np.sort(rollout.routes, axis=2))
        for k, token in enumerate(rollout.completion):
            own = torch.log_softmax(logits[start + rollout.prompt_len + k - 1], 0)[token]
            assert rollout.log_probs[k] == pytest.approx(float(own), abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    from routepack_opt.integrations.torch_moe.grpo.sampling import _draw

    logits = torch.tensor([[0.0, 1.0, -30.0, 2.0]]).expand(20000, 4)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20000)).float()
    tokens, log_probs = _draw(logits, uniforms, 1.0)
    wanted = torch.softmax(logits[0], 0).numpy()
    assert np.allclose(np.bincount(tokens, minlength=4) / 20000, wanted, atol=0.02)
    assert np.allclose(np.exp(log_probs), wanted[tokens], atol=1e-6)


def test_draws_belong_to_the_sample() -> None:
    whole = sampling_uniforms(range(6), 3, seed=1, step=2)
    assert np.array_equal(whole[[4, 1]], sampling_uniforms([4, 1], 3, seed=1, step=2))
    assert not np.array_equal(whole, sampling_uniforms(range(6), 3, seed=1, step=3))


def test_the_window_counts_every_recorded_route(drawn: tuple[object, list[Rollout]]) -> None:
    rollouts = dict(enumerate(drawn[1]))
    rewards = {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.0}
    sealed = seal_window(rollouts, rewards, 4, 8, ParallelMesh.single(), group_size=2, top_k=2)
    for index, rollout in rollouts.items():
        assert sealed.window.lengths[index] == len(rollout.tokens)
        for layer in range(2):
            counts = np.bincount(rollout.routes[:, layer].ravel(), minlength=8)
            assert np.array_equal(sealed.window.demand[index, layer], counts)
    assert sealed.rewards.tolist() == [0.0, 1.0, 0.5, 0.0]
    assert sealed.loss_tokens == sum(len(rollout.completion) for rollout in rollouts.values())
    assert sealed.window.group_ids.tolist() == [0, 0, 1, 1]
