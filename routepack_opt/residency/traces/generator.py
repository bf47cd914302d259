"""Synthetic routing where no trace exists: expert shares of token sources, calibrated to real counts.

Four levels, each a Dirichlet around the one above: layer popularity of a **domain** -> **sequence** -> **passage** (a
stretch of consecutive tokens) -> tokens. Layers are independent: neighbouring layers of real counts correlate by
-0.00 to 0.02 (V2-Lite) and 0.12 to 0.34 (V3). Domains of one model share a part of their popularity.

The fits (docs/residency-traces.md says how) are by moments, which keep the busiest experts: a median over layers, then
over files.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

# V2-Lite, windows of 64 consecutive tokens and whole sequences against their domain: concentrations 1000 and 317 where
# the domain's own is 1.79 * 64 = 115.
SEQUENCE_RATIO = 8.7
PASSAGE_RATIO = 2.8
PASSAGE_TOKENS = 64
_FLOOR = 1e-6  # of an even share: Gamma draws that underflow must not divide by zero


@dataclass(frozen=True)
class Calibration:
    """What real counts say about a family of models.

    Parameters
    ----------
    source
        Which counts, as results print it.
    popularity
        Symmetric Dirichlet parameter of a layer's expert shares within one domain; smaller is more skewed.
    domain_correlation
        Correlation of an expert's share between two domains of one model.
    """

    source: str
    popularity: float
    domain_correlation: float


# V3's files are serving runs, not domains: its correlation is V2-Lite's.
V3 = Calibration("DeepSeek-V3/R1 counts of 8 serving runs", 1.59, 0.13)
V2_LITE = Calibration("DeepSeek-V2-Lite routes of 3 task domains", 1.79, 0.13)
OLMOE = Calibration("OLMoE counts of 6 domains", 1.27, 0.08)
MIXTRAL = Calibration("Mixtral 8x7B counts of 5 domains", 58.0, 0.44)
QWEN15_MOE = Calibration("Qwen1.5-MoE counts of 4 data sets x 20 iterations", 0.42, 0.36)

# DBRX, V2, DeepSeekMoE-16B and 8x22B have no public counts: each borrows those of its nearest relative.
CALIBRATIONS: dict[str, Calibration] = {
    "deepseek-v3": V3,
    "deepseek-v2": V2_LITE,
    "deepseek-v2-lite": V2_LITE,
    "deepseek-moe-16b": V2_LITE,
    "olmoe": OLMOE,
    "mixtral-8x7b": MIXTRAL,
    "mixtral-8x22b": MIXTRAL,
    "dbrx": MIXTRAL,
    "qwen1.5-moe-a2.7b": QWEN15_MOE,
}


@dataclass(frozen=True)
class GeneratorConfig:
    """How synthetic sources change over the windows of a workload.

    Parameters
    ----------
    num_domains
        Task domains of the stream.
    domain_windows
        Windows a domain dominates before the next takes over; 0 keeps one mixture for ever.
    dominance
        Share of new sequences that belong to the dominant domain; the rest are spread evenly.
    prompt_tokens
        Tokens of a sequence in prefill.
    cohorts
        Decode: groups of sequences a chiplet's share is averaged over; members of one start together.
    lifetime_windows
        Decode: windows until a cohort's sequences are in another passage or replaced.
    """

    num_domains: int = 3
    domain_windows: int = 64
    dominance: float = 0.8
    prompt_tokens: int = 1024
    cohorts: int = 8
    lifetime_windows: int = 64


DEFAULT_CONFIG = GeneratorConfig()


class Generator:
    """Expert counts of synthetic windows; any window can be drawn on its own, and equal arguments give equal counts."""

    def __init__(
        self,
        calibration: Calibration,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_chiplets: int,
        seed: int,
        config: GeneratorConfig = DEFAULT_CONFIG,
    ) -> None:
        """Draw the popularity of every domain.

        Raises
        ------
        InvalidInput
            Sizes below 1, or top_k not below the experts.
        """
        for name, value in (("num_layers", num_layers), ("num_chiplets", num_chiplets), ("top_k", top_k)):
            if value < 1:
                raise InvalidInput(f"{name}: {value} is below 1")
        if top_k >= num_experts:
            raise InvalidInput(f"top_k: {top_k} is not below num_experts {num_experts}")
        if seed < 0:
            raise InvalidInput(f"seed: {seed} is negative")
        self.calibration, self.config = calibration, config
        self.shape = (num_layers, num_experts)
        self.top_k, self.num_chiplets, self.seed = top_k, num_chiplets, seed
        self.domains = self._draw_domains()
        self._cached_sequence = lru_cache(maxsize=4)(self._sequence)
        self._cached_cohort = lru_cache(maxsize=num_chiplets * config.cohorts)(self._cohort)

    def prefill_counts(self, window: int, num_tokens: int) -> NDArray[np.int32]:
        """int32 [L, E, C], counts of consecutive prompt tokens, dealt to chiplets in contiguous blocks."""
        rng = self._rng(0, window)
        edges = window * num_tokens + block_edges(num_tokens, self.num_chiplets)
        shares = np.stack([self._prompt_share(int(a), int(b), num_tokens) for a, b in itertools.pairwise(edges)])
        return self._counts(shares, np.diff(edges), rng)

    def decode_counts(self, window: int, num_active: int) -> NDArray[np.int32]:
        """int32 [L, E, C], counts of one token of each active sequence; sequences stay on their chiplet."""
        rng = self._rng(1, window)
        config, sizes = self.config, np.diff(block_edges(num_active, self.num_chiplets))
        shares = np.zeros((self.num_chiplets, *self.shape))
        for chiplet in range(self.num_chiplets):
            members = max(1.0, sizes[chiplet] / config.cohorts)
            for cohort in range(config.cohorts):
                age = window + cohort * config.lifetime_windows // config.cohorts
                shares[chiplet] += self._cached_cohort(chiplet, cohort, age // config.lifetime_windows, members)
        return self._counts(shares / config.cohorts, sizes, rng)

    def _rng(self, *keys: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *keys])

    def _draw_domains(self) -> NDArray[np.float64]:
        """float64 [D, L, E]: Gamma(rho a) common to all domains plus Gamma((1 - rho) a) of each is Dirichlet(a)."""
        rng, fit = self._rng(2), self.calibration
        shared = fit.domain_correlation * fit.popularity
        weights = rng.standard_gamma(shared, self.shape)
        weights = weights + rng.standard_gamma(fit.popularity - shared, (self.config.num_domains, *self.shape))
        return capped_shares(weights, self.top_k)

    def _pick_domain(self, window: int, rng: np.random.Generator) -> int:
        config = self.config
        dominant = (window // config.domain_windows) % config.num_domains if config.domain_windows else 0
        return dominant if rng.random() < config.dominance else int(rng.integers(config.num_domains))

    def _around(self, share: NDArray[np.float64], ratio: float, rng: np.random.Generator) -> NDArray[np.float64]:
        concentration = ratio * self.calibration.popularity * self.shape[1]
        return capped_shares(rng.standard_gamma(concentration * share), self.top_k)

    def _sequence(self, number: int, window: int) -> NDArray[np.float64]:
        """Share of prompt ``number``, which starts in ``window``."""
        rng = self._rng(3, number)
        return self._around(self.domains[self._pick_domain(window, rng)], SEQUENCE_RATIO, rng)

    def _prompt_share(self, first: int, last: int, window_tokens: int) -> NDArray[np.float64]:
        """Mean share of the passages that tokens [first, last) of the prompt stream lie in."""
        last = max(last, first + 1)  # a chiplet without tokens has a share too; nothing is drawn from it
        total = np.zeros(self.shape)
        for passage in range(first // PASSAGE_TOKENS, (last - 1) // PASSAGE_TOKENS + 1):
            begun, ended = passage * PASSAGE_TOKENS, (passage + 1) * PASSAGE_TOKENS
            number = begun // self.config.prompt_tokens
            share = self._cached_sequence(number, number * self.config.prompt_tokens // max(window_tokens, 1))
            share = self._around(share, PASSAGE_RATIO, self._rng(4, passage))
            total += (min(last, ended) - max(first, begun)) * share
        return total / (last - first)

    def _cohort(self, chiplet: int, cohort: int, generation: int, members: float) -> NDArray[np.float64]:
        """Mean share of a cohort: ``members`` sequences, each in one passage."""
        rng, life = self._rng(5, chiplet, cohort, generation), self.config.lifetime_windows
        born = max(0, generation * life - cohort * life // self.config.cohorts)
        ratio = members / (1.0 / SEQUENCE_RATIO + 1.0 / PASSAGE_RATIO)
        return self._around(self.domains[self._pick_domain(born, rng)], ratio, rng)

    def _counts(
        self, shares: NDArray[np.float64], sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int32]:
        """int32 [L, E, C] from shares [C, L, E]: top_k picks a token, no expert more often than there are tokens."""
        counts = np.empty((self.num_chiplets, *self.shape), dtype=np.int64)
        for chiplet, size in enumerate(sizes.tolist()):
            share = shares[chiplet] / shares[chiplet].sum(axis=1, keepdims=True)
            counts[chiplet] = rng.multinomial(size * self.top_k, share)
            while (over := counts[chiplet] > size).any():
                for layer in np.flatnonzero(over.any(axis=1)):
                    row = counts[chiplet, layer]
                    excess = int((row - size)[row > size].sum())
                    np.minimum(row, size, out=row)
                    room = np.where(row < size, share[layer], 0.0)
                    row += rng.multinomial(excess, room / room.sum())
        return np.ascontiguousarray(counts.transpose(1, 2, 0), dtype=np.int32)


def block_edges(num_tokens: int, num_blocks: int) -> NDArray[np.int64]:
    """int64 [num_blocks + 1]: block c holds tokens [edges[c], edges[c + 1]), sizes that differ by one at most."""
    return np.arange(num_blocks + 1, dtype=np.int64) * num_tokens // num_blocks


def capped_shares(weights: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """``weights`` [..., E] scaled to sum 1 with no share above 1 / top_k: a token picks an expert at most once."""
    num_experts = weights.shape[-1]
    cap = (1.0 - 1e-9) / top_k
    shares: NDArray[np.float64] = weights + _FLOOR * np.maximum(
        weights.mean(axis=-1, keepdims=True), np.finfo(np.float64).tiny
    )
    shares /= shares.sum(axis=-1, keepdims=True)
    flat = shares.reshape(-1, num_experts)
    for row in np.flatnonzero(flat.max(axis=1) > cap):
        part = flat[row]
        while part.max() > cap:  # clip, give the excess to the others in proportion; one more expert is full each time
            full = part >= cap
            rest = part[~full].sum()
            part[~full] *= (1.0 - cap * full.sum()) / rest
            part[full] = cap
    return shares
