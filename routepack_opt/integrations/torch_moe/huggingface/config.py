"""Hugging Face configurations to MoEConfig and back: Qwen3-MoE, Mixtral, and dots1 (DeepSeek-V3 routing).

A field that would change the numbers and is not implemented is refused, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path, read_json
from routepack_opt.integrations.torch_moe.model.config import MoEConfig

if TYPE_CHECKING:
    import os

Family = Literal["qwen3_moe", "mixtral", "dots1"]

ARCHITECTURES: dict[str, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "dots1": "Dots1ForCausalLM",
}
_MISSING = object()


class _Fields:
    """A configuration's fields, with the file named in every refusal."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The first field that is given (null counts as not given)."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _MISSING:
            raise FormatError(f"{self.where}, {names[0]}: missing")
        return default

    def integer(self, *names: str, default: Any = _MISSING) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{self.where}, {names[0]}: expected an integer, found {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(f"{self.where}, {name}: expected a number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}, {name}: expected true or false, found {value!r}")
        return value

    def must_be(self, name: str, expected: Any, *, default: Any) -> None:
        value = self.get(name, default=default)
        if value != expected:
            raise FormatError(f"{self.where}, {name}: {value!r} is not implemented; expected {expected!r}")


def config_from_hf(source: dict[str, Any] | str | os.PathLike[str]) -> MoEConfig:
    """The model of a ``config.json`` (a dictionary, the file, or the folder that holds it).

    Raises
    ------
    FormatError
        Names the file and the field: unknown family, missing or ill-typed field, or a feature not implemented.
    """
    if isinstance(source, dict):
        values, where = source, "config"
    else:
        path = file_path(source)
        path = path / "config.json" if path.is_dir() else path
        values, where = read_json(path), str(path)
    if not isinstance(values, dict):
        raise FormatError(f"{where}: expected a table of fields, found {type(values).__name__}")
    family = values.get("model_type")
    if family not in ARCHITECTURES:
        raise FormatError(f"{where}, model_type: {family!r} is not one of {', '.join(ARCHITECTURES)}")
    fields = _Fields(values, where)
    shared = _shared_fields(fields)
    specific = {"qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "dots1": _dots1}[family](fields)
    try:
        return MoEConfig(**shared, **specific)
    except InvalidInput as error:
        raise FormatError(f"{where}: {error}") from None


def _shared_fields(fields: _Fields) -> dict[str, Any]:
    fields.must_be("hidden_act", "silu", default="silu")
    fields.must_be("attention_dropout", 0.0, default=0.0)
    if fields.get("quantization_config", default=None) is not None:
        raise FormatError(f"{fields.where}, quantization_config: quantised weights are not implemented")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if num_heads < 1:
        raise FormatError(f"{fields.where}, num_attention_heads: expected at least 1, found {num_heads}")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", default=num_heads),
        "head_dim": fields.integer("head_dim", default=hidden_size // num_heads),
        "top_k": fields.integer("num_experts_per_tok"),
        "rope_theta": _rope_theta(fields),
        "norm_eps": fields.number("rms_norm_eps", 1e-5 if fields.get("model_type") == "mixtral" else 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_positions": fields.integer("max_position_embeddings", default=32768),
    }


def _rope_theta(fields: _Fields) -> float:
    default = 1e6 if fields.get("model_type") == "mixtral" else 1e4
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name, default={})
        if not isinstance(rope, dict):
            raise FormatError(f"{fields.where}, {name}: expected a table, found {rope!r}")
        inner = _Fields(rope, f"{fields.where}, {name}")
        kind = inner.get("rope_type", "type", default="default")
        if kind != "default":
            raise FormatError(f"{inner.where}: rope type {kind!r} is not implemented; expected 'default'")
        inner.must_be("partial_rotary_factor", 1.0, default=1.0)
        default = inner.number("rope_theta", default)
    return fields.number("rope_theta", default)


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers", default=[])
    if step < 1 or not isinstance(dense, list):
        raise FormatError(f"{fields.where}, mlp_only_layers and decoder_sparse_step: found {dense!r} and {step}")
    dense_layers = tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step)
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    return {
        "num_experts": fields.integer("num_experts", "num_local_experts"),
        "expert_size": fields.integer("moe_intermediate_size"),
        "dense_layers": dense_layers,
        "dense_size": fields.integer("intermediate_size") if dense_layers else 0,
        "normalise_top_k": fields.flag("norm_topk_prob", False),
        "qk_norm": True,
        "attention_bias": fields.flag("attention_bias", False),
        "sliding_window": window,
    }


def _mixtral(fields: _Fields) -> dict[str, Any]:
    fields.must_be("router_jitter_noise", 0.0, default=0.0)
    window = fields.get("sliding_window", default=None)
    return {
        "num_experts": fields.integer("num_local_experts", "num_experts"),
        "expert_size": fields.integer("intermediate_size"),
        "sliding_window": window,
    }


def _dots1(fields: _Fields) -> dict[str, Any]:
    kinds = fields.get("layer_types", default=["full_attention"])
    if set(kinds) != {"full_attention"}:
        raise FormatError(f"{fields.where}, layer_types: only 'full_attention' in every layer is implemented")
    dense = fields.integer("first_k_dense_replace", default=0)
    expert_size = fields.integer("moe_intermediate_size")
    return {
        "num_experts": fields.integer("n_routed_experts", "num_local_experts", "num_experts"),
        "expert_size": expert_size,
        "dense_layers": tuple(range(dense)),
        "dense_size": fields.integer("intermediate_size") if dense else 0,
        "shared_size": expert_size * fields.integer("n_shared_experts", default=0),
        "router": "sigmoid",
        "normalise_top_k": fields.flag("norm_topk_prob", False),
        "routed_scale": fields.number("routed_scaling_factor", 1.0),
        "num_groups": fields.integer("n_group", default=1),
        "num_top_groups": fields.integer("topk_group", default=1),
        "qk_norm": True,
        "attention_bias": fields.flag("attention_bias", False),
    }


def family_of(config: MoEConfig) -> Family:
    """The family whose features cover the model's.

    Raises
    ------
    InvalidInput
        When none does; says what stands against each.
    """
    reasons = []
    for family in ARCHITECTURES:
        reason = _against(config, cast("Family", family))
        if reason is None:
            return cast("Family", family)
        reasons.append(f"{family}: {reason}")
    raise InvalidInput(f"model config: no Hugging Face family has these features ({'; '.join(reasons)})")


def _against(config: MoEConfig, family: Family) -> str | None:
    """Why ``family`` cannot express the model, or None."""
    wanted: dict[str, Any] = {"shared_gate": False}
    if family == "dots1":
        wanted |= {"router": "sigmoid", "qk_norm": True, "sliding_window": None}
        wanted |= {"dense_layers": tuple(range(len(config.dense_layers)))}
        if config.shared_size % config.expert_size or not config.shared_size:
            return f"shared_size is {config.shared_size}, must be a multiple of expert_size {config.expert_size}"
    else:
        wanted |= {"router": "softmax", "shared_size": 0, "num_groups": 1, "routed_scale": 1.0}
        wanted |= {"qk_norm": family == "qwen3_moe"}
    if family == "mixtral":
        wanted |= {"normalise_top_k": True, "dense_layers": (), "attention_bias": False}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)!r}, must be {value!r}"
    return None


def config_to_hf(config: MoEConfig, family: Family | None = None, *, dtype: str = "float32") -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's class of ``family`` reads (None: the family that fits).

    Raises
    ------
    InvalidInput
        When the family is unknown or lacks a feature of the model.
    """
    family = family_of(config) if family is None else family
    if family not in ARCHITECTURES:
        raise InvalidInput(f"family: {family!r} is not one of {', '.join(ARCHITECTURES)}")
    reason = _against(config, family)
    if reason is not None:
        raise InvalidInput(f"model config: {family} cannot express it, {reason}")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "num_experts_per_tok": config.top_k,
        # both spellings: transformers 5 reads the table (and dtype), 4 the plain field (and torch_dtype)
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if family == "mixtral":
        return values | {
            "num_local_experts": config.num_experts,
            "intermediate_size": config.expert_size,
            "sliding_window": config.sliding_window,
        }
    values |= {
        "moe_intermediate_size": config.expert_size,
        "intermediate_size": config.dense_size or config.expert_size,
        "norm_topk_prob": config.normalise_top_k,
        "attention_bias": config.attention_bias,
    }
    if family == "qwen3_moe":
        return values | {
            "num_experts": config.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.dense_layers),
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }
    return values | {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_size // config.expert_size,
        "first_k_dense_replace": len(config.dense_layers),
        "routed_scaling_factor": config.routed_scale,
        "n_group": config.num_groups,
        "topk_group": config.num_top_groups,
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
    }
