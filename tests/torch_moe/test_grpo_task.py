"""Sums are right, rewards are exact, and every draw depends on seed and step only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.grpo.advantages import group_advantages
from routepack_opt.integrations.torch_moe.grpo.task import ArithmeticTask
from routepack_opt.integrations.torch_moe.grpo.tokenizer import CHARACTERS, END, VOCAB_SIZE, decode, encode

TASK = ArithmeticTask(min_terms=1, max_terms=4, max_term=12)


@given(st.text(CHARACTERS, max_size=20))
def test_text_survives_the_tokenizer(text: str) -> None:
    assert decode(encode(text)) == text
    assert all(0 <= token < END < VOCAB_SIZE for token in encode(text))


def test_foreign_characters_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"text\[1\]: '-'"):
        encode("3-1=")


def test_every_answer_is_the_sum() -> None:
    lengths = set()
    for problem in TASK.problems(300, seed=1, step=2):
        prompt, answer = decode(problem.prompt), decode(problem.answer)
        assert prompt.endswith("=") and answer.endswith(".")
        assert sum(map(int, prompt[:-1].split("+"))) == int(answer[:-1])
        assert len(prompt) <= TASK.longest_prompt and len(answer) <= TASK.longest_answer
        lengths.add((len(prompt), len(answer)))
    assert len({p for p, _ in lengths}) > 5 and len({a for _, a in lengths}) > 1, "packing needs varied lengths"


def test_problems_depend_on_seed_and_step_only() -> None:
    assert TASK.problems(8, seed=1, step=2) == TASK.problems(8, seed=1, step=2)
    assert TASK.problems(8, seed=1, step=2) != TASK.problems(8, seed=1, step=3)
    assert TASK.problems(8, seed=1, step=2) != TASK.examples(8, seed=1, step=2)


def test_only_the_whole_answer_is_rewarded() -> None:
    task, partial = ArithmeticTask(max_term=9), ArithmeticTask(max_term=9, partial_credit=0.3)
    problem = next(p for p in task.problems(100, seed=0, step=0) if len(p.answer) == 3)
    right = list(problem.answer)
    assert task.reward(problem, right) == partial.reward(problem, right) == 1.0
    for wrong in ([], right[:-1], [*right, END], [right[0], END], [END]):
        assert task.reward(problem, wrong) == 0.0
        assert 0.0 <= partial.reward(problem, wrong) <= 0.3
    assert partial.reward(problem, [right[0], END]) == pytest.approx(0.1)


@pytest.mark.parametrize("values", [{"min_terms": 0}, {"min_terms": 3, "max_terms": 2}, {"max_term": -1}])
def test_empty_ranges_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="task: m"):
        ArithmeticTask(**values)


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]]) -> None:
    for scale in ("std", "none"):
        advantages = group_advantages(np.ravel(groups), 4, scale=scale).reshape(-1, 4)
        assert advantages.dtype == np.float32
        assert np.allclose(advantages.sum(axis=1), 0.0, atol=1e-4)
        for rewards, values in zip(groups, advantages, strict=True):
            if len(set(rewards)) == 1:
                assert (values == 0).all()


def test_advantages_by_hand() -> None:
    assert group_advantages([1, 0, 0, 0], 4, scale="none").tolist() == [0.75, -0.25, -0.25, -0.25]
    scaled = group_advantages([1, 0, 1, 0, 5, 5, 5, 5], 4)
    assert scaled == pytest.approx([1, -1, 1, -1, 0, 0, 0, 0], abs=1e-3)


@pytest.mark.parametrize(("rewards", "size"), [([1, 2, 3], 2), ([[1, 2]], 2), ([1.0, float("nan")], 2)])
def test_odd_rewards_are_refused(rewards: list[float], size: int) -> None:
    with pytest.raises(InvalidInput, match="rewards"):
        group_advantages(rewards, size)
