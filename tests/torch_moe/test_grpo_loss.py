"""The policy loss against a loop over tokens, and its gradient where nothing is clipped."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from routepack_opt.integrations.torch_moe.grpo.loss import (
    PolicyLoss,
    policy_sample,
    supervised_loss,
    supervised_sample,
)
from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout
from routepack_opt.integrations.torch_moe.step.samples import TrainSample, pack_row

VOCAB = 7
SHAPES = [(3, 2), (1, 4), (2, 1)]  # prompt and answer lengths


def make_row(*, reference: bool = False) -> tuple[object, object, list[Rollout], list[float]]:
    rng = np.random.default_rng(0)
    rollouts, advantages, samples = [], [1.0, -0.5, 0.0], {}
    for index, (prompt, answer) in enumerate(SHAPES):
        size = prompt + answer
        rollout = Rollout(
            rng.integers(0, VOCAB, size),
            prompt,
            -rng.random(answer).astype(np.float32) * 3,
            rng.integers(0, 4, (size - 1, 1, 2)).astype(np.int16),
        )
        rollouts.append(rollout)
        known = rollout.log_probs - 0.3 if reference else None
        samples[index] = policy_sample(rollout, advantages[index], known)
    row = pack_row([0, 1, 2], samples)
    logits = torch.from_numpy(rng.normal(size=(row.num_tokens, VOCAB)).astype(np.float32))
    return row, logits, rollouts, advantages


def test_loss_equals_a_loop_over_answer_tokens() -> None:
    row, logits, rollouts, advantages = make_row(reference=True)
    loss = PolicyLoss(0.2, 0.3, kl_weight=0.1, temperature=0.7)
    value, sums = loss(logits, row)
    expected, kl_sum, clipped_sum, start = 0.0, 0.0, 0, 0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        for k, old in enumerate(rollout.log_probs):
            position = start + rollout.prompt_len + k
            log_prob = float(torch.log_softmax(logits[position - 1] / 0.7, 0)[rollout.tokens[rollout.prompt_len + k]])
            ratio = math.exp(log_prob - old)
            clipped = min(max(ratio, 0.8), 1.3)
            expected -= min(ratio * advantage, clipped * advantage)
            clipped_sum += clipped * advantage < ratio * advantage
            kl = math.exp(old - 0.3 - log_prob) - (old - 0.3 - log_prob) - 1
            kl_sum += kl
        start += len(rollout.tokens)
    assert float(value) == pytest.approx(expected + 0.1 * kl_sum, rel=1e-5)
    assert float(sums["kl"]) == pytest.approx(kl_sum, rel=1e-5)
    assert float(sums["clipped"]) == clipped_sum


def test_gradient_on_policy_is_that_of_the_log_probabilities() -> None:
    row, logits, _, _ = make_row()
    logits.requires_grad_()
    log_probs = torch.log_softmax(logits, -1).gather(1, row.next_tokens()[0][:, None])[:, 0]
    row.fields["old_log_prob"].copy_(log_probs.detach() * row.fields["mask"])
    (own,) = torch.autograd.grad(PolicyLoss()(logits, row)[0], logits, retain_graph=True)
    (plain,) = torch.autograd.grad(-(log_probs * row.fields["advantage"] * row.fields["mask"]).sum(), logits)
    assert torch.allclose(own, plain, atol=1e-6)


def test_clipped_tokens_get_no_gradient() -> None:
    tokens = torch.tensor([0, 1])
    fields = {"mask": torch.tensor([1.0, 0.0]), "advantage": torch.ones(2), "old_log_prob": torch.tensor([-9.0, 0.0])}
    row = pack_row([0], {0: TrainSample(tokens, None, fields)})
    logits = torch.zeros(2, VOCAB, requires_grad=True)
    loss, sums = PolicyLoss()(logits, row)
    loss.backward()
    assert float(sums["clipped"]) == 1 and not logits.grad.any()


def test_rows_without_samples_have_no_loss() -> None:
    row, logits = pack_row([], {}), torch.zeros(0, VOCAB, requires_grad=True)
    assert float(PolicyLoss()(logits, row)[0].detach()) == float(supervised_loss(logits, row).detach()) == 0.0


def test_warm_start_learns_answers_only() -> None:
    row = pack_row([0, 1], {0: supervised_sample([1, 2], [3]), 1: supervised_sample([4], [5, 6])})
    logits = torch.randn(row.num_tokens, VOCAB, generator=torch.Generator().manual_seed(0))
    log_probs = torch.log_softmax(logits, -1)
    expected = -(log_probs[1, 3] + log_probs[3, 5] + log_probs[4, 6])
    assert float(supervised_loss(logits, row)) == pytest.approx(float(expected), rel=1e-6)
