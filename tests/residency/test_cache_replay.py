"""Cache replay: against a naive cache on small traces, and the recorded figures of the real ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import HEADER, NAMES, ROWS, random_trace, write

from routepack_opt.errors import InvalidInput
from routepack_opt.residency import POLICIES, read_route_csv, replay_cache
from routepack_opt.residency.cache.events import event_trace
from routepack_opt.residency.cache.replay import replay_order

if TYPE_CHECKING:
    from pathlib import Path

    from routepack_opt.residency import RouteTrace

MIB = 1 << 20
CACHE = 4000 * MIB


def naive_batches(trace: RouteTrace) -> list[tuple[bool, list[int], list[int]]]:
    """(prefill, keys in order of first use, tokens of each) of every batch, written from the description alone."""
    batches = []
    for turn in sorted(set(trace.turns.tolist())):
        rows = [t for t in range(trace.num_tokens) if trace.turns[t] == turn]
        prompt = [t for t in rows if trace.prefill[t]]
        passes = ([(True, prompt)] if prompt else []) + [(False, [t]) for t in rows if not trace.prefill[t]]
        for prefill, tokens in passes:
            for layer in range(trace.num_layers):
                used = Counter(
                    layer * trace.num_experts + int(e) for t in tokens for e in trace.experts[t, layer] if e >= 0
                )
                if used:
                    batches.append((prefill, list(used), list(used.values())))
    return batches


def naive_hits(trace: RouteTrace, policy: str, capacity: int) -> list[bool]:
    """One dictionary, one sort an eviction."""
    batches = naive_batches(trace)
    sizes = np.repeat(trace.expert_bytes, trace.num_experts)
    cache: dict[int, int] = {}
    count: Counter[int] = Counter()
    clock, hits = 0, []
    for at, (_, keys, _) in enumerate(batches):
        for key in keys:
            hits.append(key in cache)
            clock += 1
            cache[key] = clock
            count[key] += 1
        while sum(sizes[key] for key in cache) > capacity:
            free = [key for key in cache if key not in keys]
            if not free:
                break
            if policy == "lru":
                victim = min(free, key=lambda key: cache[key])
            elif policy == "lfu":
                victim = min(free, key=lambda key: (count[key], cache[key]))
            else:
                victim = max(free, key=lambda key: (next_batch(batches, at, key), -cache[key]))
            del cache[victim]
    return hits


def next_batch(batches: list[tuple[bool, list[int], list[int]]], at: int, key: int) -> float:
    """When a key is used next: batch, then place inside it."""
    for later in range(at + 1, len(batches)):
        if key in batches[later][1]:
            return later + batches[later][1].index(key) / 1000
    return float("inf")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["lru", "lfu", "belady"]), share=st.floats(0.2, 1.2))
def test_replay_equals_the_naive_cache(seed: int, policy: str, share: float) -> None:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, num_tokens=20, num_layers=3, num_experts=6, top_k=2, num_turns=2)
    capacity = max(3, int(share * trace.cycle_bytes * 2))
    result = replay_cache(trace, policy, capacity)
    assert result.hit.tolist() == naive_hits(trace, policy, capacity)
    sizes = np.repeat(trace.expert_bytes, trace.num_experts)
    keys = [key for _, batch, _ in naive_batches(trace) for key in batch]
    streamed = sum(int(sizes[key]) for key, hit in zip(keys, result.hit.tolist(), strict=True) if not hit)
    assert result.total.bytes_streamed == streamed == result.prefill.bytes_streamed + result.decode.bytes_streamed
    assert result.total.accesses == len(keys)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_events_equal_the_naive_batches(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed), num_tokens=15, num_layers=2, num_experts=5, top_k=2, num_turns=3)
    events = event_trace(trace)
    found = [
        (bool(events.batch_prefill[b]), events.keys[a:z].tolist(), events.tokens[a:z].tolist())
        for b, (a, z) in enumerate(zip(events.offsets[:-1], events.offsets[1:], strict=True))
    ]
    assert found == naive_batches(trace)
    assert (np.diff(events.batch_pass) >= 0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 3.0))
def test_with_one_expert_size_no_policy_beats_belady(seed: int, share: float) -> None:
    trace = random_trace(np.random.default_rng(seed), num_tokens=60, num_layers=3, num_experts=8, top_k=2)
    trace.expert_bytes[:] = 1
    capacity = max(1, int(share * trace.cycle_bytes))
    hits = {policy: replay_cache(trace, policy, capacity).total.hits for policy in POLICIES}
    assert hits["belady"] == max(hits.values())


def test_a_batch_is_never_evicted_by_itself(tmp_path: Path) -> None:
    """Three experts of ten bytes in layer 0 with room for two: all are there until the next batch."""
    trace = read_route_csv(write(tmp_path, HEADER + NAMES + ROWS))
    result = replay_cache(trace, "lru", 40)
    # prefill layer 0 keeps its three experts (30 bytes), layer 1's two (40) push them out
    assert result.hit.tolist() == [False] * 5 + [False, False, False, False]
    assert replay_cache(trace, "lru", 1000).hit.tolist() == [False] * 5 + [True, False, True, False]


def test_pinned_keeps_the_most_frequent_of_the_prefill() -> None:
    rng = np.random.default_rng(5)
    trace = random_trace(rng, num_tokens=80, num_layers=3, num_experts=16, top_k=3)
    trace.expert_bytes[:] = 1
    trace.prefill[:] = np.arange(80) < 20
    capacity = 24
    events = event_trace(trace)
    prefill = events.per_access(events.batch_prefill)
    counts = np.bincount(events.keys[prefill], weights=events.tokens[prefill], minlength=48)
    pins = np.argsort(-counts, kind="stable")[:capacity]
    expected = np.isin(events.keys[~prefill], pins)
    hit = replay_cache(events, "pinned", capacity).hit[~prefill]
    # a batch of pins may push pins out of a cache this small, and a pin not yet read again leaves its room to others
    assert abs(int(hit.sum()) - int(expected.sum())) <= capacity
    assert (hit == expected).mean() > 0.9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_holds_everything_misses_each_expert_once(policy: str) -> None:
    trace = random_trace(np.random.default_rng(3), num_tokens=50, num_layers=3, num_experts=8, top_k=2)
    events = event_trace(trace)
    result = replay_cache(events, policy, int(events.sizes.sum()))
    assert result.total.accesses - result.total.hits == np.unique(events.keys).size


def test_refusals() -> None:
    trace = random_trace(np.random.default_rng(3), num_tokens=5, num_layers=2, num_experts=4, top_k=2)
    with pytest.raises(InvalidInput, match="capacity: 0 bytes; expected at least"):
        replay_cache(trace, "lru", 0)
    with pytest.raises(InvalidInput, match="policy: 'fifo' is unknown; expected one of lru"):
        replay_cache(trace, "fifo", 1000)


def test_order_of_scores_decides() -> None:
    """Scores that rise with the key keep the largest keys."""
    trace = random_trace(np.random.default_rng(8), num_tokens=40, num_layers=2, num_experts=8, top_k=2)
    trace.expert_bytes[:] = 1
    events = event_trace(trace)
    hit = replay_order(events, events.keys.astype(np.float64), events.keys, 6)
    last = events.keys >= 14
    first_use = np.zeros(events.num_accesses, dtype=bool)
    first_use[np.unique(events.keys, return_index=True)[1]] = True
    assert (hit | first_use)[last].all()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "accesses", "hits", "decode"),
    [
        ("qwen", 39526, 29600, {"lru": 80.3, "lfu": 80.8, "belady": 92.7}),
        ("gemma", 24578, 18871, {"lru": 81.9, "lfu": 83.4, "belady": 92.9}),
    ],
)
def test_recorded_hits_exactly(data_dir: Path, name: str, accesses: int, hits: int, decode: dict[str, float]) -> None:
    events = event_trace(read_route_csv(data_dir / "traces" / f"{name}.route.csv"))
    total = replay_cache(events, "lru", CACHE).total
    assert (total.accesses, total.hits) == (accesses, hits)
    for policy, percent in decode.items():
        assert round(100 * replay_cache(events, policy, CACHE).decode.hit_rate, 1) == percent, policy


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_lru_hits_nothing_under_one_token_cycle(data_dir: Path, name: str) -> None:
    trace = read_route_csv(data_dir / "traces" / f"{name}.route.csv")
    for cycles in (0.25, 0.5, 0.75, 0.9):
        assert replay_cache(trace, "lru", int(cycles * trace.cycle_bytes)).decode.hits == 0
    # eviction waits for the end of a batch, so nearly a cycle is enough for some hits
    assert 0.05 < replay_cache(trace, "lru", int(0.99 * trace.cycle_bytes)).total.hit_rate < 0.20


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_pinned_is_the_greedy_fit(data_dir: Path, name: str) -> None:
    """The stated definition - most frequent of the prefill that fit - on experts of two sizes."""
    trace = read_route_csv(data_dir / "traces" / f"{name}.route.csv")
    events = event_trace(trace)
    prefill = events.per_access(events.batch_prefill)
    counts = np.bincount(events.keys[prefill], weights=events.tokens[prefill], minlength=events.sizes.size)
    for capacity in (CACHE, int(0.9 * trace.cycle_bytes)):
        pins, used = set(), 0
        for key in np.argsort(-counts, kind="stable"):
            if counts[key] and used + events.sizes[key] <= capacity:
                pins.add(int(key))
                used += int(events.sizes[key])
        share = np.mean([int(key) in pins for key in events.keys[~prefill]])
        assert abs(replay_cache(events, "pinned", capacity).decode.hit_rate - share) < 0.005
