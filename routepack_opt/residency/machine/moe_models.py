"""The eight models of the HCRMap paper, as their published configurations give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput
from routepack_opt.files import file_path
from routepack_opt.model_shapes import PRESETS, model_shape

if TYPE_CHECKING:
    import os

    from routepack_opt.model_shapes import ModelShape

_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

# Models that are no presets of model_shapes: the fields of their configurations that matter here. DBRX publishes its
# own names (d_model, n_layers, ffn_hidden_size, moe_num_experts ...); its attention and experts have Mixtral's form.
_CONFIGS: dict[str, dict[str, Any]] = {
    "dbrx": {"model_type": "mixtral", "hidden_size": 6144, "num_hidden_layers": 40, "intermediate_size": 10752}
    | {"num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 4}
    | {"sliding_window": None},
    "deepseek-v2": {"model_type": "deepseek_v2", "q_lora_rank": 1536, **_MLA}
    | {"hidden_size": 5120, "num_hidden_layers": 60, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_attention_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "deepseek-moe-16b": {"model_type": "deepseek", "hidden_size": 2048, "num_hidden_layers": 28}
    | {"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16}
    | {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
    | {"moe_layer_freq": 1},
    "mixtral-8x22b": {"model_type": "mixtral", "hidden_size": 6144, "num_hidden_layers": 56}
    | {"intermediate_size": 16384, "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "sliding_window": None},
    "qwen1.5-moe-a2.7b": {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24}
    | {"intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
    | {"decoder_sparse_step": 1, "use_sliding_window": False},
}
PAPER_MODELS = (
    "dbrx",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-moe-16b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen1.5-moe-a2.7b",
)


@dataclass(frozen=True)
class MoeModel:
    """What residency needs to know of a model.

    Parameters
    ----------
    name
        As given.
    hidden, expert_width, num_matrices
        d, d_ff, and weight matrices per routed expert (3: SwiGLU).
    num_layers, num_experts, top_k
        MoE layers, routed experts a layer, experts a token uses.
    other_macs, other_pair_macs
        Multiply-adds of the non-routed events (attention, shared experts, dense layers), whole model: of a token, and
        of a (token, key) pair.
    other_weights
        Weights those events read, whole model.
    """

    name: str
    hidden: int
    expert_width: int
    num_layers: int
    num_experts: int
    top_k: int
    other_macs: int
    other_pair_macs: int
    other_weights: int
    num_matrices: int = 3

    @property
    def expert_weights(self) -> int:
        """Weights of one expert; also the multiply-adds it spends on a token."""
        return self.num_matrices * self.hidden * self.expert_width

    @classmethod
    def from_shape(cls, shape: ModelShape, name: str) -> MoeModel:
        """The part of a model's dimensions that matters here."""
        dense = sum(3 * shape.hidden * layer.dense_width for layer in shape.layers)
        attention = sum(layer.attention.token_madds for layer in shape.layers)
        pairs = sum(layer.attention.pair_madds for layer in shape.layers)
        return cls(
            name=name,
            hidden=shape.hidden,
            expert_width=shape.expert_width,
            num_layers=shape.num_moe_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            other_macs=attention + dense,
            other_pair_macs=pairs,
            other_weights=attention + dense,  # every non-routed weight is used once a token
        )


def moe_model(model: str | os.PathLike[str]) -> MoeModel:
    """One of :data:`PAPER_MODELS`, a preset of ``model_shapes``, or a Hugging Face ``config.json``.

    Raises
    ------
    InvalidInput
        Unknown model, or a field that is missing, wrong or not modelled; names file and field.
    """
    if isinstance(model, str) and model in _CONFIGS:
        return MoeModel.from_shape(model_shape(_CONFIGS[model]), model)
    path = file_path(model)
    if isinstance(model, str) and model not in PRESETS and not path.exists() and path.suffix != ".json":
        names = ", ".join(dict.fromkeys((*PAPER_MODELS, *PRESETS)))
        raise InvalidInput(f"model: {model!r} is neither a file nor one of {names}")
    return MoeModel.from_shape(model_shape(model), str(model))
