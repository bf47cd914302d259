"""The same training on EP 4 x EDP 1, EP 2 x EDP 2 and EP 1 x EDP 4 as in one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

WORKERS = "train_step_workers"
LENGTHS = [7, 3, 12, 5, 9, 2, 8, 11, 4, 6, 10, 5, 3, 7, 2, 13, 6]
TIGHT = {"loss": 1e-5, "norm": 1e-4, "weight": 1e-4, "exp_avg": 1e-4, "exp_avg_sq": 1e-4}
MESHES = [(4, 1), (2, 2), (1, 4), (2, [[3, 0], [1, 2]])]


def compare(ep: int, shards: Any, limits: dict[str, float] = TIGHT, **kwargs: Any) -> dict[str, Any]:
    kwargs = {"ep": ep, "shards": shards, "lengths": LENGTHS} | kwargs
    found: dict[str, Any] = run_ranks(f"{WORKERS}:against_one_process", 4, kwargs)[0]
    for name, limit in limits.items():
        assert found[name] <= limit, f"{name}: {found}"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("ep", "shards"), MESHES)
@pytest.mark.parametrize("shard_expert_state", [False, True])
def test_equals_one_process(ep: int, shards: Any, shard_expert_state: bool) -> None:
    compare(ep, shards, shard_expert_state=shard_expert_state, permute=True, max_grad_norm=0.5)


@pytest.mark.distributed
def test_clipping_uses_the_norm_of_the_whole_model() -> None:
    found = compare(2, 2, max_grad_norm=0.05)
    assert min(found["norms"]) > 0.05  # every step was clipped


@pytest.mark.distributed
def test_cells_with_1_and_100_response_tokens() -> None:
    # a sample of 2 t tokens has t response tokens but for the last, which predicts nothing
    compare(2, 2, lengths=[3, 202, 5, 40], cells=[[[0], [1], [2], [3]]])


@pytest.mark.distributed
@pytest.mark.parametrize("missing_last", [False, True])
def test_empty_cells_and_pad_tokens_change_nothing(missing_last: bool) -> None:
    cells = [[[0, 1], [], [2], [3]], [[], [4], [], []]]
    compare(2, 2, lengths=LENGTHS[:5], cells=cells, pad_multiple=8, missing_last=missing_last)


@pytest.mark.distributed
def test_routes_nobody_recorded_are_the_routers_own() -> None:
    compare(4, 1, replay=False, steps=2)


@pytest.mark.distributed
def test_small_buckets() -> None:
    compare(2, 2, bucket_bytes=2048)


@pytest.mark.distributed
@pytest.mark.parametrize("shard_expert_state", [False, True])
def test_bfloat16_with_float32_masters(shard_expert_state: bool) -> None:
    # bf16 sums differ by layout: 8 bits of mantissa
    limits = {"loss": 5e-3, "norm": 5e-2, "weight": 5e-2, "master": 5e-2, "exp_avg": 0.15}
    compare(2, 2, limits, dtype="bfloat16", shard_expert_state=shard_expert_state)


@pytest.mark.distributed
def test_ranks_that_disagree_on_rows_all_refuse() -> None:
    messages = run_ranks(f"{WORKERS}:uneven_rows", 2)
    assert all("1 to 2 over the ranks" in message for message in messages)


@pytest.mark.distributed
def test_sharding_halves_expert_state() -> None:
    for found in run_ranks(f"{WORKERS}:state_bytes", 4, {"shard": True}):
        assert found["columns"] == -(-found["size"] // 2)


def test_replay_trains_the_router_and_the_replayed_experts_only() -> None:
    from train_step_workers import router_gradient

    found = router_gradient()
    assert found["router"] > 0 and found["used"] > 0 and found["unused"] == 0 and found["finite"]
