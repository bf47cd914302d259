"""Synthetic windows: conservation, reproducibility, and statistics close to the counts they are fitted to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.traces.generator import (
    CALIBRATIONS,
    V2_LITE,
    V3,
    Calibration,
    Generator,
    GeneratorConfig,
    capped_shares,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

ONE_DOMAIN = GeneratorConfig(num_domains=1)


def generator(calibration: Calibration = V2_LITE, seed: int = 0, config: GeneratorConfig = ONE_DOMAIN) -> Generator:
    return Generator(calibration, num_layers=6, num_experts=64, top_k=6, num_chiplets=16, seed=seed, config=config)


def moment_alpha(counts: NDArray[np.int64]) -> float:
    """Symmetric Dirichlet parameter by the variance of shares: median over layers."""
    found = []
    for row in counts[counts.sum(axis=1) > 0]:
        share, num = row / row.sum(), row.size
        variance = share.var() - (1 - 1 / num) / num / row.sum()
        found.append(((1 / num) * (1 - 1 / num) / variance - 1) / num)
    return float(np.median(found))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000), window=st.integers(0, 400), chiplets=st.integers(1, 5), tokens=st.integers(0, 40),
    alpha=st.floats(0.05, 50), decode=st.booleans(),
)  # fmt: skip
def test_every_token_picks_top_k_different_experts(
    seed: int, window: int, chiplets: int, tokens: int, alpha: float, decode: bool
) -> None:
    made = Generator(
        Calibration("test", alpha, 0.3), num_layers=2, num_experts=5, top_k=3, num_chiplets=chiplets, seed=seed
    )
    counts = made.decode_counts(window, tokens) if decode else made.prefill_counts(window, tokens)
    blocks = np.diff(np.arange(chiplets + 1) * tokens // chiplets)
    assert counts.dtype == np.int32 and counts.shape == (2, 5, chiplets)
    assert (counts.sum(axis=1) == 3 * blocks).all()
    assert (counts >= 0).all() and (counts <= blocks).all()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_windows_do_not_depend_on_order_or_instance(phase: str) -> None:
    first, second = (
        generator(config=GeneratorConfig(prompt_tokens=300)),
        generator(config=GeneratorConfig(prompt_tokens=300)),
    )
    draw = {g: (g.prefill_counts if phase == "prefill" else g.decode_counts) for g in (first, second)}
    forward = [draw[first](w, 96) for w in range(12)]
    backward = [draw[second](w, 96) for w in reversed(range(12))][::-1]
    assert all((a == b).all() for a, b in zip(forward, backward, strict=True))
    other = generator(seed=1)
    assert not np.array_equal(forward[0], (other.prefill_counts if phase == "prefill" else other.decode_counts)(0, 96))


def test_popularity_and_correlation_of_domains_are_as_asked() -> None:
    fit = Calibration("test", 2.0, 0.5)
    made = Generator(fit, num_layers=60, num_experts=128, top_k=4, num_chiplets=1, seed=3)
    assert moment_alpha((made.domains[0] * 1e9).astype(np.int64)) == pytest.approx(2.0, rel=0.1)
    pairs = [np.corrcoef(made.domains[0, layer], made.domains[1, layer])[0, 1] for layer in range(60)]
    assert np.mean(pairs) == pytest.approx(0.5, abs=0.05)
    neighbours = [np.corrcoef(made.domains[0, layer], made.domains[0, layer + 1])[0, 1] for layer in range(59)]
    assert abs(np.mean(neighbours)) < 0.05


def test_domain_changes_move_the_demand() -> None:
    config = GeneratorConfig(num_domains=2, domain_windows=10, dominance=1.0, lifetime_windows=4)
    made = generator(config=config)
    for draw, tokens in ((made.prefill_counts, 2048), (made.decode_counts, 512)):
        share = np.stack([draw(w, tokens).sum(axis=2) for w in range(20)]).astype(float)
        near = np.corrcoef(share[5].ravel(), share[9].ravel())[0, 1]
        far = np.corrcoef(share[5].ravel(), share[18].ravel())[0, 1]
        assert near > far + 0.2


def test_capped_shares_sum_to_one_below_the_cap() -> None:
    shares = capped_shares(np.array([[100.0, 1, 1, 0], [0, 0, 0, 0], [5, 5, 1e-300, 0]]), 2)
    assert np.allclose(shares.sum(axis=1), 1) and (shares <= 0.5).all() and (shares > 0).all()


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="top_k: 4 is not below num_experts 4"):
        Generator(V3, num_layers=1, num_experts=4, top_k=4, num_chiplets=1, seed=0)
    with pytest.raises(InvalidInput, match="num_chiplets: 0 is below 1"):
        Generator(V3, num_layers=1, num_experts=4, top_k=2, num_chiplets=0, seed=0)


@pytest.mark.data
def test_fits_are_those_of_the_counts(data_dir: Path) -> None:
    lite = [
        moment_alpha(np.load(data_dir / "routes" / f"dsv2lite_{n}.npz")["counts"]) for n in ("law", "intent", "summary")
    ]
    assert np.median(lite) == pytest.approx(V2_LITE.popularity, rel=0.02)
    files = sorted((data_dir / "loads").glob("*code_in*.json")) + sorted((data_dir / "loads").glob("prefill_in*.json"))
    v3 = [moment_alpha(np.array(json.loads(f.read_text())["logical_count"])) for f in files]
    assert len(files) == 8 and np.median(v3) == pytest.approx(V3.popularity, rel=0.02)
    npz = np.load(data_dir / "loads" / "olmoe_mixtral_expert_counts.npz")
    for model, name in (("olmoe", "olmoe"), ("mistral", "mixtral-8x7b")):
        counts = [npz[key] for key in npz.files if key.startswith(f"{model}|expert_counts|")]
        assert np.median([moment_alpha(c) for c in counts]) == pytest.approx(CALIBRATIONS[name].popularity, rel=0.02)


@pytest.mark.data
def test_prefill_windows_vary_like_real_ones(data_dir: Path) -> None:
    """Shares of consecutive 2048-token windows of one domain: concentration around their mean within a factor of 3."""

    def concentration(windows: NDArray[np.float64]) -> float:
        share = windows / windows.sum(axis=2, keepdims=True)
        mean = share.mean(axis=0)
        return float((mean * (1 - mean)).sum() / share.var(axis=0, ddof=1).sum() - 1)

    real = []
    for name in ("law", "summary"):
        routes = np.load(data_dir / "routes" / f"dsv2lite_{name}.npz")["routed_experts"]
        blocks = [routes[at : at + 2048] for at in range(0, len(routes) - 2047, 2048)]
        counts = [[np.bincount(block[:, layer].ravel(), minlength=64) for layer in range(26)] for block in blocks]
        real.append(concentration(np.array(counts, dtype=float)))
    made = generator(config=GeneratorConfig(num_domains=1, prompt_tokens=400))
    drawn = concentration(np.stack([made.prefill_counts(w, 2048).sum(axis=2) for w in range(24)]).astype(float))
    assert min(real) / 3 < drawn < max(real) * 3, (real, drawn)
