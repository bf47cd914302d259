"""All-to-all dispatch equals local dispatch, whichever ranks have tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.integrations.torch_moe.parallel.dispatch import LocalDispatch
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap

CASES: list[Any] = [  # EP ranks, shards, tokens of each rank, counts announced beforehand
    (4, 1, [5, 9, 3, 7], False),
    (2, 2, [5, 0, 0, 7], True),
    (4, 1, [0, 11, 0, 0], True),
    (4, 1, [0, 0, 0, 0], False),
    (2, [[3, 0], [1, 2]], [4, 6, 1, 8], True),
]


@pytest.mark.distributed
def test_equals_local_dispatch() -> None:
    by_rank = run_ranks("dispatch_workers:dispatches", 4, {"cases": CASES})
    for number, case in enumerate(CASES):
        found = [results[number] for results in by_rank]
        assert max(rank["gap"] for rank in found) < 1e-5, (case, found)
        assert sum(rank["received"] for rank in found) == 2 * sum(case[2]), (case, found)


@pytest.mark.distributed
def test_counts_are_announced_only_when_every_route_is_known() -> None:
    assert run_ranks("dispatch_workers:announce_needs_all_routes", 2) == [[True, False, False]] * 2


@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_local_dispatch_is_the_weighted_sum_of_experts(num_tokens: int, top_k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(5, generator=g)
    x_TD = torch.randn(num_tokens, 3, generator=g, dtype=torch.float64).requires_grad_()
    ids_TK = torch.rand(num_tokens, 5, generator=g).topk(top_k, dim=-1).indices
    weights_TK = torch.rand(num_tokens, top_k, generator=g, dtype=torch.float64).requires_grad_()
    scale_E = torch.randn(5, generator=g, dtype=torch.float64)

    def experts(x_ND: torch.Tensor, counts_H: torch.Tensor) -> torch.Tensor:
        by_slot = scale_E[torch.argsort(slots)]
        return x_ND**2 * torch.repeat_interleave(by_slot, counts_H)[:, None]

    y_TD = LocalDispatch(SlotMap(slots[None]))(x_TD, ids_TK, weights_TK, experts, 0)
    wanted_TD = (weights_TK * scale_E[ids_TK]).sum(1, keepdim=True) * x_TD**2
    assert torch.allclose(y_TD, wanted_TD)
    gradient = torch.randn(y_TD.shape, generator=g, dtype=torch.float64)
    for mine, wanted in zip(
        torch.autograd.grad(y_TD, (x_TD, weights_TK), gradient),
        torch.autograd.grad(wanted_TD, (x_TD, weights_TK), gradient),
        strict=True,
    ):
        assert torch.allclose(mine, wanted)
