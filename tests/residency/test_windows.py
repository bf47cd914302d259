"""Workloads of decision windows: shapes, dealing of tokens, replay of short traces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from trace_files import random_trace

from routepack_opt.errors import InvalidInput
from routepack_opt.residency import read_trace, synthetic_workload, trace_from_routes, trace_workload
from routepack_opt.residency.traces.windows import count_window

if TYPE_CHECKING:
    from pathlib import Path

    from routepack_opt.residency import RouteTrace


def numbered(lengths: list[int], num_experts: int = 64) -> RouteTrace:
    """Token t of the whole stream uses expert t, so windows show which tokens they hold."""
    edges = np.concatenate(([0], np.cumsum(lengths)))
    routes = [np.arange(a, b).reshape(-1, 1, 1) for a, b in itertools.pairwise(edges)]
    return trace_from_routes(routes, num_experts, 1, prompt_tokens=0)


def tokens_of(window: np.ndarray) -> list[list[int]]:
    """Experts of each chiplet."""
    return [np.flatnonzero(window[0, :, c]).tolist() for c in range(window.shape[2])]


def test_prefill_deals_consecutive_tokens_in_blocks() -> None:
    work = trace_workload(numbered([6, 6]), "prefill", 2, window_tokens=4, num_windows=3)
    assert [tokens_of(window) for window in work] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert not work.synthetic and work.note == "12 recorded tokens of 2 sequences"


def test_prefill_replays_whole_sequences_in_another_order() -> None:
    work = trace_workload(numbered([3, 4, 5]), "prefill", 1, window_tokens=12, num_windows=20, seed=3)
    assert all(tokens_of(window) == [list(range(12))] for window in work)
    assert "replayed: a token is used 20.0 times" in work.note
    half = trace_workload(numbered([3, 4, 5]), "prefill", 1, window_tokens=6, num_windows=40, seed=3)
    laps = [tokens_of(half[2 * lap])[0] for lap in range(20)]
    assert laps[0] == list(range(6)) and len({tuple(lap) for lap in laps}) > 1


def test_decode_runs_sequences_side_by_side() -> None:
    work = trace_workload(numbered([2, 3, 2, 2]), "decode", 2, window_tokens=2, num_windows=6)
    # position 0 reads tokens 0 1 5 6 and again, position 1 reads 2 3 4 7 8
    assert [tokens_of(window) for window in work] == [
        [[0], [2]],
        [[1], [3]],
        [[5], [4]],
        [[6], [7]],
        [[0], [8]],
        [[1], [2]],
    ]


def test_decode_with_few_sequences_spreads_its_positions() -> None:
    work = trace_workload(numbered([9]), "decode", 3, window_tokens=3, num_windows=4)
    assert tokens_of(work[0]) == [[0], [3], [6]] and tokens_of(work[3]) == [[3], [6], [0]]


def test_decode_leaves_prompts_out() -> None:
    trace = random_trace(np.random.default_rng(0), num_tokens=40, num_layers=2, num_experts=8, top_k=2)
    trace.prefill[:] = np.arange(40) < 10
    assert trace_workload(trace, "decode", 2, window_tokens=4).note.startswith("30 recorded tokens")
    assert trace_workload(trace, "prefill", 2, window_tokens=4).note.startswith("40 recorded tokens")


def test_missing_routes_count_nothing_and_uneven_blocks_differ_by_one() -> None:
    experts = np.array([[[0, 1]], [[-1, -1]], [[0, 2]]], dtype=np.int32)
    assert count_window(experts, 3, 2)[0].tolist() == [[1, 1], [1, 0], [0, 1]]


def test_layers_profile_and_array() -> None:
    trace = random_trace(np.random.default_rng(0), num_tokens=64, num_layers=4, num_experts=8, top_k=2)
    whole = trace_workload(trace, "prefill", 2, window_tokens=8, num_windows=20)
    part = trace_workload(trace, "prefill", 2, window_tokens=8, num_windows=20, layers=[1, 3])
    assert (whole.array()[:, [1, 3]] == part.array()).all()
    assert (whole.profile() == whole.array(0, 2).sum(axis=0)).all() and whole.profile_windows == 2
    assert len(whole) == 20 and (whole[19] == whole.array(19)[0]).all()
    with pytest.raises(IndexError):
        whole[20]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_synthetic_workloads_are_labelled_and_reproducible(phase: str) -> None:
    made = [
        synthetic_workload("deepseek-v2-lite", phase, 16, num_layers=2, num_experts=64, top_k=6, seed=s)  # type: ignore[arg-type]
        for s in (4, 4, 5)
    ]
    assert made[0].synthetic and made[0].note.startswith("synthetic, calibrated to DeepSeek-V2-Lite")
    assert len(made[0]) == 256 and made[0].window_tokens == {"prefill": 2048, "decode": 512}[phase]
    assert (made[0][7] == made[1][7]).all() and not (made[0][7] == made[2][7]).all()
    assert int(made[0][255].sum()) == made[0].window_tokens * 6 * 2


def test_refusals() -> None:
    trace = numbered([4])
    for change, message in (
        ({"window_tokens": 0}, "window_tokens: 0 is below 1"),
        ({"num_windows": 0}, "num_windows: 0 is below 1"),
        ({"num_windows": 10**8}, "num_windows: 100000000 with the profile; expected at most 100000"),
        ({"layers": [1]}, r"layers: \[1\]; expected positions 0 to 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            trace_workload(trace, "decode", 2, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="phase: 'train' is unknown"):
        trace_workload(trace, "train", 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is of another model"):
        trace_workload([trace, numbered([4], num_experts=5)], "decode", 2)
    with pytest.raises(InvalidInput, match="model: 'gpt' is unknown"):
        synthetic_workload("gpt", "decode", 2, num_layers=1, num_experts=4, top_k=2)


@pytest.mark.data
def test_windows_of_real_routes(data_dir: Path) -> None:
    traces = [
        read_trace(data_dir / "routes" / f"dsv2lite_{name}.npz", num_experts=64, expert_bytes=1)
        for name in ("law", "intent", "summary")
    ]
    prefill, decode = (trace_workload(traces, phase, 16) for phase in ("prefill", "decode"))  # type: ignore[arg-type]
    assert prefill[3].shape == decode[3].shape == (26, 64, 16)
    assert int(prefill[200].sum()) == 2048 * 26 * 6 and int(decode[255].sum()) == 512 * 26 * 6
