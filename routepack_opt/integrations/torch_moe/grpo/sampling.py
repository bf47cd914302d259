"""Batched sampling with a KV cache; every route is recorded, so that training replays what the rollout did.

All ranks of an EP group take every forward pass together: their experts are shared.

Shape suffixes: S sequences of this rank, T new tokens of a forward pass, L MoE layers, K top-k, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from routepack_opt.integrations.torch_moe.grpo.tokenizer import END
from routepack_opt.integrations.torch_moe.model.kv_cache import KVCache
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_reduce_
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_SAMPLING = 3  # stream of random numbers, beside those of task.py


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled answer.

    Attributes
    ----------
    tokens
        int64 [t], prompt and answer.
    prompt_len
        Tokens of the prompt.
    log_probs
        float32 [t - prompt_len], of the answer's tokens under the policy that drew them.
    routes
        int [t - 1, L, K], logical experts of every token that ran; the last one never did.
    """

    tokens: NDArray[np.int64]
    prompt_len: int
    log_probs: NDArray[np.float32]
    routes: NDArray[Any]

    @property
    def completion(self) -> list[int]:
        """The answer's tokens."""
        return [int(token) for token in self.tokens[self.prompt_len :]]


def sampling_uniforms(indices: Sequence[int], num_draws: int, *, seed: int, step: int) -> NDArray[np.float64]:
    """Float64 [S, draws] in [0, 1): numbers of each sample's own stream.

    They depend on the sample's index only, so another number of ranks, or a restart, draws the same.
    """
    streams = [np.random.default_rng([seed, _SAMPLING, step, index]) for index in indices]
    return np.array([rng.random(num_draws) for rng in streams]).reshape(len(streams), num_draws)


@torch.no_grad()
def sample_answers(
    model: Any,
    mesh: ParallelMesh,
    prompts: Sequence[Sequence[int]],
    uniforms: NDArray[np.float64],
    *,
    temperature: float = 1.0,
    max_new_tokens: int,
) -> list[Rollout]:
    """Answer every prompt, until END or ``max_new_tokens``.

    Parameters
    ----------
    model
        A MoETransformer; its routes are its own choice here.
    mesh
        Every rank calls this, with at least one prompt.
    uniforms
        [S, max_new_tokens], see :func:`sampling_uniforms`.
    temperature
        Of the softmax; log-probabilities are those of the tempered policy.
    """
    assert len(prompts) > 0
    draws = torch.from_numpy(np.ascontiguousarray(uniforms)).to(mesh.device, torch.float32)
    book = _Book(prompts, max_new_tokens)
    longest = max(map(len, prompts)) + max_new_tokens
    embedding = model.model.embed_tokens.weight
    cache = KVCache(model.config, len(prompts), longest, dtype=embedding.dtype, device=embedding.device)
    active = list(range(len(prompts)))
    fed: list[Sequence[int]] = [list(prompt) for prompt in prompts]
    for draw in range(max_new_tokens):
        lengths = [len(tokens) for tokens in fed]
        borders = torch.tensor([0, *lengths]).cumsum(0)
        tape = RouteTape.recording()
        logits_SV = model(
            torch.tensor([token for tokens in fed for token in tokens], device=mesh.device),
            borders.to(mesh.device, torch.int32),
            tape=tape,
            cache=cache,
            logits_at=(borders[1:] - 1).to(mesh.device),
        )
        tokens_S, log_probs_S = _draw(logits_SV, draws[active, draw], temperature)
        book.routes(active, lengths, tape.recorded().numpy())
        book.tokens(active, tokens_S, log_probs_S)
        if draw + 1 == max_new_tokens or not _anyone_left(book, mesh):
            break
        # a rank that is done keeps one sequence going: the others need its experts
        left = [place for place, sequence in enumerate(active) if not book.done[sequence]] or [0]
        if len(left) < len(active):
            cache.keep(left)
        active = [active[place] for place in left]
        fed = [[int(tokens_S[place])] for place in left]
    return book.rollouts()


def _draw(
    logits_SV: torch.Tensor, uniforms_S: torch.Tensor, temperature: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Inverse of the distribution function at the given numbers."""
    log_probs_SV = torch.log_softmax(logits_SV.float() / temperature, dim=-1)
    cumulative_SV = log_probs_SV.exp().cumsum(dim=-1)
    chosen_S1 = (cumulative_SV <= uniforms_S[:, None] * cumulative_SV[:, -1:]).sum(dim=-1, keepdim=True)
    chosen_S1 = chosen_S1.clamp_(max=logits_SV.shape[1] - 1)
    return chosen_S1[:, 0].cpu().numpy(), log_probs_SV.gather(1, chosen_S1)[:, 0].cpu().numpy()


def _anyone_left(book: _Book, mesh: ParallelMesh) -> bool:
    left = torch.tensor([not all(book.done)], dtype=torch.int32, device=mesh.device)
    return bool(all_reduce_(left, mesh.ep_group, dist.ReduceOp.MAX if mesh.ep_group is not None else None).item())


class _Book:
    """What was drawn so far."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.prompts = [list(prompt) for prompt in prompts]
        self.done = [False] * len(prompts)
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] = [[] for _ in prompts]
        self.route_rows: list[list[NDArray[Any]]] = [[] for _ in prompts]

    def routes(self, active: list[int], lengths: list[int], routes_TLK: NDArray[Any]) -> None:
        start = 0
        for sequence, length in zip(active, lengths, strict=True):
            if not self.done[sequence]:
                self.route_rows[sequence].append(routes_TLK[start : start + length])
            start += length

    def tokens(self, active: list[int], tokens_S: NDArray[np.int64], log_probs_S: NDArray[np.float32]) -> None:
        for place, sequence in enumerate(active):
            if not self.done[sequence]:
                self.answers[sequence].append(int(tokens_S[place]))
                self.log_probs[sequence].append(float(log_probs_S[place]))
                self.done[sequence] = int(tokens_S[place]) == END

    def rollouts(self) -> list[Rollout]:
        return [
            Rollout(
                np.array([*prompt, *answer], dtype=np.int64),
                len(prompt),
                np.array(log_probs, dtype=np.float32),
                np.concatenate(rows),
            )
            for prompt, answer, log_probs, rows in zip(
                self.prompts, self.answers, self.log_probs, self.route_rows, strict=True
            )
        ]
