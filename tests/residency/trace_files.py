"""Small route.csv files and traces for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.traces.route_trace import RouteTrace

if TYPE_CHECKING:
    from pathlib import Path

HEADER = """# route_trace v1
# model=tiny n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=5
# layer=1 expert_bytes=20 dense_bytes=5
"""
NAMES = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
# prompt of two tokens (layer-major), then one decoded token; header and names are lines 1 to 5
ROWS = """0,0,0,0,0,3,0.6,0,10
0,0,0,0,1,1,0.4,0,10
0,0,1,0,0,1,0.6,0,10
0,0,1,0,1,2,0.4,0,10
0,0,0,1,0,0,0.6,0,20
0,0,0,1,1,1,0.4,0,20
0,0,1,1,0,0,0.6,0,20
0,0,1,1,1,1,0.4,0,20
0,1,2,0,0,3,0.6,1,0
0,1,2,0,1,0,0.4,0,10
0,1,2,1,0,0,0.6,1,0
0,1,2,1,1,3,0.4,0,20
"""


def write(folder: Path, text: str, name: str = "t.route.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def random_trace(
    rng: np.random.Generator, *, num_tokens: int, num_layers: int, num_experts: int, top_k: int, num_turns: int = 1
) -> RouteTrace:
    """Skewed routes, expert sizes that differ by layer, a prompt in every turn, some rows without routes."""
    popularity = rng.dirichlet(np.full(num_experts, 0.5), size=num_layers) + 1e-3
    noise = rng.gumbel(size=(num_tokens, num_layers, num_experts)) + np.log(popularity)
    experts = np.argsort(-noise, axis=2)[:, :, :top_k].astype(np.int32)
    experts[rng.random((num_tokens, num_layers)) < 0.05] = -1
    turns = np.sort(rng.integers(num_turns, size=num_tokens))
    starts = np.searchsorted(turns, turns)
    prompt = rng.integers(0, 6, size=num_turns)
    return RouteTrace(
        source="random",
        num_experts=num_experts,
        layers=np.arange(num_layers, dtype=np.int64),
        expert_bytes=rng.integers(1, 4, size=num_layers).astype(np.int64),
        experts=experts,
        prefill=np.arange(num_tokens) - starts < prompt[turns],
        turns=turns.astype(np.int64),
    )
