"""Shape of a Mixture-of-Experts decoder: every number the model is built from, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from routepack_opt.errors import InvalidInput

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "expert_size",
    "num_groups",
    "num_top_groups",
    "max_positions",
)


@dataclass(frozen=True)
class MoEConfig:
    """Decoder with routed experts; Qwen3-MoE, Mixtral and DeepSeek-style routing are settings of it.

    Attributes
    ----------
    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim
        Transformer sizes; ``num_heads`` is a multiple of ``num_kv_heads`` (grouped-query attention).
    num_experts, top_k, expert_size
        Routed experts of a MoE layer, experts of a token, inner width of one SwiGLU expert.
    dense_layers, dense_size
        Layers with a plain SwiGLU block in place of experts, and its inner width.
    shared_size, shared_gate
        Inner width of the shared expert of every MoE layer (0: none); a sigmoid gate on its output.
    router
        "softmax" (Mixtral, Qwen) or "sigmoid" (DeepSeek-V3: selection by score + bias, weights by score).
    normalise_top_k, routed_scale
        Weights of a token divided by their sum; factor on them afterwards.
    num_groups, num_top_groups
        Experts are chosen inside the ``num_top_groups`` best of ``num_groups`` equal groups (1, 1: no groups).
    qk_norm, attention_bias
        RMSNorm of every query and key head; bias on all four attention projections.
    sliding_window
        A token sees itself and the ``sliding_window - 1`` tokens before it; None sees all before it.
    max_positions
        Longest sequence the model was made for; only written to exported configurations.

    Raises
    ------
    InvalidInput
        When a field is out of range or two do not fit; the message names them.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    dense_layers: tuple[int, ...] = ()
    dense_size: int = 0
    shared_size: int = 0
    shared_gate: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True
    routed_scale: float = 1.0
    num_groups: int = 1
    num_top_groups: int = 1
    qk_norm: bool = False
    attention_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    sliding_window: int | None = None
    max_positions: int = 32768

    def __post_init__(self) -> None:
        """Checks types and ranges first, then how the fields fit together."""
        for name in _COUNTS:
            self._check_integer(name, getattr(self, name), low=1)
        for name in ("dense_size", "shared_size"):
            self._check_integer(name, getattr(self, name), low=0)
        if self.sliding_window is not None:
            self._check_integer("sliding_window", self.sliding_window, low=1)
        for name in ("shared_gate", "normalise_top_k", "qk_norm", "attention_bias", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"model config, {name}: expected true or false, found {getattr(self, name)!r}")
        for name in ("routed_scale", "rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InvalidInput(f"model config, {name}: expected a positive number, found {value!r}")
        self._check_dense_layers()
        self._check_fit()

    @staticmethod
    def _check_integer(name: str, value: object, *, low: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise InvalidInput(f"model config, {name}: expected an integer of at least {low}, found {value!r}")

    def _check_dense_layers(self) -> None:
        try:
            layers = tuple(self.dense_layers)
        except TypeError:
            raise InvalidInput(
                f"model config, dense_layers: expected layer indices, found {self.dense_layers!r}"
            ) from None
        object.__setattr__(self, "dense_layers", layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.num_layers:
                allowed = f"a layer in 0..{self.num_layers - 1}"
                raise InvalidInput(f"model config, dense_layers[{index}]: expected {allowed}, found {layer!r}")
        if list(layers) != sorted(set(layers)):
            raise InvalidInput(
                f"model config, dense_layers: expected ascending layers, each once, found {list(layers)}"
            )
        if layers and not self.dense_size:
            raise InvalidInput("model config, dense_size: must be at least 1 where dense_layers are given")

    def _check_fit(self) -> None:
        if self.router not in ("softmax", "sigmoid"):
            raise InvalidInput(f"model config, router: expected 'softmax' or 'sigmoid', found {self.router!r}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"model config, num_heads: {self.num_heads} is no multiple of {self.num_kv_heads} key heads"
            )
        if self.head_dim % 2:
            raise InvalidInput(f"model config, head_dim: {self.head_dim} must be even, rotary embeddings turn pairs")
        if self.num_experts % self.num_groups:
            raise InvalidInput(
                f"model config, num_groups: {self.num_experts} experts do not split into {self.num_groups}"
            )
        if self.num_top_groups > self.num_groups:
            raise InvalidInput(f"model config, num_top_groups: {self.num_top_groups} of {self.num_groups} groups")
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise InvalidInput("model config, num_groups: a group is ranked by its two best experts, it needs two")
        reachable = self.num_experts // self.num_groups * self.num_top_groups
        if self.top_k > reachable:
            raise InvalidInput(f"model config, top_k: {self.top_k} of {reachable} experts that a token can reach")
        if self.shared_gate and not self.shared_size:
            raise InvalidInput("model config, shared_gate: there is no shared expert (shared_size is 0)")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layer index of each MoE layer, ascending."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    @property
    def num_moe_layers(self) -> int:
        """L, the layers that have routed experts."""
        return self.num_layers - len(self.dense_layers)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert: gate, up and down matrix."""
        return 3 * self.hidden_size * self.expert_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them; ``from_dict`` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"dense_layers": list(self.dense_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str = "model config") -> MoEConfig:
        """The configuration ``to_dict`` wrote; an unknown or missing field is an InvalidInput naming it."""
        if not isinstance(values, dict):
            raise InvalidInput(f"{where}: expected a table of fields, found {type(values).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidInput(f"{where}, {unknown[0]}: no such field; known: {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidInput(f"{where}: {error}") from None
