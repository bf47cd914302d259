"""Window results: energy adds up, the power budget throttles the next window, pressures are shares."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_stage import random_demand, random_layout

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import build_scene
from routepack_opt.residency.mapping.mapping import MapWeights
from routepack_opt.residency.simulator.energy import other_seconds
from routepack_opt.residency.simulator.simulate_window import WindowSimulator, simulate

SCENE = build_scene("paper", "deepseek-moe-16b", num_layers=3)


def case(tokens: int = 512):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    return random_layout(SCENE, rng), random_demand(SCENE, rng, tokens)


@pytest.mark.parametrize("level", ["stage", "event"])
def test_energy_is_the_sum_of_what_moved_and_computed(level: str) -> None:
    layout, demand = case()
    result = simulate(SCENE, layout, demand, level=level)  # type: ignore[arg-type]
    energy, streamed = result.energy, np.array(result.streamed_bytes)
    assert energy.mac_j == pytest.approx(demand.sum() * 3 * 2048 * 1408 * 0.8e-12)
    assert energy.bank_j == pytest.approx(streamed * np.array([1.25e-12, 31.8e-12, 160e-12]))
    assert energy.link_j == pytest.approx(result.link_bytes.sum() * 6.4e-12)
    assert energy.idle_j == pytest.approx(25 * result.end_to_end_s)
    assert energy.total_j == pytest.approx(sum((*energy[:3], *energy.bank_j, *energy[4:])))
    assert streamed.sum() == result.accesses * SCENE.expert_bytes[0]
    assert result.hits == result.accesses - result.reads[-1]
    assert result.edp == pytest.approx(energy.total_j * result.end_to_end_s)


def test_pressures_are_shares_and_the_busiest_part_shows() -> None:
    layout, demand = case()
    result = simulate(SCENE, layout, demand)
    pressures = result.pressures
    assert 0 < pressures.link < 1 and 0 < pressures.bank <= 1 and 0 < pressures.load <= 1
    assert len(pressures.tier) == 3 and all(0 <= share <= 1 for share in pressures.tier)
    assert pressures.migration == 0
    assert result.end_to_end_s == result.routed_s + other_seconds(SCENE, demand.sum() / 6 / 3)


def test_a_window_over_its_power_budget_slows_the_next_by_the_ratio() -> None:
    hungry = dataclasses.replace(Package.load("paper"), power_budget_w=60.0)
    scene = build_scene(hungry, "deepseek-moe-16b", num_layers=3)
    layout, demand = case()
    simulator = WindowSimulator(scene)
    first = simulator.simulate(random_layout(scene, np.random.default_rng(0)), demand)
    power = first.energy.total_j / first.end_to_end_s
    assert power > 60 and first.next_throttle == pytest.approx(power / 60)
    second = simulator.simulate(layout, demand, throttle=first.next_throttle)
    assert second.end_to_end_s == pytest.approx(first.end_to_end_s * first.next_throttle)
    assert second.next_throttle < first.next_throttle


def test_no_traffic_costs_no_time_and_no_energy() -> None:
    layout, demand = case()
    for level in ("stage", "event"):
        result = simulate(SCENE, layout, np.zeros_like(demand), level=level)  # type: ignore[arg-type]
        assert result.end_to_end_s == 0 and result.energy.total_j == 0 and result.next_throttle == 1
        assert result.pressures[:3] == (0, 0, 0)


def test_wrong_arguments_are_refused() -> None:
    layout, demand = case()
    with pytest.raises(InvalidInput, match=r"demand: int64 .* expected int32 \(3, 64, 16\)"):
        simulate(SCENE, layout, demand.astype(np.int64))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"demand\[0, 0, 0\]: -3 is negative"):
        bad = demand.copy()
        bad[0, 0, 0] = -3
        simulate(SCENE, layout, bad)
    with pytest.raises(InvalidInput, match="is no published replica; expected"):
        simulate(SCENE, layout, demand, np.full(demand.shape, 3, dtype=np.int8))
    with pytest.raises(InvalidInput, match="mapping: 'best' is no rule"):
        simulate(SCENE, layout, demand, "best")
    with pytest.raises(InvalidInput, match="level: 'flit' is unknown"):
        simulate(SCENE, layout, demand, level="flit")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="map weight 'bank': nan"):
        MapWeights(bank=float("nan"))
