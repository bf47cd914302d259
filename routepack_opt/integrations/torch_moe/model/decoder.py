"""Decoder with routed experts over packed rows, and its deterministic logical initialisation.

Shape suffixes: T packed tokens, S sequences, D hidden, V vocabulary, L MoE layers, E experts, H local slots.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.model.attention import Attention, RotaryTable
from routepack_opt.integrations.torch_moe.model.moe_layer import MoEBlock, SwiGLU
from routepack_opt.integrations.torch_moe.model.packed_attention import PackedRows
from routepack_opt.integrations.torch_moe.parallel.dispatch import make_dispatcher
from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.model.config import MoEConfig
    from routepack_opt.integrations.torch_moe.model.kv_cache import KVCache, LayerCache
    from routepack_opt.integrations.torch_moe.model.packed_attention import Backend
    from routepack_opt.integrations.torch_moe.parallel.dispatch import Dispatcher
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape

INIT_STD = 0.02


class DecoderLayer(nn.Module):
    """Attention and experts (or a dense block), each behind its RMSNorm and added to the stream."""

    def __init__(self, config: MoEConfig, mlp: nn.Module, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """``mlp`` is the MoEBlock or SwiGLU of this layer."""
        super().__init__()
        self.self_attn = Attention(config, dtype=dtype, device=device)
        self.mlp = mlp
        norm: dict[str, Any] = {"eps": config.norm_eps, "dtype": dtype, "device": device}
        self.input_layernorm = nn.RMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, **norm)

    def forward(
        self,
        x_TD: Tensor,
        rows: PackedRows,
        rotary: tuple[Tensor, Tensor],
        tape: RouteTape,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[T, D] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rows, rotary, cache)
        normed_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MoEBlock):
            return x_TD + self.mlp(normed_TD, tape)
        return x_TD + self.mlp(normed_TD)


class MoETransformer(nn.Module):
    """Decoder of one rank: all dense weights, and the experts in this rank's slots.

    Parameter names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), but for the experts, which lie by
    slot: ``model.layers.0.mlp.experts.gate_up`` [H, 2I, D] and ``.down`` [H, D, I].
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        slot_map: SlotMap,
        dispatcher: Dispatcher,
        num_local_slots: int,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
        recompute: bool = False,
        attention: Backend = "auto",
        mesh: ParallelMesh | None = None,
    ) -> None:
        """Builds and initialises (``seed`` None: weights stay uninitialised, for loading).

        Parameters
        ----------
        first_slot
            Global number of this rank's first slot: EP rank x ``num_local_slots``.
        recompute
            Layers store only their input and run again in the backward pass, with the same tape and map.
        attention
            Kernel of packed attention; "auto" takes the best that is installed for the device.
        mesh
            Groups to gather over on export; None: this process holds every slot.
        """
        super().__init__()
        self.config, self.slot_map, self.mesh = config, slot_map, mesh
        self.first_slot, self.num_local_slots = first_slot, num_local_slots
        self.recompute, self.attention = recompute, attention
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        layers: list[DecoderLayer] = []
        blocks: list[MoEBlock] = []
        for layer in range(config.num_layers):
            if layer in config.dense_layers:
                layers.append(DecoderLayer(config, SwiGLU(config.hidden_size, config.dense_size, **place), **place))
                continue
            block = MoEBlock(
                config, moe_layer=len(blocks), dispatcher=dispatcher, num_local_slots=num_local_slots, **place
            )
            blocks.append(block)
            layers.append(DecoderLayer(config, block, **place))
        self.model = nn.Module()
        self.model.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size, **place)
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **place)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = nn.utils.skip_init(nn.Linear, config.hidden_size, config.vocab_size, bias=False, **place)
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, device=device)
        self._blocks = tuple(blocks)
        if seed is not None:
            initialise(self, seed)

    @property
    def moe_blocks(self) -> list[MoEBlock]:
        """The MoE blocks in MoE-layer order."""
        return list(self._blocks)

    @staticmethod
    def is_expert_parameter(name: str) -> bool:
        """Whether a parameter lies by slot (its gradient is reduced over EDP, not DP)."""
        return name.endswith((".mlp.experts.gate_up", ".mlp.experts.down"))

    def local_experts(self, moe_layer: int) -> list[int]:
        """Logical expert in each local slot of one MoE layer."""
        slots = slice(self.first_slot, self.first_slot + self.num_local_slots)
        return [int(expert) for expert in self.slot_map.slot_to_logical[moe_layer][slots]]

    def forward(
        self,
        tokens_T: Tensor,
        cu_seqlens_S1: Tensor,
        *,
        tape: RouteTape,
        cache: KVCache | None = None,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Logits [T, V] of a packed row, or of the token indices ``logits_at`` only.

        Parameters
        ----------
        tokens_T
            Token ids of all sequences, one after the other.
        cu_seqlens_S1
            Where each sequence begins, and T; int32.
        tape
            Records or replays the routes.
        cache
            Sequences to continue: first the prompts, then one token a sequence and call.
        """
        past = cache.lengths if cache is not None else None
        rows = PackedRows(cu_seqlens_S1, tokens_T.shape[0], past=past, backend=self.attention)
        if cache is not None:
            cache.begin(rows)
        x_TD = self.model.embed_tokens(tokens_T)
        rotary = self.rotary(rows.positions_T, rows.num_positions, x_TD.dtype)
        tape = tape.for_pass()
        for index, layer in enumerate(self.model.layers):
            if self.recompute and torch.is_grad_enabled() and cache is None:
                x_TD = checkpoint(layer, x_TD, rows, rotary, tape, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = layer(x_TD, rows, rotary, tape, cache.layers[index] if cache is not None else None)
        if cache is not None:
            cache.end(rows)
        if logits_at is not None:
            x_TD = x_TD[logits_at]
        x_TD = self.model.norm(x_TD)
        head = self.lm_head.weight if self.lm_head is not None else self.model.embed_tokens.weight
        return F.linear(x_TD, head)


def build_model(
    config: MoEConfig,
    mesh: ParallelMesh,
    *,
    slot_map: SlotMap | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    recompute: bool = False,
    attention: Backend = "auto",
) -> MoETransformer:
    """The model of this rank; one seed gives one logical model on any EP size and placement.

    ``slot_map`` defaults to contiguous experts; it is shared with the dispatcher, so publishing into it moves both.

    Raises
    ------
    InvalidInput
        When the experts do not split over the EP ranks, or ``slot_map`` is another model's.
    """
    if config.num_experts % mesh.num_ep:
        raise InvalidInput(
            f"model config, num_experts: {config.num_experts} experts do not split over {mesh.num_ep} EP ranks"
        )
    wanted = (config.num_moe_layers, config.num_experts)
    if slot_map is None:
        slot_map = SlotMap.identity(*wanted, device=mesh.device)
    if (slot_map.num_layers, slot_map.num_experts) != wanted:
        found = (slot_map.num_layers, slot_map.num_experts)
        raise InvalidInput(f"slot_map: {found} MoE layers and experts, the model has {wanted}")
    num_local_slots = config.num_experts // mesh.num_ep
    return MoETransformer(
        config,
        slot_map=slot_map,
        dispatcher=make_dispatcher(slot_map, mesh),
        num_local_slots=num_local_slots,
        first_slot=mesh.ep_rank * num_local_slots,
        dtype=dtype,
        device=mesh.device,
        seed=seed,
        recompute=recompute,
        attention=attention,
        mesh=mesh,
    )


def _draw(shape: tuple[int, ...], *key: int | str) -> Tensor:
    """Normal values that depend on the key only, never on who draws them or in which order."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator) * INIT_STD


@torch.no_grad()
def initialise(model: MoETransformer, seed: int) -> None:
    """Draws every weight from (seed, name) or (seed, MoE layer, logical expert): EP size and placement play no part."""
    for name, parameter in model.named_parameters():
        if model.is_expert_parameter(name):
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(_draw(tuple(parameter.shape), seed, name))
    for block in model.moe_blocks:
        for slot, expert in enumerate(model.local_experts(block.moe_layer)):
            for matrix, weight in (("gate_up", block.experts.gate_up), ("down", block.experts.down)):
                weight[slot].copy_(_draw(tuple(weight.shape[1:]), seed, block.moe_layer, expert, matrix))
