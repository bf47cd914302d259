"""Dispatch: tokens to the slots of their experts and back, through the committed logical -> slot map.

Routing stays logical; only here does an id become a slot. Tokens are sorted by slot, sent to the EP rank that holds it
(all-to-all with unequal splits), run through its experts, sent back, and combined at the source with the router's
weights. Only the hidden states travel; routing weights never leave their rank, so their gradient is local.

Names: T tokens of this rank, D hidden size, K top-k, E experts, P EP ranks, H = E / P local slots, N tokens received
(a token counts once for each of its experts), L MoE layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.parallel.slot_map import SlotMap


class Dispatcher(Protocol):
    """What an MoE layer calls after top-k."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        moe_layer: int,
    ) -> torch.Tensor:
        """The layer's routed output [T, D]; ids are logical, ``experts(x_ND sorted by slot, counts_H) -> y_ND``."""


class LocalDispatch:
    """All slots live here (P = 1): sort by slot, run, combine."""

    def __init__(self, slot_map: SlotMap) -> None:  # noqa: D107 - the class describes it
        self.slot_map = slot_map

    def __call__(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        moe_layer: int,
    ) -> torch.Tensor:
        """See :class:`Dispatcher`."""
        slots = self.slot_map.logical_to_slot[moe_layer][ids_TK].flatten()
        order = torch.argsort(slots, stable=True)
        counts_H = _count(slots, self.slot_map.num_experts)
        x_ND = _Spread.apply(x_TD, order, ids_TK.shape[1])
        return combine(experts(x_ND, counts_H), order, weights_TK)


class AllToAllDispatch:
    """Slots are spread over the EP group of ``mesh``; every member calls it for the same layers in the same order.

    A member without tokens takes part with empty splits.
    """

    def __init__(self, slot_map: SlotMap, mesh: ParallelMesh) -> None:  # noqa: D107 - the class describes it
        self.slot_map = slot_map
        self.mesh = mesh
        self._num_slots = slot_map.num_experts // mesh.num_ep  # H
        self._wire = torch.tensor(mesh.ep_wire_order, device=mesh.device)
        self._announced: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # per layer, CPU [P, H] out and in

    def __call__(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        moe_layer: int,
    ) -> torch.Tensor:
        """See :class:`Dispatcher`."""
        slots = self._to_wire(self.slot_map.logical_to_slot[moe_layer][ids_TK]).flatten()
        order = torch.argsort(slots, stable=True)
        if self._announced is not None:
            sent_PH, received_PH = self._announced[moe_layer]
        else:
            counts_PH = _count(slots, self.slot_map.num_experts).view(-1, self._num_slots)
            sent_PH, received_PH = self._exchange_counts(counts_PH[:, None])
            sent_PH, received_PH = sent_PH[:, 0], received_PH[:, 0]
        send, receive = sent_PH.sum(1).tolist(), received_PH.sum(1).tolist()

        x_ND = _Spread.apply(x_TD, order, ids_TK.shape[1])
        x_ND = _AllToAll.apply(x_ND, send, receive, self.mesh.ep_group)  # by source, then slot
        received_PH = received_PH.to(x_TD.device)
        local_slots = torch.arange(self._num_slots, device=x_TD.device).repeat(received_PH.shape[0])
        local_slots = torch.repeat_interleave(local_slots, received_PH.flatten(), output_size=x_ND.shape[0])
        by_slot = torch.argsort(local_slots, stable=True)
        by_source = torch.empty_like(by_slot).scatter_(0, by_slot, torch.arange(len(by_slot), device=x_TD.device))
        y_ND = experts(_Permute.apply(x_ND, by_slot, by_source), received_PH.sum(0))
        y_ND = _Permute.apply(y_ND, by_source, by_slot)
        y_ND = _AllToAll.apply(y_ND, receive, send, self.mesh.ep_group)
        return combine(y_ND, order, weights_TK)

    def announce(self, routes_TLK: torch.Tensor | None) -> bool:
        """Exchange the counts of all layers of a row at once, where its routes are known before the forward pass.

        Saves one exchange, and one wait for the device, per layer. Every member of the EP group calls it, with its own
        row; forget it with :meth:`forget` after the backward pass.

        Parameters
        ----------
        routes_TLK
            Logical ids; None where this member cannot tell.

        Returns
        -------
        Whether the counts are in use: not when any member has a token whose route is still the router's choice (-1).
        """
        num_layers, num_experts = self.slot_map.num_layers, self.slot_map.num_experts
        unknown = routes_TLK is None or bool((routes_TLK < 0).any())
        counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.long, device=self.mesh.device)
        if routes_TLK is not None and not unknown:
            ids_TLK = routes_TLK.to(self.mesh.device, torch.long)
            layers_1L1 = torch.arange(num_layers, device=self.mesh.device)[None, :, None]
            slots_TLK = self._to_wire(self.slot_map.logical_to_slot[layers_1L1, ids_TLK])
            counts_LE = _count((slots_TLK + layers_1L1 * num_experts).flatten(), counts_LE.numel()).view_as(counts_LE)
        counts_PLH = counts_LE.view(num_layers, -1, self._num_slots).transpose(0, 1).contiguous()
        flag_P1H = torch.full_like(
            counts_PLH[:, :1], int(unknown)
        )  # travels with the counts: one exchange, one verdict
        sent_PLH, received_PLH = self._exchange_counts(torch.cat([counts_PLH, flag_P1H], dim=1))
        if bool(received_PLH[:, -1].any()):
            self._announced = None
            return False
        self._announced = [(sent_PLH[:, layer], received_PLH[:, layer]) for layer in range(num_layers)]
        return True

    def forget(self) -> None:
        """Back to one count exchange per layer."""
        self._announced = None

    def _to_wire(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots renumbered by the position of their EP rank in the process group."""
        return self._wire[slots // self._num_slots] * self._num_slots + slots % self._num_slots

    def _exchange_counts(self, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU copies of what goes to and comes from each member, [P, *, H]."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.mesh.ep_group)
        both = torch.stack([sent, received]).cpu()  # one wait for the device: the splits must be Python numbers
        return both[0], both[1]


def make_dispatcher(slot_map: SlotMap, mesh: ParallelMesh) -> LocalDispatch | AllToAllDispatch:
    """Local where this rank holds every slot, all-to-all elsewhere."""
    return LocalDispatch(slot_map) if mesh.num_ep == 1 else AllToAllDispatch(slot_map, mesh)


def combine(y_ND: torch.Tensor, order: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Undo the sort and add up each token's K answers, weighted; a fixed order of additions on every device."""
    num_tokens, top_k = weights_TK.shape
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    y_TKD = _Permute.apply(y_ND, inverse, order).view(num_tokens, top_k, y_ND.shape[1])
    return (y_TKD * weights_TK.to(y_TKD.dtype)[:, :, None]).sum(1)


def _count(values: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of 0..size-1 occurs, int64; unlike bincount it does not wait for a GPU."""
    return torch.zeros(size, dtype=torch.long, device=values.device).scatter_add_(0, values, torch.ones_like(values))


class _Spread(torch.autograd.Function):
    """Copy token t to the K places its experts take in ``order``; backward adds the K gradients, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x_TD[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        (grad_ND,) = grads
        by_token = torch.empty_like(grad_ND)
        by_token[order] = grad_ND
        return by_token.view(-1, ctx.top_k, grad_ND.shape[1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """Rows in the order ``forward_order``; its inverse is the backward pass, a gather too."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, forward_order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x_ND[forward_order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


class _AllToAll(torch.autograd.Function):
    """Rows to the members of a group, ``send[j]`` to member j; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x_ND, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(x_ND: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    result_ND = x_ND.new_empty((sum(receive), *x_ND.shape[1:]))
    dist.all_to_all_single(result_ND, x_ND.contiguous(), receive, send, group=group)
    return result_ND
