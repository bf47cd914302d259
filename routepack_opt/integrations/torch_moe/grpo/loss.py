"""Token losses as sums over a packed row: clipped policy gradient with an optional KL term, and the warm start's.

Fields of a sample stand at the position that predicts a token: entry j speaks of token j + 1.

Shape suffixes: T tokens of a packed row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from routepack_opt.integrations.torch_moe.step.samples import PackedRow, TrainSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout

MASK, ADVANTAGE, OLD_LOG_PROB, REFERENCE = "mask", "advantage", "old_log_prob", "reference_log_prob"


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate of PPO / GRPO, summed over the answers' tokens.

    Parameters
    ----------
    clip_low, clip_high
        The ratio to the old policy is clipped to [1 - clip_low, 1 + clip_high].
    kl_weight
        Of the unbiased estimate exp(d) - d - 1, d = reference - current log-probability; needs the field
        ``reference_log_prob``.
    temperature
        The one answers were sampled with.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.0
    temperature: float = 1.0

    def __call__(self, logits_TV: torch.Tensor, row: PackedRow) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The SUM of the row's token losses, and sums to report: ``clipped``, ``kl``, ``entropy``."""
        if row.num_tokens == 0:
            zero = logits_TV.sum() * 0.0
            return zero, {"clipped": zero, "kl": zero, "entropy": zero}
        log_probs_TV = torch.log_softmax(logits_TV.float() / self.temperature, dim=-1)
        log_probs_T = log_probs_TV.gather(1, row.next_tokens()[0][:, None])[:, 0]
        mask_T, advantage_T = row.fields[MASK], row.fields[ADVANTAGE]
        ratio_T = torch.exp((log_probs_T - row.fields[OLD_LOG_PROB]) * mask_T)  # prompts have no old log-probability
        clipped_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
        loss = -(surrogate_T * mask_T).sum()
        with torch.no_grad():
            entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(dim=-1)
            was_clipped_T = (clipped_T * advantage_T < ratio_T * advantage_T).float()
            sums = {"clipped": (was_clipped_T * mask_T).sum(), "entropy": (entropy_T * mask_T).sum()}
        sums["kl"] = torch.zeros_like(sums["clipped"])
        if self.kl_weight > 0:
            difference_T = (row.fields[REFERENCE] - log_probs_T) * mask_T
            kl = ((difference_T.exp() - difference_T - 1.0) * mask_T).sum()
            loss = loss + self.kl_weight * kl
            sums["kl"] = kl.detach()
        return loss, sums


def supervised_loss(logits_TV: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """Summed negative log-likelihood of the masked tokens (warm start)."""
    if row.num_tokens == 0:
        return logits_TV.sum() * 0.0
    log_probs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    log_probs_T = log_probs_TV.gather(1, row.next_tokens()[0][:, None])[:, 0]
    return -(log_probs_T * row.fields[MASK]).sum()


def policy_sample(rollout: Rollout, advantage: float, reference: NDArray[np.float32] | None = None) -> TrainSample:
    """What training needs of one rollout; ``reference`` are the answer's log-probabilities under the reference."""
    size, first = len(rollout.tokens), rollout.prompt_len - 1
    fields = {
        MASK: _at(size, first, np.ones(size - rollout.prompt_len, dtype=np.float32)),
        ADVANTAGE: torch.full((size,), float(advantage), dtype=torch.float32),
        OLD_LOG_PROB: _at(size, first, rollout.log_probs),
    }
    if reference is not None:
        fields[REFERENCE] = _at(size, first, reference)
    return TrainSample(torch.from_numpy(rollout.tokens), torch.from_numpy(rollout.routes), fields)


def supervised_sample(prompt: Sequence[int], answer: Sequence[int]) -> TrainSample:
    """A prompt and the answer to learn."""
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
    mask = _at(len(tokens), len(prompt) - 1, np.ones(len(answer), dtype=np.float32))
    return TrainSample(tokens, None, {MASK: mask})


def _at(size: int, first: int, values: NDArray[np.float32]) -> torch.Tensor:
    field = torch.zeros(size, dtype=torch.float32)
    field[first : first + len(values)] = torch.from_numpy(values)
    return field
