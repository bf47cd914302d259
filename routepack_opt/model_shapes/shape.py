"""ModelShape: what a model's layers compute, in multiply-adds a token, and the cost model made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from routepack_opt.cost import CostModel, Stage
from routepack_opt.window import positive_int

if TYPE_CHECKING:
    import os

Kind = Literal["full", "sliding", "linear"]


@dataclass(frozen=True)
class Attention:
    """Forward multiply-adds of one attention layer.

    Parameters
    ----------
    kind
        "full" attends to every earlier token, "sliding" to the last ``window``, "linear" keeps a state of fixed size.
    token_madds
        A token: all projections; for linear attention also the short convolution and the state.
    pair_madds
        A pair of tokens, query and key: num_heads * (d_qk + d_v), scores and values. 0 for linear attention.
    window
        Tokens a query sees in sliding attention, else 0.
    """

    kind: Kind
    token_madds: int
    pair_madds: int = 0
    window: int = 0


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    ``dense_width`` is the intermediate size of what every token passes beside the routed experts: the shared experts
    of an MoE layer, the feed-forward network of a dense layer.
    """

    attention: Attention
    is_moe: bool
    dense_width: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of one MoE model; every feed-forward network is gated (three matrices).

    Parameters
    ----------
    name
        Preset name or the config file.
    hidden, expert_width
        h, and f, the intermediate size of one routed expert.
    num_experts, top_k
        E, and the experts a token uses.
    layers
        All decoder layers, dense ones included.
    """

    name: str
    hidden: int
    expert_width: int
    num_experts: int
    top_k: int
    layers: tuple[Layer, ...]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The model's layer number of each MoE layer."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_moe)

    @property
    def num_moe_layers(self) -> int:
        """L."""
        return len(self.moe_layers)

    @property
    def expert_madds(self) -> int:
        """3 h f, one token-expert assignment: the unit of cost is C of them."""
        return 3 * self.hidden * self.expert_width

    def stages(self, token_cap: int) -> tuple[Stage, ...]:
        """One stage per kind of attention present, summed over its layers (routepack.md section 5).

        The router is left out; the routed experts are the E term of the cost. A window of at least the token cap
        never cuts a sample, so such a layer counts as full attention.
        """
        token_madds: dict[str, int] = {}
        pair_madds: dict[str, int] = {}
        for layer in self.layers:
            attention = layer.attention
            kind, linear, pairs = attention.kind, attention.token_madds, attention.pair_madds
            if kind == "sliding" and attention.window >= token_cap:
                kind = "full"
            if kind == "sliding":
                linear, pairs = linear + pairs * attention.window, 0
            token_madds[kind] = token_madds.get(kind, 0) + linear + 3 * self.hidden * layer.dense_width
            pair_madds[kind] = pair_madds.get(kind, 0) + pairs
        unit = self.expert_madds
        return tuple(
            Stage(kind, token_madds[kind] / unit, token_cap * pair_madds[kind] / 2 / unit)  # /2: causal
            for kind in ("linear", "sliding", "full")
            if kind in token_madds
        )


def cost_for_model(
    model: str | os.PathLike[str] | dict[str, Any] | ModelShape,
    *,
    token_cap: int,
    tp: int = 1,
    cp: int = 1,
    etp: int = 1,
    sync: Literal["shard", "row"] = "shard",
) -> CostModel:
    """Cost model of a model's dimensions (routepack.md section 5).

    Parameters
    ----------
    model
        Preset name, Hugging Face ``config.json`` (path, folder or dict), or a shape.
    token_cap
        C.
    tp, cp, etp
        Tensor, context and expert-tensor parallel sizes: attention and dense parts are divided by tp*cp, the
        routed experts by etp.
    sync
        See :class:`~routepack_opt.cost.CostModel`.

    Raises
    ------
    InvalidInput
        Unknown model, a config field that is missing or wrong (names file and field), or a size below 1.
    """
    from routepack_opt.model_shapes.config import model_shape

    token_cap, tp, cp, etp = (
        positive_int(name, value) for name, value in (("token_cap", token_cap), ("tp", tp), ("cp", cp), ("etp", etp))
    )
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    split = tp * cp
    stages = tuple(Stage(s.name, s.alpha / split, s.beta / split) for s in shape.stages(token_cap))
    return CostModel(stages, expert_weight=1.0 / etp, sync=sync)
