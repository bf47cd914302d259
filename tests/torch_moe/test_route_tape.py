"""Record, replay, and what a tape refuses."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape

OWN = torch.tensor([[0, 1], [2, 3], [4, 5]])


def test_off_keeps_nothing() -> None:
    tape = RouteTape.off()
    assert tape.choose(0, OWN) is OWN and not tape.replays
    with pytest.raises(InvalidInput, match="nothing recorded"):
        tape.recorded()


def test_recording_and_recomputation() -> None:
    tape = RouteTape.recording()
    for layer in (0, 1, 1, 0):  # recomputation asks again
        tape.choose(layer, OWN + layer)
    recorded = tape.recorded()
    assert recorded.dtype == torch.int16 and recorded.shape == (3, 2, 2)
    assert torch.equal(recorded[:, 1], (OWN + 1).short())


@pytest.mark.parametrize("make", [RouteTape.off, RouteTape.recording])
def test_recomputation_with_another_choice_gets_the_first_one(make) -> None:  # type: ignore[no-untyped-def]
    tape = make()
    first = tape.for_pass()
    assert torch.equal(first.choose(0, OWN), OWN)
    second = tape.for_pass()
    assert torch.equal(second.choose(0, OWN + 1), OWN + 1)  # another pass is free to choose
    assert torch.equal(first.choose(0, OWN + 2), OWN)  # a kernel that is not deterministic chose otherwise
    if make is RouteTape.recording:
        assert torch.equal(tape.recorded()[:, 0], (OWN + 1).short())


def test_recorded_ids_above_int16() -> None:
    tape = RouteTape.recording()
    tape.choose(0, OWN + 40000)
    assert tape.recorded().dtype == torch.int32


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_replay_with_missing_rows(dtype: type) -> None:
    routes = np.array([[[7, 6], [1, 0]], [[-1, -1], [5, 4]], [[3, 2], [-1, -1]]], dtype=dtype)
    tape = RouteTape.replaying(routes)
    for _ in range(2):
        assert tape.choose(0, OWN).tolist() == [[7, 6], [2, 3], [3, 2]]
        assert tape.choose(1, OWN).tolist() == [[1, 0], [5, 4], [4, 5]]
    assert tape.choose(0, OWN).dtype == torch.int64 and tape.replays
    assert tape.recorded()[:, 0].tolist() == [[7, 6], [2, 3], [3, 2]]


def test_vllm_dtype() -> None:
    assert RouteTape.replaying(np.ones((3, 1, 2), np.uint16)).choose(0, OWN).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.zeros(3, 2), r"expected integers \[T, L, K\]"),
        (torch.zeros(3, 2, 2), "float32"),
        (torch.tensor([[[0, 1]], [[0, -1]]]), r"routes\[1,0\]: -1 in part"),
    ],
)
def test_refuses(routes: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RouteTape.replaying(routes)


@pytest.mark.parametrize(("shape", "layer"), [((2, 1, 2), 0), ((3, 1, 1), 0), ((3, 1, 2), 1)])
def test_a_tape_of_another_size_is_refused_when_asked(shape: tuple[int, ...], layer: int) -> None:
    with pytest.raises(InvalidInput, match="cannot answer MoE layer"):
        RouteTape.replaying(torch.zeros(shape, dtype=torch.long)).choose(layer, OWN)
