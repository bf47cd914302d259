"""Tensor sizes of the kernels to run: the expert, and each kind of block beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from routepack_opt.cost import CostModel, Stage
from routepack_opt.errors import InvalidInput
from routepack_opt.window import positive_int

if TYPE_CHECKING:
    import os

    from routepack_opt.synth.presets import SynthPreset

_ALIGN = 8  # scaled widths stay multiples of what tensor cores and grouped kernels want (16 bytes in bf16)


@dataclass(frozen=True)
class Block:
    """What a token passes in one layer beside the routed experts, and in how many layers.

    Parameters
    ----------
    name
        Stage it belongs to: "full", "sliding" or "linear", with a number where a model has several of one kind.
    kind
        "linear" attention has no pair part: its projections are run, its state is not.
    num_layers
        Layers of this block.
    num_heads, num_kv_heads, qk_dim, v_dim
        Heads and their sizes; 0 heads for "linear".
    projection_width
        Columns of all projections but the output one: ``token_madds / hidden - num_heads * v_dim``.
    window
        Tokens a query sees, 0 for all earlier ones.
    dense_width
        Intermediate size of the shared experts or of the dense feed-forward network, 0 for none.
    """

    name: str
    kind: Literal["full", "sliding", "linear"]
    num_layers: int
    num_heads: int = 0
    num_kv_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    projection_width: int = 0
    window: int = 0
    dense_width: int = 0


@dataclass(frozen=True)
class KernelShape:
    """Sizes of one model's kernels.

    Parameters
    ----------
    name
        For tables and files.
    hidden, expert_width
        Model dimension, and intermediate size of one routed expert.
    blocks
        The kinds of layers.
    num_moe_layers
        How many of the layers have routed experts.
    """

    name: str
    hidden: int
    expert_width: int
    blocks: tuple[Block, ...]
    num_moe_layers: int

    def block_layers(self, num_moe_layers: int) -> tuple[float, ...]:
        """Layers of each block for a window that lists ``num_moe_layers``: in proportion where the model has others."""
        return tuple(block.num_layers * num_moe_layers / self.num_moe_layers for block in self.blocks)

    def layer_notes(self, num_moe_layers: int) -> list[str]:
        """What to say of a window that lists other MoE layers than the model has; nothing where they agree."""
        if self.num_moe_layers == num_moe_layers:
            return []
        return [
            f"{self.name} has {self.num_moe_layers} MoE layers, the window {num_moe_layers}:"
            " layers beside the experts are counted in proportion"
        ]

    @property
    def num_layers(self) -> int:
        """Attention layers of all blocks."""
        return sum(block.num_layers for block in self.blocks)

    @property
    def expert_parameters(self) -> int:
        """3 h f."""
        return 3 * self.hidden * self.expert_width

    def attention_madds(self, block: Block, tokens: int, squares: int) -> float:
        """Forward multiply-adds of one cell in one layer; causal pairs are half of all pairs."""
        heads_out = block.num_heads * block.v_dim
        a_token = self.hidden * (block.projection_width + heads_out) + 3 * self.hidden * block.dense_width
        pairs = squares / 2 if not block.window else min(squares / 2, float(tokens) * block.window)
        return float(tokens) * a_token + block.num_heads * (block.qk_dim + block.v_dim) * pairs

    def cost(self, token_cap: int) -> CostModel:
        """The score's weights for these kernels, from multiply-adds as ``CostModel.for_model`` has them."""
        weights: dict[str, tuple[float, float]] = {}
        for block in self.blocks:
            limited = 0 < block.window < token_cap
            kind = block.kind if limited or block.kind == "linear" else "full"
            alpha, beta = weights.get(kind, (0.0, 0.0))
            token = self.attention_madds(block, token_cap, 0)
            pairs = self.attention_madds(block, token_cap, token_cap**2) - token
            if limited:  # a full window for every token
                token, pairs = token + pairs, 0.0
            weights[kind] = (alpha + block.num_layers * token, beta + block.num_layers * pairs)
        unit = float(token_cap) * self.expert_parameters
        return CostModel(tuple(Stage(kind, a / unit, b / unit) for kind, (a, b) in weights.items()))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def gqa_shape(
    name: str,
    *,
    hidden: int,
    expert_width: int,
    heads: int,
    head_dim: int,
    num_layers: int,
    kv_heads: int | None = None,
    linear_layers: int = 0,
) -> KernelShape:
    """A model of ``num_layers`` layers of full attention and ``linear_layers`` more of linear attention."""
    for label, value in (("hidden", hidden), ("expert_width", expert_width), ("heads", heads), ("head_dim", head_dim)):
        positive_int(label, value)
    kv_heads = heads if kv_heads is None else kv_heads
    columns = (heads + 2 * kv_heads) * head_dim
    full = Block("full", "full", num_layers, heads, kv_heads, head_dim, head_dim, columns)
    linear = Block("linear", "linear", linear_layers, projection_width=columns + heads * head_dim)
    blocks = tuple(block for block in (linear, full) if block.num_layers)
    return KernelShape(name, hidden, expert_width, blocks, num_layers + linear_layers)


def synth_shape(preset: SynthPreset) -> KernelShape:
    """Sizes for the synthetic presets of the paper's two runs; the paper publishes parameter counts only.

    Chosen so that experts and attention give about its totals: Tiny 7.9B parameters and 1.3B active, Flash 124B and
    5.1B.
    """
    sizes = {"tiny": (2048, 384, 16), "flash": (4096, 1536, 32)}
    hidden, width, heads = sizes.get(preset.name, (2048, 768, 16))
    num_linear = round(preset.linear_share * preset.num_layers)
    return gqa_shape(
        f"{preset.name}-shaped",
        hidden=hidden,
        expert_width=width,
        heads=heads,
        head_dim=128,
        num_layers=preset.num_layers - num_linear,
        linear_layers=num_linear,
    )


def model_kernel_shape(model: str | os.PathLike[str]) -> KernelShape:
    """Sizes behind a preset name or a Hugging Face ``config.json``.

    Raises
    ------
    InvalidInput
        What :func:`~routepack_opt.model_shapes.model_shape` refuses.
    """
    from routepack_opt.files import file_path, read_json
    from routepack_opt.model_shapes import PRESETS, model_shape

    shape = model_shape(model)
    if isinstance(model, str) and model in PRESETS:
        config = PRESETS[model]
    else:
        path = file_path(model)
        config = read_json(path / "config.json" if path.is_dir() else path)
        if "hidden_size" not in config and isinstance(config.get("text_config"), dict):
            config = config["text_config"]
    heads = config.get("num_attention_heads") or 0
    if config.get("kv_lora_rank"):
        kv_heads, qk_dim = heads, config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        v_dim = config["v_head_dim"]
    else:
        kv_heads = config.get("num_key_value_heads") or heads
        qk_dim = v_dim = config.get("head_dim") or (shape.hidden // heads if heads else 0)
    blocks: dict[tuple[Any, ...], int] = {}
    for layer in shape.layers:
        key = (layer.attention.kind, layer.attention.token_madds, layer.attention.window, layer.dense_width)
        blocks[key] = blocks.get(key, 0) + 1
    made: list[Block] = []
    for (kind, madds, window, dense_width), count in blocks.items():
        alike = sum(b.kind == kind for b in made)
        name = kind if not alike else f"{kind}-{alike + 1}"
        if kind == "linear":
            block = Block(name, kind, count, projection_width=max(1, madds // shape.hidden), dense_width=dense_width)
        else:
            columns = max(1, madds // shape.hidden - heads * v_dim)
            block = Block(name, kind, count, heads, kv_heads, qk_dim, v_dim, columns, window, dense_width)
        made.append(block)
    return KernelShape(shape.name, shape.hidden, shape.expert_width, tuple(made), shape.num_moe_layers)


def scaled(shape: KernelShape, scale: float) -> KernelShape:
    """All widths times ``scale``, in multiples of 8, and head counts in proportion; head sizes are kept.

    Projections and experts shrink by the square of ``scale``, attention pairs by ``scale`` alone: samples shortened by
    ``scale`` too keep the proportions of a step.

    Raises
    ------
    InvalidInput
        A scale that is not in (0, 1].
    """
    if not 0 < scale <= 1:
        raise InvalidInput(f"scale: {scale!r} is not in (0, 1]")
    if scale == 1:
        return shape

    def width(value: int) -> int:
        return 0 if value == 0 else max(_ALIGN, round(value * scale / _ALIGN) * _ALIGN)

    blocks = []
    for block in shape.blocks:
        heads = 0 if not block.num_heads else max(1, round(block.num_heads * scale))
        kv_heads = max(1, round(block.num_kv_heads * scale)) if heads else 0
        while heads % max(1, kv_heads):  # query heads share key/value heads evenly
            kv_heads -= 1
        columns = width(block.projection_width)
        if heads and block.qk_dim == block.v_dim:
            columns = (heads + 2 * kv_heads) * block.qk_dim
        blocks.append(
            replace(
                block,
                num_heads=heads,
                num_kv_heads=kv_heads,
                projection_width=columns,
                dense_width=width(block.dense_width),
            )
        )
    name = f"{shape.name} x {scale:g}"
    return KernelShape(name, width(shape.hidden), width(shape.expert_width), tuple(blocks), shape.num_moe_layers)
