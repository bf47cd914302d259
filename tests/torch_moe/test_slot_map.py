"""The committed placement: bijections, versions, and what happens after a broken movement."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.integrations.torch_moe.parallel.slot_map import PlacementBroken, SlotMap


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_inverse(seed: int, num_layers: int, num_experts: int) -> None:
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(num_experts) for _ in range(num_layers)])
    slot_map = SlotMap(table)
    assert torch.equal(
        slot_map.slot_to_logical.gather(1, slot_map.logical_to_slot), torch.arange(num_experts).expand(num_layers, -1)
    )


def test_publish_writes_into_the_same_tensors() -> None:
    slot_map = SlotMap.identity(2, 4)
    table = slot_map.logical_to_slot
    slot_map.publish([[1, 0, 2, 3], [3, 2, 1, 0]], 1)
    assert table.tolist() == [[1, 0, 2, 3], [3, 2, 1, 0]] and slot_map.version == 1
    assert slot_map.logical_to_slot.data_ptr() == table.data_ptr()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2, 3], [0, 0, 2, 3]], r"logical_to_slot\[1\]: not a permutation"),
        ([[0, 1, 2, 4], [0, 1, 2, 3]], r"logical_to_slot\[0\]"),
        ([[-1, 1, 2, 3], [0, 1, 2, 3]], r"logical_to_slot\[0\]"),
        ([[0, 1, 2, 3]], r"shape \(1, 4\), expected \(2, 4\)"),
        ([0, 1, 2, 3], "expected integers"),
        ([[0.0, 1.0, 2.0, 3.0]] * 2, "float64"),
    ],
)
def test_a_wrong_map_is_refused_and_changes_nothing(table: list[list[int]], message: str) -> None:
    slot_map = SlotMap.identity(2, 4)
    with pytest.raises(InvalidInput, match=message):
        slot_map.publish(table, 1)
    assert slot_map.version == 0 and slot_map.logical_to_slot.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("version", [0, 2, -1])
def test_versions_follow_one_another(version: int) -> None:
    with pytest.raises(InvalidInput, match="expected 1"):
        SlotMap.identity(1, 2).publish([[1, 0]], version)


def test_poison_refuses_every_read_until_restored() -> None:
    slot_map = SlotMap.identity(1, 2)
    slot_map.poison("rank 3 died")
    slot_map.poison("later")
    for read in (
        lambda: slot_map.logical_to_slot,
        lambda: slot_map.slot_to_logical,
        lambda: slot_map.version,
        lambda: slot_map.publish([[1, 0]], 1),
    ):
        with pytest.raises(PlacementBroken, match="rank 3 died"):
            read()
    assert issubclass(PlacementBroken, RoutePackError) and slot_map.is_broken
    slot_map.restore([[1, 0]], 7)
    assert slot_map.version == 7 and slot_map.logical_to_slot.tolist() == [[1, 0]] and not slot_map.is_broken
