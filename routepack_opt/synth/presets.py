"""What each synthetic window looks like, and the topology, token cap and cost it should be planned with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from routepack_opt.cost import CostModel, Stage
from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from routepack_opt.topology import Topology


@dataclass(frozen=True)
class SynthPreset:
    """Shape and statistics of a synthetic window; measured figures are in ``docs/synth.md``.

    Parameters
    ----------
    name, about
        Preset name and one line on what it imitates.
    num_samples, samples_per_prompt
        N of the default window; rollouts of one prompt (the last prompt may have fewer).
    num_layers, num_experts, top_k
        MoE layers L, logical experts E, experts a token uses.
    mean_length
        Mean tokens of a sample (prompt + response); the drawn lengths are scaled to meet it.
    prompt_tokens
        Mean prompt length, the same for all samples of a prompt.
    sigma_prompt, sigma_sample
        Standard deviations of the log response length: between prompts, and between the samples of one prompt.
    expert_concentration
        Symmetric Dirichlet parameter of a layer's expert popularity (smaller is more skewed).
    num_expert_groups, group_concentration
        Blocks of neighbouring experts share a popularity factor, Gamma-distributed around 1 with variance
        1 / group_concentration: real counts are far less even over EP ranks than independent experts would be.
    prompt_concentration, sample_concentration
        Dirichlet concentrations of a prompt's routing around the layer's, and of a sample's around its prompt's
        (smaller is more varied).
    model_seed
        Fixes the layers' expert popularity: windows of one preset come from one model, whatever their seed.
    dp, ep, shards, token_cap
        Recommended topology and token cap.
    linear_share
        Share of the attention layers that are linear (KDA): 0 gives the default one-stage cost.
    """

    name: str
    about: str
    num_samples: int
    num_layers: int
    num_experts: int
    top_k: int
    mean_length: float
    prompt_tokens: float
    sigma_prompt: float
    sigma_sample: float
    expert_concentration: float
    group_concentration: float
    prompt_concentration: float
    sample_concentration: float
    dp: int
    ep: int
    shards: int
    token_cap: int
    samples_per_prompt: int = 8
    num_expert_groups: int = 8
    model_seed: int = 1
    linear_share: float = 0.0

    def __post_init__(self) -> None:
        """Validate what the generator relies on."""
        if not 1 <= self.top_k < self.num_experts:
            raise InvalidInput(f"preset {self.name!r}.top_k: {self.top_k} is not in 1..num_experts - 1")
        if not 1.0 <= self.mean_length <= self.token_cap:
            raise InvalidInput(f"preset {self.name!r}.mean_length: {self.mean_length} is not in 1..token_cap")
        if not 0.0 <= self.prompt_tokens < self.mean_length:
            raise InvalidInput(f"preset {self.name!r}.prompt_tokens: {self.prompt_tokens} is not in [0, mean_length)")
        for field in ("num_samples", "num_layers", "samples_per_prompt", "num_expert_groups"):
            if getattr(self, field) < 1:
                raise InvalidInput(f"preset {self.name!r}.{field}: {getattr(self, field)} is below 1")

    @property
    def cost(self) -> CostModel:
        """Recommended cost: alpha 4 a layer, beta 7e-4 C a full-attention layer, expert_weight 1."""
        if not self.linear_share:
            return CostModel.default(self.num_layers, self.token_cap)
        full = 1.0 - self.linear_share
        alpha = 4.0 * self.num_layers
        beta = 7e-4 * self.token_cap * self.num_layers
        return CostModel((Stage("linear", self.linear_share * alpha, 0.0), Stage("full", full * alpha, full * beta)))

    @property
    def topology(self) -> Topology:
        """Recommended topology."""
        from routepack_opt.topology import Topology

        return Topology(dp=self.dp, ep=self.ep, shards=self.shards)


_ALL = (
    SynthPreset(
        name="tiny",
        about="the paper's smaller run: 7.9B parameters, 1.3B active, one EDP shard",
        num_samples=512, num_layers=24, num_experts=128, top_k=8,
        mean_length=1000.0, prompt_tokens=120.0, sigma_prompt=0.9, sigma_sample=0.65,
        expert_concentration=1.5, group_concentration=4.7, model_seed=4,
        prompt_concentration=76.0, sample_concentration=84.0,
        dp=8, ep=8, shards=1, token_cap=8192,
    ),
    SynthPreset(
        name="flash",
        about="the paper's larger run: 124B parameters, 5.1B active, KDA + MLA, two EDP shards",
        num_samples=512, num_layers=24, num_experts=256, top_k=8,
        mean_length=0.975 * 4 * 16 * 8192 / 512, prompt_tokens=120.0, sigma_prompt=0.9, sigma_sample=0.65,
        expert_concentration=1.5, group_concentration=12.8, model_seed=2,
        prompt_concentration=46.0, sample_concentration=46.0,
        dp=16, ep=8, shards=2, token_cap=8192, linear_share=0.875,
    ),
    SynthPreset(
        name="v3",
        about="DeepSeek-V3 shape: 58 MoE layers x 256 experts on 32 EP ranks",
        num_samples=512, num_layers=58, num_experts=256, top_k=8,
        mean_length=0.95 * 4 * 32 * 16384 / 512, prompt_tokens=120.0, sigma_prompt=0.9, sigma_sample=0.65,
        expert_concentration=1.4, group_concentration=8.0,
        prompt_concentration=60.0, sample_concentration=120.0,
        dp=32, ep=32, shards=1, token_cap=16384,
    ),
    SynthPreset(
        name="qwen3-30b",
        about="Qwen3-30B-A3B on a GSM8K/MATH-like step: 256 samples, one EDP shard",
        num_samples=256, num_layers=48, num_experts=128, top_k=8,
        mean_length=900.0, prompt_tokens=120.0, sigma_prompt=0.9, sigma_sample=0.65,
        expert_concentration=1.5, group_concentration=12.0,
        prompt_concentration=150.0, sample_concentration=300.0,
        dp=8, ep=8, shards=1, token_cap=8192,
    ),
    SynthPreset(
        name="qwen3-30b-long",
        about="Qwen3-30B-A3B with reasoning answers: mean length about half the cap",
        num_samples=256, num_layers=48, num_experts=128, top_k=8,
        mean_length=0.47 * 32768, prompt_tokens=200.0, sigma_prompt=0.8, sigma_sample=0.55,
        expert_concentration=1.5, group_concentration=12.0,
        prompt_concentration=150.0, sample_concentration=300.0,
        dp=16, ep=8, shards=2, token_cap=32768,
    ),
)  # fmt: skip

PRESETS: dict[str, SynthPreset] = {preset.name: preset for preset in _ALL}
