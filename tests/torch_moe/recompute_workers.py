"""Ranks of the recomputation test: the collectives of the second forward pass, with uneven and empty rows."""

from __future__ import annotations

import torch
from training_workers import CONFIG, make_mesh

from routepack_opt.integrations.torch_moe.model.decoder import build_model
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape


def largest_gradient_gap() -> float:
    """Between recomputing and storing, relative; rank 1 has no tokens, all tokens go to one EP rank in layer 0."""
    mesh = make_mesh(4, 1)
    lengths = [[4, 9], [], [1], [7, 7, 3]][mesh.rank]
    generator = torch.Generator().manual_seed(mesh.rank)
    tokens = torch.randint(0, CONFIG.vocab_size, (sum(lengths),), generator=generator)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    routes = torch.full((len(tokens), CONFIG.num_moe_layers, 2), -1, dtype=torch.int16)
    routes[:, 0] = torch.tensor([0, 1], dtype=torch.int16)
    found = []
    for recompute in (False, True):
        model = build_model(CONFIG, mesh, recompute=recompute)
        tape = RouteTape.replaying(routes)
        model(tokens, borders, tape=tape).logsumexp(-1).sum().backward()
        found.append([p.grad for p in model.parameters()])
    return max(float((a - b).abs().max() / (1e-6 + a.abs().max())) for a, b in zip(*found, strict=True))
