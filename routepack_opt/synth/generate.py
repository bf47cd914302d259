"""Draw a window: prompt-correlated lengths, then prompt-correlated routing counts, one prompt at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.synth.presets import PRESETS, SynthPreset
from routepack_opt.window import Window

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A share no expert falls below, as a part of 1/E: keeps Gamma draws that underflow from dividing by zero.
_FLOOR = 1e-6


def synth(preset: str | SynthPreset, num_samples: int | None = None, seed: int = 0) -> Window:
    """A window with the statistics of ``preset``; equal arguments give equal windows.

    Every sample's demand obeys what top-k routing can produce: ``0 <= a[i, l, e] <= rows`` and
    ``sum_e a[i, l, e] = top_k * rows`` with ``rows = length - 1`` (the last token of a rollout is not routed).

    Parameters
    ----------
    preset
        A name in :data:`PRESETS`, or your own :class:`SynthPreset`.
    num_samples
        N; None takes the preset's. A prompt has ``samples_per_prompt`` samples, the last prompt fewer when N is no
        multiple of it.
    seed
        Of this window. The layers' expert popularity belongs to the preset, not to the seed.

    Raises
    ------
    InvalidInput
        Unknown preset, or a count or seed out of range.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise InvalidInput(f"preset: {preset!r} is unknown; expected one of {', '.join(PRESETS)}")
        preset = PRESETS[preset]
    count = preset.num_samples if num_samples is None else _whole("num_samples", num_samples, low=1)
    seed = _whole("seed", seed, low=0)
    group_ids = np.arange(count, dtype=np.int64) // preset.samples_per_prompt
    lengths = _draw_lengths(preset, group_ids, np.random.default_rng([seed, 0]))
    popularity = _draw_popularity(preset)
    demand = np.empty((count, preset.num_layers, preset.num_experts), dtype=np.int32)
    for start in range(0, count, preset.samples_per_prompt):  # one prompt at a time bounds the memory of the draws
        stop = min(start + preset.samples_per_prompt, count)
        rng = np.random.default_rng([seed, 1, start // preset.samples_per_prompt])
        demand[start:stop] = _draw_demand(preset, popularity, lengths[start:stop] - 1, rng)
    return Window(lengths, demand, group_ids=group_ids, top_k=preset.top_k, meta=_meta(preset, seed))


def _whole(name: str, value: Any, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InvalidInput(f"{name}: {value!r} is not a whole number >= {low}")
    return int(value)


def _meta(preset: SynthPreset, seed: int) -> dict[str, Any]:
    """What the command line needs to suggest how to plan this window."""
    return {
        "synth": {
            "preset": preset.name,
            "seed": seed,
            "dp": preset.dp,
            "ep": preset.ep,
            "shards": preset.shards,
            "token_cap": preset.token_cap,
            "cost": preset.cost.to_json(),
        }
    }


def _draw_lengths(preset: SynthPreset, group_ids: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """int64 [N], prompt tokens + lognormal response, within [1, cap], scaled so that the mean is the preset's."""
    num_groups = int(group_ids[-1]) + 1
    prompt = preset.prompt_tokens * np.exp(0.3 * rng.standard_normal(num_groups) - 0.045)
    log_response = preset.sigma_prompt * rng.standard_normal(num_groups)[group_ids]
    log_response += preset.sigma_sample * rng.standard_normal(group_ids.shape[0])
    response = np.exp(log_response)

    def at_scale(scale: float) -> NDArray[np.float64]:
        return np.clip(prompt[group_ids] + scale * response, 1.0, float(preset.token_cap))

    low, high = 0.0, float(preset.token_cap) / response.min()
    for _ in range(60):  # the clipped mean rises with the scale: bisection
        middle = 0.5 * (low + high)
        if at_scale(middle).mean() < preset.mean_length:
            low = middle
        else:
            high = middle
    return np.asarray(at_scale(low)).astype(np.int64)


def _draw_popularity(preset: SynthPreset) -> NDArray[np.float64]:
    """float64 [L, E], share of each expert in a layer's assignments: independent over layers."""
    rng = np.random.default_rng([preset.model_seed, preset.num_layers, preset.num_experts])
    weights: NDArray[np.float64] = rng.standard_gamma(
        preset.expert_concentration, (preset.num_layers, preset.num_experts)
    )
    factors = rng.standard_gamma(preset.group_concentration, (preset.num_layers, preset.num_expert_groups))
    group_of_expert = np.arange(preset.num_experts) * preset.num_expert_groups // preset.num_experts
    return _capped_shares(weights * factors[:, group_of_expert], preset.top_k)


def _draw_demand(
    preset: SynthPreset, popularity: NDArray[np.float64], rows: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int32]:
    """int32 [n, L, E], counts of the n samples of one prompt; ``rows`` int64 [n] is the routed tokens of each.

    The sample's Dirichlet stands for token noise too: a multinomial of k*rows draws around a Dirichlet of
    concentration c varies like a Dirichlet of concentration 1 / (1/c + 1/(k*rows)), so no token is drawn.
    """
    prompt = _capped_shares(rng.standard_gamma(preset.prompt_concentration * popularity), preset.top_k)
    assignments = np.maximum(preset.top_k * rows, 1)
    concentration = 1.0 / (1.0 / preset.sample_concentration + 1.0 / assignments)
    shapes = (concentration[:, None, None] * prompt).astype(np.float32)
    shares = _capped_shares(rng.standard_gamma(shapes, dtype=np.float32).astype(np.float64), preset.top_k)
    return _round_shares(shares, rows, preset.top_k, rng)


def _capped_shares(weights: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """``weights`` [..., E] scaled to sum 1 with no share above 1/top_k (an expert takes a token at most once)."""
    num_experts = weights.shape[-1]
    cap = (1.0 - 1e-9) / top_k  # a hair below, so that rounding cannot pass the cap
    shares: NDArray[np.float64] = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    shares += _FLOOR / num_experts
    shares /= shares.sum(axis=-1, keepdims=True)
    flat = shares.reshape(-1, num_experts)  # a view: clipped below, in place
    over = np.flatnonzero(flat.max(axis=1) > cap)
    while over.size:  # clip, give the excess to the others in proportion; each pass clips at least one more expert
        part = flat[over]
        full = part >= cap
        rest = np.where(full, 0.0, part)
        scale = (1.0 - cap * full.sum(axis=1)) / rest.sum(axis=1)
        part = np.where(full, cap, rest * scale[:, None])
        flat[over] = part
        over = over[part.max(axis=1) > cap]
    return shares


def _round_shares(
    shares: NDArray[np.float64], rows: NDArray[np.int64], top_k: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """int32 [n, L, E], systematic rounding of ``shares * top_k * rows``: each count is the floor or the ceiling.

    One uniform offset per sample and layer keeps the expectation exact, and floors of one running sum make every
    layer add up to top_k * rows exactly.
    """
    totals = (top_k * rows).astype(np.float64)[:, None, None]
    running = np.cumsum(shares, axis=-1)
    running *= totals / running[..., -1:]
    running[..., -1:] = totals
    running += rng.random((*shares.shape[:2], 1))
    np.floor(running, out=running)
    return np.diff(running, axis=-1, prepend=0.0).astype(np.int32)
