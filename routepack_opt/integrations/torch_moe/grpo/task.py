"""The task: sums of a few small numbers, generated on the spot and checked exactly.

A prompt reads "3+1+4=", its answer is the sum's digits followed by the end token. Prompts and answers differ in length,
so that packing has something to do, and every reward is computed, never judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.grpo.tokenizer import END, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROBLEMS, _WARM_START = 1, 2  # streams of random numbers, see draw()


@dataclass(frozen=True)
class Problem:
    """One prompt and the only answer that counts, as token ids (the answer ends with END)."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class ArithmeticTask:
    """Sums of ``min_terms`` to ``max_terms`` numbers from 0 to ``max_term``.

    Parameters
    ----------
    min_terms, max_terms
        How many numbers are added; uniform.
    max_term
        Largest of them; uniform from 0.
    partial_credit
        Reward of an answer whose first digits are right, times the share of the answer (END counted) that they make;
        0 leaves exact answers only.

    Raises
    ------
    InvalidInput
        Ranges that hold no problem; names the field.
    """

    min_terms: int = 1
    max_terms: int = 3
    max_term: int = 4
    partial_credit: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 1 <= self.min_terms <= self.max_terms:
            raise InvalidInput(
                f"task: min_terms {self.min_terms} to max_terms {self.max_terms} is no range of counts from 1 up"
            )
        if self.max_term < 0:
            raise InvalidInput(f"task: max_term {self.max_term} is below 0")
        if not 0 <= self.partial_credit < 1:
            raise InvalidInput(f"task: partial_credit {self.partial_credit} is not in [0, 1)")

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self.max_terms * (len(str(self.max_term)) + 1)

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer, END counted."""
        return len(str(self.max_terms * self.max_term)) + 1

    def problem(self, rng: np.random.Generator) -> Problem:
        """Draw one."""
        terms = rng.integers(0, self.max_term + 1, size=int(rng.integers(self.min_terms, self.max_terms + 1)))
        prompt = "+".join(map(str, terms.tolist())) + "="
        return Problem(tuple(encode(prompt)), (*encode(str(int(terms.sum()))), END))

    def problems(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """The prompts of one optimizer step: the same on every rank, and after every restart."""
        rng = np.random.default_rng([seed, _PROBLEMS, step])
        return [self.problem(rng) for _ in range(count)]

    def examples(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Problems of the supervised warm start, from a stream of their own."""
        rng = np.random.default_rng([seed, _WARM_START, step])
        return [self.problem(rng) for _ in range(count)]

    def reward(self, problem: Problem, completion: Sequence[int]) -> float:
        """1.0 for exactly the answer and its END; partial credit, if any, for the digits before the first mistake."""
        given = tuple(int(token) for token in completion)
        if given == problem.answer:
            return 1.0
        if self.partial_credit == 0.0:
            return 0.0
        right = 0
        for mine, wanted in zip(given, problem.answer, strict=False):
            if mine != wanted:
                break
            right += 1
        return self.partial_credit * right / len(problem.answer)
