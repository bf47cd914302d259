"""Tokens without a route of their own: pads, and the last token of a rollout.

Pad tokens form a sequence of their own at the end of the row, so no sample attends to one, and the loss never sees
them. The last token of a rollout predicts nothing and no other token attends to it: whatever experts it uses, no
gradient comes of it. Both are real expert load, though, so their routes are spread evenly over EP ranks, distinct
experts in every token.

Names: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.routes import pad_routes

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.step.samples import PackedRow


def pad_row(row: PackedRow, multiple: int, model: Any, mesh: ParallelMesh) -> PackedRow:
    """``row`` with its tokens padded to a multiple; the same object when nothing is missing.

    Parameters
    ----------
    model
        Whose ``config`` and ``slot_map`` say where experts live.
    mesh
        EP ranks start at different places of the pattern, so that their pads are even together.
    """
    num_pads = -row.num_tokens % multiple
    if num_pads == 0:
        return row
    pads_TLK = _even_routes(num_pads, model, mesh).to(row.tokens_T.device)
    routes_TLK = row.routes_TLK
    if routes_TLK is None:  # samples keep the router's choice, pads do not
        routes_TLK = pads_TLK.new_full((row.num_tokens, *pads_TLK.shape[1:]), -1)
    end = row.cu_seqlens_S1[-1:] + num_pads
    return dataclasses.replace(
        row,
        tokens_T=torch.cat([row.tokens_T, row.tokens_T.new_zeros(num_pads)]),
        cu_seqlens_S1=torch.cat([row.cu_seqlens_S1, end.to(torch.int32)]),
        routes_TLK=torch.cat([routes_TLK.to(torch.int32), pads_TLK]),
    )


def route_last_tokens(row: PackedRow, model: Any, mesh: ParallelMesh) -> PackedRow:
    """``row`` with even routes for each sample's last token where the rollout has none.

    Then a whole row's routes are known before its forward pass. Only for losses that read no logits of a sample's last
    token, as all next-token losses.
    """
    if row.routes_TLK is None or row.num_tokens == 0:
        return row
    last_S = row.cu_seqlens_S1[1:].long() - 1
    missing_S = last_S[(row.routes_TLK[last_S] < 0).all(-1).all(-1)]
    if len(missing_S) == 0:
        return row
    routes_TLK = row.routes_TLK.clone()
    even_SLK = _even_routes(len(missing_S), model, mesh)
    routes_TLK[missing_S] = even_SLK.to(routes_TLK.device, routes_TLK.dtype)
    return dataclasses.replace(row, routes_TLK=routes_TLK)


def _even_routes(num_rows: int, model: Any, mesh: ParallelMesh) -> torch.Tensor:
    config, slots_LE = model.config, model.slot_map.logical_to_slot
    routes = pad_routes(
        num_rows,
        slots_LE.shape[0],
        config.top_k,
        config.num_experts,
        num_ranks=mesh.num_ep,
        logical_to_slot=slots_LE.cpu().numpy(),
        first_row=mesh.ep_rank * num_rows,
    )
    return torch.from_numpy(routes)
