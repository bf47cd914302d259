"""The transfer plan carried out on arrays: every rank a list of arrays, every message a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.transfer_plan import (
    EXPERT,
    LAYER,
    SOURCE,
    SOURCE_SLOT,
    TARGET,
    TARGET_SLOT,
    SlotBytes,
    TransferPlan,
    check_placement,
    plan_transfers,
)


def random_slots(rng: np.random.Generator, num_layers: int, num_experts: int) -> np.ndarray:
    return np.stack([rng.permutation(num_experts) for _ in range(num_layers)]).astype(np.int64)


def fill(tensors: list[SlotBytes], slots: np.ndarray, num_ranks: int) -> list[list[np.ndarray]]:
    """State [tensor][rank] -> uint8 [H, bytes]; every byte depends on tensor, expert and position."""
    num_slots = slots.shape[1] // num_ranks
    state = []
    for index, tensor in enumerate(tensors):
        owners = np.argsort(slots[tensor.moe_layer])
        rows = (owners[:, None] * 31 + index * 7 + np.arange(tensor.slot_bytes) * 13) % 251
        state.append(list(rows.astype(np.uint8).reshape(num_ranks, num_slots, tensor.slot_bytes)))
    return state


def carry_out(plan: TransferPlan, state: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What materialise does, on arrays; bytes sent and received [P], and the most staged [P]."""
    sent, received, most = (np.zeros(plan.num_ranks, dtype=np.int64) for _ in range(3))
    for chunk in plan.chunks:
        staged: list[list[tuple[np.ndarray, int, int, int, np.ndarray]]] = [[] for _ in range(plan.num_ranks)]
        for rows in (chunk.copies, *chunk.rounds):
            for row in rows:
                for piece in (p for p in chunk.pieces if p.moe_layer == row[LAYER]):
                    ranks = state[piece.tensor]
                    data = ranks[row[SOURCE]][row[SOURCE_SLOT], piece.low : piece.high].copy()
                    staged[row[TARGET]].append((ranks[row[TARGET]], row[TARGET_SLOT], piece.low, piece.high, data))
                    if row[SOURCE] != row[TARGET]:
                        sent[row[SOURCE]] += data.size
                        received[row[TARGET]] += data.size
        most = np.maximum(most, [sum(landing[-1].size for landing in rank) for rank in staged])
        for tensor, slot, low, high, data in (landing for rank in staged for landing in rank):
            tensor[slot, low:high] = data
    return sent, received, most


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, list[SlotBytes], int]:
    num_ranks, num_slots, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    old = random_slots(rng, num_layers, num_ranks * num_slots)
    new = old.copy()
    for layer in range(num_layers):
        if draw(st.booleans()):
            new[layer] = rng.permutation(num_ranks * num_slots)
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        item = draw(st.sampled_from([1, 2, 4, 8]))
        tensors.append(SlotBytes(draw(st.integers(0, num_layers - 1)), item * draw(st.integers(0, 300)), item))
    return old, new, num_ranks, tensors, draw(st.integers(0, 3000))


@given(cases())
@settings(deadline=None, max_examples=150)
def test_every_byte_lands_within_the_budget_and_none_travels_in_vain(case: object) -> None:
    old, new, num_ranks, tensors, budget = case  # type: ignore[misc]
    try:
        plan = plan_transfers(old, new, num_ranks, tensors, chunk_bytes=budget)
    except InvalidInput as error:
        least = int(str(error).split()[-1])
        assert budget < least
        plan = plan_transfers(old, new, num_ranks, tensors, chunk_bytes=least)
        budget = least
    state = fill(tensors, old, num_ranks)
    sent, received, most = carry_out(plan, state)
    for got, wanted in zip(state, fill(tensors, new, num_ranks), strict=True):
        assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
    assert (sent == plan.sent_bytes).all() and (received == plan.received_bytes).all()
    assert (most == plan.staging_bytes).all() and (most <= budget).all()

    num_slots = old.shape[1] // num_ranks
    moved = old // num_slots != new // num_slots
    sizes = np.array([sum(t.slot_bytes for t in tensors if t.moe_layer == layer) for layer in range(len(old))])
    assert plan.planned_bytes == sent.sum() == (moved.sum(axis=1) * sizes).sum()
    assert (plan.moved_experts == moved.sum(axis=1)).all()


@given(cases())
@settings(deadline=None, max_examples=60)
def test_rounds_are_free_of_conflicts_and_as_few_as_can_be(case: object) -> None:
    old, new, num_ranks, tensors, _ = case  # type: ignore[misc]
    for chunk in plan_transfers(old, new, num_ranks, tensors, chunk_bytes=1 << 20).chunks:
        layers = {piece.moe_layer for piece in chunk.pieces}
        for rows in chunk.rounds:
            assert len(set(rows[:, SOURCE].tolist())) == len(set(rows[:, TARGET].tolist())) == len(rows)
            assert set(rows[:, LAYER].tolist()) <= layers
        if chunk.rounds:
            together = np.concatenate(chunk.rounds)
            assert len({(r[LAYER], r[EXPERT]) for r in together.tolist()}) == len(together)
            busiest = max(np.bincount(together[:, SOURCE]).max(), np.bincount(together[:, TARGET]).max())
            assert len(chunk.rounds) == busiest


def test_a_cycle_through_all_ranks_at_one_byte_a_chunk() -> None:
    old = np.arange(4)[None]
    new = np.roll(old, 1, axis=1)
    tensors = [SlotBytes(0, 5, 1)]
    plan = plan_transfers(old, new, 4, tensors, chunk_bytes=1)
    assert len(plan.chunks) == 5 and plan.num_rounds == 5
    state = fill(tensors, old, 4)
    carry_out(plan, state)
    assert all((a == b).all() for a, b in zip(state[0], fill(tensors, new, 4)[0], strict=True))


def test_a_small_change_fits_one_chunk_and_large_cuts_are_aligned() -> None:
    old = np.arange(8)[None]
    new = old[:, [4, 1, 2, 3, 0, 5, 6, 7]]
    one = plan_transfers(old, new, 2, [SlotBytes(0, 1000, 4), SlotBytes(0, 24, 8)], chunk_bytes=1024)
    assert [[p.num_bytes for p in c.pieces] for c in one.chunks] == [[1000, 24]]
    many = plan_transfers(old, new, 2, [SlotBytes(0, 5000, 4)], chunk_bytes=2000)
    assert [p.low % 512 for c in many.chunks for p in c.pieces] == [0, 0, 0]


def test_unchanged_maps_plan_nothing() -> None:
    old = random_slots(np.random.default_rng(0), 3, 8)
    plan = plan_transfers(old, old, 4, [SlotBytes(1, 64, 4)], chunk_bytes=0)
    assert not plan.chunks and plan.planned_bytes == 0 and not plan.staging_bytes.any()


@pytest.mark.parametrize(
    ("new", "ranks", "tensors", "words"),
    [
        ([[0, 0, 2, 3]], 2, [], "new logical_to_slot[0]: not a bijection"),
        ([[0, 1]], 2, [], "shape (1, 2)"),
        ([[1, 0, 2, 3]], 3, [], "do not divide over 3"),
        ([[1, 0, 2, 3]], 2, [SlotBytes(1, 4, 4)], "slot_tensors[0]: MoE layer 1"),
        ([[2, 3, 0, 1]], 2, [SlotBytes(0, 8, 4)], "needs at least 8"),
    ],
)
def test_refusals_name_what_is_wrong(new: list[list[int]], ranks: int, tensors: list[SlotBytes], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_transfers([[0, 1, 2, 3]], new, ranks, tensors, chunk_bytes=7)
    assert words in str(caught.value)


def test_check_placement_takes_lists() -> None:
    assert check_placement([[1, 0]]).dtype == np.int64
