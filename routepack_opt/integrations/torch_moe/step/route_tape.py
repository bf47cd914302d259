"""Routes on tape: record which experts a forward pass uses, or force those a rollout used (route replay, "R3").

Names: T tokens of a packed row, L MoE layers, K top-k.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from routepack_opt.errors import InvalidInput


class RouteTape:
    """Routes of forward passes, asked once per MoE layer.

    Ids are logical. A replayed id is forced in the forward pass and therefore in the backward pass; the router computes
    its weights *at* those ids, so gradients still reach it.
    """

    def __init__(  # noqa: D107 - made by the three class methods
        self, mode: Literal["off", "record", "replay"], routes_TLK: torch.Tensor | None = None
    ) -> None:
        self._mode = mode
        self._routes_TLK = routes_TLK
        self._rows: dict[int, torch.Tensor] = {}
        self._answers_again = False

    def for_pass(self) -> RouteTape:
        """The tape of one forward pass: it answers a layer's recomputation as it answered the first time.

        On kernels that are not deterministic the router could choose other experts the second time, and the gradients
        would belong to no forward pass. :meth:`recorded` of this tape then holds the latest pass.
        """
        tape = RouteTape(self._mode, self._routes_TLK)
        tape._answers_again = True
        self._rows = tape._rows
        return tape

    @classmethod
    def off(cls) -> RouteTape:
        """The router's own choice, not kept."""
        return cls("off")

    @classmethod
    def recording(cls) -> RouteTape:
        """The router's own choice, kept for :meth:`recorded`."""
        return cls("record")

    @classmethod
    def replaying(cls, routes: Any) -> RouteTape:
        """Force ``routes``, int [T, L, K] of logical ids; a token of a layer with all -1 keeps the router's own choice.

        Raises
        ------
        InvalidInput
            Wrong shape or type, or a row that is -1 in part.
        """
        if isinstance(routes, np.ndarray):
            if routes.dtype == np.uint16:  # torch has no kernels for it
                routes = routes.astype(np.int32)
            routes = torch.from_numpy(np.ascontiguousarray(routes))
        routes_TLK = routes
        if not isinstance(routes_TLK, torch.Tensor) or routes_TLK.ndim != 3 or routes_TLK.is_floating_point():
            raise InvalidInput(f"routes: expected integers [T, L, K], found {_describe(routes)}")
        missing_TLK = routes_TLK < 0
        partly_TL = missing_TLK.any(-1) & ~missing_TLK.all(-1)
        if bool(partly_TL.any()):
            token, layer = torch.nonzero(partly_TL)[0].tolist()
            raise InvalidInput(f"routes[{token},{layer}]: -1 in part of the row; expected K ids, or all -1")
        return cls("replay", routes_TLK)

    @property
    def replays(self) -> bool:
        """Whether routes are forced."""
        return self._mode == "replay"

    @property
    def routes_TLK(self) -> torch.Tensor | None:
        """What is replayed, or None."""
        return self._routes_TLK

    def choose(self, moe_layer: int, own_ids_TK: torch.Tensor) -> torch.Tensor:
        """The ids that MoE layer ``moe_layer`` (its position among MoE layers) uses, int64 [T, K].

        Raises
        ------
        InvalidInput
            The tape holds another number of tokens, layers or top-k.
        """
        if self._answers_again and moe_layer in self._rows:
            return self._rows[moe_layer]
        if self._mode == "off" and not self._answers_again:
            return own_ids_TK
        ids_TK = own_ids_TK
        if self._routes_TLK is not None:
            num_tokens, num_layers, top_k = self._routes_TLK.shape
            if moe_layer >= num_layers or own_ids_TK.shape != (num_tokens, top_k):
                raise InvalidInput(
                    f"routes: shape {tuple(self._routes_TLK.shape)} cannot answer MoE layer {moe_layer} of"
                    f" {tuple(own_ids_TK.shape)} (tokens, top-k)"
                )
            forced_TK = self._routes_TLK[:, moe_layer].to(own_ids_TK.device, torch.long)
            ids_TK = torch.where(forced_TK >= 0, forced_TK, own_ids_TK)
        self._rows[moe_layer] = ids_TK.detach()
        return ids_TK

    def recorded(self) -> torch.Tensor:
        """The ids used, int16 [T, L, K] (int32 above 32767 experts), on the CPU; L as far as the model asked.

        Raises
        ------
        InvalidInput
            The tape is off, or no forward pass used it.
        """
        if self._mode == "off" or not self._rows:
            raise InvalidInput("tape: nothing recorded; pass RouteTape.recording() to the forward pass first")
        rows = [self._rows[layer] for layer in sorted(self._rows)]
        ids_TLK = torch.stack(rows, dim=1).cpu()
        wide = bool(ids_TLK.numel()) and int(ids_TLK.max()) > np.iinfo(np.int16).max
        return ids_TLK.to(torch.int32 if wide else torch.int16)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} of shape {tuple(shape)}"
