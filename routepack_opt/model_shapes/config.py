"""Read a Hugging Face ``config.json`` into a ModelShape; what is not understood is refused, never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput
from routepack_opt.files import file_path, read_json
from routepack_opt.model_shapes.presets import PRESETS
from routepack_opt.model_shapes.shape import Attention, Layer, ModelShape

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_MISSING: Any = object()
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
# Families whose ``intermediate_size`` is the width of a routed expert.
_EXPERT_WIDTH_IN_INTERMEDIATE = ("mixtral", "olmoe", "gpt_oss", "phimoe")
# What a family's config must spell out: the library defaults behind a missing field differ by family and version.
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace")
_REQUIRED = {
    "qwen3_moe": ("num_key_value_heads", "head_dim"),
    "qwen3_next": ("num_key_value_heads", "head_dim", "shared_expert_intermediate_size"),
    "mixtral": ("num_key_value_heads",),
    "olmoe": ("num_key_value_heads",),
    "gpt_oss": ("num_key_value_heads", "head_dim", "sliding_window"),
    "deepseek_v2": (*_LATENT, "n_shared_experts"),
    "deepseek_v3": (*_LATENT, "n_shared_experts"),
    "kimi_linear": (*_LATENT, "num_shared_experts", "linear_attn_config"),
}
# Fields of architectures whose cost the formulas below do not describe.
_NOT_MODELLED = {
    "index_topk": "sparse attention over indexed tokens",
    "routed_expert_hidden_size": "routed experts in a latent space",
    "interleave_moe_layer_step": "interleaved dense layers",
    "attention_chunk_size": "chunked attention",
    "hybrid_override_pattern": "a state-space hybrid",
    "attn_layer_period": "a state-space hybrid",
    "zero_expert_num": "zero-computation experts",
}


def model_shape(model: str | os.PathLike[str] | dict[str, Any]) -> ModelShape:
    """The dimensions behind a preset name, a ``config.json`` (file, its folder, or already parsed).

    Raises
    ------
    InvalidInput
        Neither a preset nor a file, or a field that is missing, wrong or not modelled; names file and field.
    """
    if isinstance(model, dict):
        return _parse(model, "config")
    if isinstance(model, str) and model in PRESETS:
        return _parse(PRESETS[model], model)
    path = file_path(model)
    if path.is_dir():
        path = path / "config.json"
    if isinstance(model, str) and not path.exists() and path.suffix != ".json":
        raise InvalidInput(f"model: {model!r} is neither a file nor one of {', '.join(PRESETS)}")
    config = read_json(path)
    if not isinstance(config, dict):
        raise InvalidInput(f"{path}: expected a JSON object")
    return _parse(config, str(path))


class _Fields:
    """Typed access to a config's fields; every complaint names the file and the field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, name: str, message: str) -> InvalidInput:
        return InvalidInput(f"{self.where}: field {name!r}: {message}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, *names: str, default: Any = _MISSING, low: int = 1) -> int:
        """The integer in the first of the aliased ``names`` that is present and not null."""
        name = next((n for n in names if self.has(n)), None)
        if name is None:
            if default is not _MISSING:
                return int(default)
            also = f" (nor {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            raise self.error(names[0], f"is missing{also}; expected an integer >= {low}")
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(name, f"{value!r} is not an integer >= {low}")
        return value

    def counts(self, name: str, default: Any = _MISSING) -> list[int]:
        value = self.values.get(name)
        if value is None and default is not _MISSING:
            return list(default)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(name, "is missing" if value is None else f"{value!r} is not a list of layer numbers")
        return value

    def words(self, name: str, length: int, allowed: tuple[str, ...]) -> list[str]:
        value = self.values[name]
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"expected a list of {length} entries, one per layer")
        for index, word in enumerate(value):
            if word not in allowed:
                raise self.error(f"{name}[{index}]", f"{word!r} is unknown; expected one of {', '.join(allowed)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"{value!r} is not true or false")
        return default if value is None else value

    def inside(self, name: str) -> _Fields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "is missing" if value is None else "expected an object")
        return _Fields(value, f"{self.where}: {name}")


def _parse(config: dict[str, Any], where: str) -> ModelShape:
    if "hidden_size" not in config and isinstance(config.get("text_config"), dict):  # multimodal wrappers
        return _parse(config["text_config"], f"{where}: text_config")
    fields = _Fields(config, where)
    for name, what in _NOT_MODELLED.items():
        if fields.has(name):
            raise fields.error(name, f"{what} is not modelled; give the cost as cost.json instead")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise fields.error("model_type", "is missing or no text; expected a family such as 'qwen3_moe'")
    for name in _REQUIRED.get(model_type, ()):
        if name not in config:
            raise fields.error(name, f"is missing; {model_type} configs give it")
    hidden = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers")
    num_experts = fields.count(*_EXPERTS)
    top_k = fields.count(*_TOP_K)
    if top_k > num_experts:
        raise fields.error(next(n for n in _TOP_K if fields.has(n)), f"{top_k} is above the {num_experts} experts")
    in_intermediate = model_type in _EXPERT_WIDTH_IN_INTERMEDIATE
    width = fields.count("intermediate_size" if in_intermediate else "moe_intermediate_size")
    shared = fields.count("n_shared_experts", "num_shared_experts", default=0, low=0) * width
    shared += fields.count("shared_expert_intermediate_size", default=0, low=0)
    is_moe = _moe_layers(fields, num_layers)
    if not any(is_moe):
        raise InvalidInput(f"{where}: no layer has experts; expected an MoE model")
    dense = 0 if all(is_moe) else fields.count("intermediate_size")
    attentions = _attentions(fields, hidden, num_layers)
    layers = tuple(
        Layer(attention, moe, shared if moe else dense) for attention, moe in zip(attentions, is_moe, strict=True)
    )
    return ModelShape(where, hidden, width, num_experts, top_k, layers)


def _moe_layers(fields: _Fields, num_layers: int) -> list[bool]:
    """Which layers have routed experts: an explicit list, or DeepSeek's and Qwen's rules together."""
    if fields.has("mlp_layer_types"):
        return [word == "sparse" for word in fields.words("mlp_layer_types", num_layers, ("dense", "sparse"))]
    first = fields.count("first_k_dense_replace", default=0, low=0)
    every = fields.count("moe_layer_freq", default=1)
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.counts("mlp_only_layers", default=())
    return [
        i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense for i in range(num_layers)
    ]  # fmt: skip


def _attentions(fields: _Fields, hidden: int, num_layers: int) -> list[Attention]:
    """The attention of every layer."""
    words = _layer_types(fields, num_layers)
    softmax = (_mla if "kv_lora_rank" in fields.values else _gqa)(fields, hidden)
    build: dict[str, Callable[[], Attention]] = {
        "full_attention": lambda: softmax,
        "sliding_attention": lambda: Attention(
            "sliding", softmax.token_madds, softmax.pair_madds, fields.count("sliding_window")
        ),
        "linear_attention": lambda: (_kda if fields.has("linear_attn_config") else _gated_delta_net)(fields, hidden),
    }
    made = {word: build[word]() for word in set(words)}
    return [made[word] for word in words]


def _layer_types(fields: _Fields, num_layers: int) -> list[str]:
    full, sliding, linear = allowed = ("full_attention", "sliding_attention", "linear_attention")
    model_type = fields.values.get("model_type")
    if fields.has("linear_attn_config"):
        inner = fields.inside("linear_attn_config")
        kda, rest = inner.counts("kda_layers"), inner.counts("full_attn_layers")
        if sorted(kda + rest) != list(range(1, num_layers + 1)):
            raise inner.error("kda_layers", f"with full_attn_layers must name each layer 1..{num_layers} exactly once")
        return [linear if i + 1 in kda else full for i in range(num_layers)]
    if fields.has("layer_types"):
        return fields.words("layer_types", num_layers, allowed)
    if model_type == "qwen3_next" or fields.has("full_attention_interval"):
        interval = fields.count("full_attention_interval", default=4)
        return [full if (i + 1) % interval == 0 else linear for i in range(num_layers)]
    if model_type == "gpt_oss":  # alternates, starting with a window
        return [full if i % 2 else sliding for i in range(num_layers)]
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        first = fields.count("max_window_layers", default=0, low=0)
        return [sliding if i >= first else full for i in range(num_layers)]
    return [full] * num_layers


def _gqa(fields: _Fields, hidden: int) -> Attention:
    """Multi-head or grouped-query attention: q, k, v and output projections."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)  # null: multi-head
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} heads")
    dim = fields.count("head_dim", default=hidden // heads)
    gated = fields.flag("attn_output_gate", fields.values.get("model_type") == "qwen3_next")
    return Attention("full", hidden * dim * ((3 if gated else 2) * heads + 2 * kv_heads), heads * 2 * dim)


def _mla(fields: _Fields, hidden: int) -> Attention:
    """Multi-head latent attention as trained: keys and values are decompressed, nothing is absorbed."""
    heads, rank = fields.count("num_attention_heads"), fields.count("kv_lora_rank")
    nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim", low=0)
    value_dim, query_rank = fields.count("v_head_dim"), fields.count("q_lora_rank", default=0, low=0)
    query = heads * (nope + rope)
    madds = query_rank * (hidden + query) if query_rank else hidden * query
    madds += hidden * (rank + rope) + rank * heads * (nope + value_dim) + heads * value_dim * hidden
    return Attention("full", madds, heads * (nope + rope + value_dim))


def _kda(fields: _Fields, hidden: int) -> Attention:
    """Kimi Delta Attention: q, k, v, o; low-rank decay and output gates; beta; convolutions; state."""
    inner = fields.inside("linear_attn_config")
    heads, dim, kernel = inner.count("num_heads"), inner.count("head_dim"), inner.count("short_conv_kernel_size")
    width = heads * dim
    if inner.flag("use_full_rank_gate", False):
        gates = hidden * dim + dim * width + hidden * width
    else:
        gates = 2 * (hidden * dim + dim * width)
    madds = 4 * hidden * width + gates + hidden * heads + 3 * width * kernel
    return Attention("linear", madds + _state_madds(heads, dim, dim))


def _gated_delta_net(fields: _Fields, hidden: int) -> Attention:
    """Gated DeltaNet: q, k, v, output gate z, alpha and beta, output; one convolution over q, k and v; state."""
    key_heads, heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    keys, values = key_heads * key_dim, heads * value_dim
    madds = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    madds += (2 * keys + values) * fields.count("linear_conv_kernel_dim")
    return Attention("linear", madds + _state_madds(heads, key_dim, value_dim))


def _state_madds(heads: int, key_dim: int, value_dim: int) -> int:
    """Gated delta rule in its recurrent form: decay the state, read it with k, write it, read it with q."""
    return 4 * heads * key_dim * value_dim
