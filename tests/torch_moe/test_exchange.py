"""Samples travel whole to the rank that trains them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from harness import run_ranks

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
from routepack_opt.integrations.torch_moe.step.exchange import exchange_samples, owners
from routepack_opt.integrations.torch_moe.step.samples import TrainSample, pack_row


@pytest.mark.distributed
def test_every_sample_arrives_whole() -> None:
    rng = np.random.default_rng(0)
    holders, owner_of = rng.integers(0, 3, 23).tolist(), rng.integers(0, 4, 23).tolist()  # rank 3 holds none
    found = run_ranks("dispatch_workers:exchange", 4, {"num_samples": 23, "holders": holders, "owner_of": owner_of})
    assert all(rank["right"] for rank in found) and sum(rank["count"] for rank in found) == 23


@pytest.mark.distributed
def test_what_is_wrong_on_one_rank_is_refused_on_all() -> None:
    right, wrong = run_ranks("dispatch_workers:exchange_refuses", 2)
    assert all("DP ranks 0..1" in messages[0] for messages in (right, wrong))
    assert "rank 1 cannot send" in right[1] and "sample 5: outside" in wrong[1]


def test_one_process_keeps_its_samples() -> None:
    sample = TrainSample(torch.arange(3))
    assert exchange_samples({1: sample, 0: sample}, [0, 0], ParallelMesh.single()) == {0: sample, 1: sample}
    with pytest.raises(InvalidInput, match="sample 2: outside"):
        exchange_samples({2: sample}, [0, 0], ParallelMesh.single())


def test_owners_of_cells() -> None:
    assert owners([[[0, 3], [1]], [[2], [4]]], 5).tolist() == [0, 1, 0, 0, 1]


def test_a_row_packs_tokens_routes_and_fields() -> None:
    samples = {
        4: TrainSample(torch.tensor([1, 2, 3]), torch.full((2, 1, 2), 5, dtype=torch.int16), {"mask": torch.ones(3)}),
        7: TrainSample(torch.tensor([9, 8]), torch.full((2, 1, 2), 6, dtype=torch.int32), {"mask": torch.zeros(2)}),
        8: TrainSample(torch.tensor([0]), None, {"mask": torch.zeros(1)}),
    }
    row = pack_row([4, 7, 8], samples)
    assert row.tokens_T.tolist() == [1, 2, 3, 9, 8, 0] and row.cu_seqlens_S1.tolist() == [0, 3, 5, 6]
    assert row.routes_TLK is not None and row.routes_TLK[:, 0, 0].tolist() == [5, 5, -1, 6, 6, -1]
    targets_T, valid_T = row.next_tokens()
    assert targets_T[valid_T].tolist() == [2, 3, 8] and valid_T.tolist() == [True, True, False, True, False, False]
    assert row.fields["mask"].tolist() == [1, 1, 1, 0, 0, 0]
    empty = pack_row([], samples)
    assert empty.num_tokens == 0 and empty.cu_seqlens_S1.tolist() == [0] and empty.next_tokens()[1].tolist() == []


@pytest.mark.parametrize(
    ("tokens", "routes", "fields", "message"),
    [
        (torch.zeros(0, dtype=torch.long), None, {}, "tokens: expected int64"),
        (torch.zeros(2, dtype=torch.int32), None, {}, "int32"),
        (torch.zeros(4, dtype=torch.long), torch.zeros(2, 1, 1, dtype=torch.int16), {}, r"\[4 or 3, L, K\]"),
        (torch.zeros(2, dtype=torch.long), torch.zeros(2, 1, 1), {}, "float32"),
        (torch.zeros(2, dtype=torch.long), None, {"mask": torch.zeros(3)}, r"fields\['mask'\]"),
    ],
)
def test_a_wrong_sample_is_refused(tokens, routes, fields, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput, match=message):
        TrainSample(tokens, routes, fields)


def test_a_cell_that_does_not_fit_together_is_refused() -> None:
    one, two = (
        TrainSample(torch.zeros(1, dtype=torch.long)),
        TrainSample(torch.zeros(1, dtype=torch.long), None, {"a": torch.zeros(1)}),
    )
    with pytest.raises(InvalidInput, match="sample 5: not on this rank"):
        pack_row([5], {0: one})
    with pytest.raises(InvalidInput, match=r"sample 1: has fields \['a'\]"):
        pack_row([0, 1], {0: one, 1: two})
