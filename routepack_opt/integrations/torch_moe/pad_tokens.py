"""Pad tokens: rows of a length kernels like, without changing what training computes.

Pad tokens form a sequence of their own at the end of the row, so no sample attends to one, and the loss never sees
them. They are real expert load, though: their routes are spread evenly over EP ranks, distinct experts in every token.

Names: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from routepack_opt.routes import pad_routes

if TYPE_CHECKING:
    from routepack_opt.integrations.torch_moe.mesh import ParallelMesh
    from routepack_opt.integrations.torch_moe.samples import PackedRow


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
    config, slots_LE = model.config, model.slot_map.logical_to_slot
    device = row.tokens_T.device
    pads = pad_routes(
        num_pads,
        slots_LE.shape[0],
        config.top_k,
        config.num_experts,
        num_ranks=mesh.num_ep,
        logical_to_slot=slots_LE.cpu().numpy(),
        first_row=mesh.ep_rank * multiple,
    )
    routes_TLK = row.routes_TLK
    if routes_TLK is None:  # samples keep the router's choice, pads do not
        routes_TLK = torch.full((row.num_tokens, *pads.shape[1:]), -1, dtype=torch.int32, device=device)
    end = row.cu_seqlens_S1[-1:] + num_pads
    return dataclasses.replace(
        row,
        tokens_T=torch.cat([row.tokens_T, row.tokens_T.new_zeros(num_pads)]),
        cu_seqlens_S1=torch.cat([row.cu_seqlens_S1, end.to(torch.int32)]),
        routes_TLK=torch.cat([routes_TLK.to(torch.int32), torch.from_numpy(pads).to(device, torch.int32)]),
    )
