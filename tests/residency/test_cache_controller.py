"""The cache controller: never far from the best order it knows, and blind to the future."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import random_trace

from routepack_opt.residency import read_trace, replay_cache, trace_from_routes
from routepack_opt.residency.cache.controller import ORDERS, control
from routepack_opt.residency.cache.events import event_trace
from routepack_opt.residency.traces.route_trace import RouteTrace

if TYPE_CHECKING:
    from pathlib import Path

CYCLES = (0.25, 0.5, 0.75, 0.9, 0.99, 1.0, 1.5, 2.5)


def first_tokens(trace: RouteTrace, num_tokens: int) -> RouteTrace:
    return RouteTrace(
        trace.source, trace.num_experts, trace.layers, trace.expert_bytes, trace.experts[:num_tokens],
        trace.prefill[:num_tokens], trace.turns[:num_tokens],
    )  # fmt: skip


def drifting(rng: np.random.Generator, num_tokens: int, period: int) -> RouteTrace:
    """Every ``period`` tokens another set of 4 of 32 experts is used, two a token: recency is right, history wrong."""
    sets = np.array([rng.choice(32, size=(3, 4)) for _ in range(0, num_tokens, period)])
    tokens = [
        [rng.choice(np.unique(layer), size=2, replace=np.unique(layer).size < 2) for layer in sets[t // period]]
        for t in range(num_tokens)
    ]
    return trace_from_routes([np.array(tokens)], 32, 1, prompt_tokens=8)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.4, 3.0), cut=st.integers(10, 70))
def test_decisions_do_not_look_ahead(seed: int, share: float, cut: int) -> None:
    trace = random_trace(np.random.default_rng(seed), num_tokens=80, num_layers=3, num_experts=12, top_k=2)
    capacity = max(3, int(share * trace.cycle_bytes))
    whole, _ = control(event_trace(trace), capacity)
    part, _ = control(event_trace(first_tokens(trace, cut)), capacity)
    # a turn's prefill is one pass: cut in decode only
    if not trace.prefill[cut - 1 : cut + 1].any():
        assert whole[: part.size].tolist() == part.tolist()


@pytest.mark.parametrize("period", [10, 40])
@pytest.mark.parametrize("capacity", [4, 9, 15, 24])
def test_close_to_the_best_simple_policy_when_routing_drifts(period: int, capacity: int) -> None:
    trace = drifting(np.random.default_rng(period), 600, period)
    rates = {p: replay_cache(trace, p, capacity).decode.hit_rate for p in ("lru", "lfu", "pinned", "ours")}
    assert rates["ours"] >= max(rates["lru"], rates["pinned"]) - 0.01, rates


def test_it_follows_recency_when_recency_pays() -> None:
    trace = drifting(np.random.default_rng(1), 800, 8)
    result = replay_cache(trace, "ours", 15)
    assert result.switches and result.switches[-1][1] in ("lru", "decayed 1", "decayed 4")
    assert {order for _, order in result.switches} <= set(ORDERS)
    assert [batch for batch, _ in result.switches] == sorted({batch for batch, _ in result.switches})


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_at_least_lru_and_pinned_in_both_regimes(data_dir: Path, name: str) -> None:
    trace = read_trace(data_dir / "traces" / f"{name}.route.csv")
    events = event_trace(trace)
    for capacity in (4000 << 20, *(int(cycles * trace.cycle_bytes) for cycles in CYCLES)):
        rates = {p: replay_cache(events, p, capacity).decode.hit_rate for p in ("lru", "lfu", "pinned", "ours")}
        assert rates["ours"] >= max(rates["lru"], rates["pinned"]) - 0.01, (capacity, rates)
        assert rates["ours"] >= rates["lfu"] - 0.001, (capacity, rates)


@pytest.mark.data
@pytest.mark.parametrize("name", ["law", "intent", "summary"])
def test_long_token_traces_too(data_dir: Path, name: str) -> None:
    trace = read_trace(data_dir / "routes" / f"dsv2lite_{name}.npz", num_experts=64, expert_bytes=1)
    events = event_trace(first_tokens(trace, 2000))
    for cycles in (0.9, 1.5, 4.0):
        capacity = int(cycles * trace.cycle_bytes)
        rates = {p: replay_cache(events, p, capacity).decode.hit_rate for p in ("lru", "lfu", "pinned", "ours")}
        assert rates["ours"] >= max(rates.values()) - 0.01, (cycles, rates)
