"""Sealing the window of an optimizer step: every rank tells lengths, expert counts and rewards of its samples.

Counts travel, routes do not: [L, E] integers a sample instead of [t, L, K].

Names: N samples of the window, n of one rank, L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal
from routepack_opt.routes import count_experts
from routepack_opt.window import Window

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout


@dataclass(frozen=True, eq=False)
class SealedWindow:
    """The window every rank plans or is planned for, and what the loss needs of all samples.

    Attributes
    ----------
    window
        Lengths and demand of N samples, in index order.
    rewards
        float64 [N].
    answer_tokens
        int64 [N], tokens with a loss.
    """

    window: Window
    rewards: NDArray[np.float64]
    answer_tokens: NDArray[np.int64]

    @property
    def loss_tokens(self) -> int:
        """What the loss is divided by."""
        return int(self.answer_tokens.sum())


def seal_window(
    rollouts: Mapping[int, Rollout],
    rewards: Mapping[int, float],
    num_samples: int,
    num_experts: int,
    mesh: ParallelMesh,
    *,
    group_size: int = 1,
    top_k: int | None = None,
) -> SealedWindow:
    """Gather counts from all ranks; every rank calls it and gets the same window.

    Parameters
    ----------
    rollouts, rewards
        This rank's samples, by index; each of the N indices is held by exactly one rank.
    num_samples
        N.
    num_experts
        E.
    group_size
        Consecutive samples that share a prompt.
    """
    own = sorted(rollouts)
    counts = [count_experts(rollouts[i].routes, num_experts, length=len(rollouts[i].tokens)) for i in own]
    facts = [(i, len(rollouts[i].tokens), len(rollouts[i].log_probs), rewards[i]) for i in own]
    sizes = torch.cat(all_gather_equal(torch.tensor([len(own)], device=mesh.device), mesh.dp_group)).tolist()
    shape = counts[0].shape if counts else (0, num_experts)
    facts_nF = torch.zeros(max(sizes), 4, dtype=torch.float64)  # integers below 2^53 are exact in it
    demand_nLE = torch.zeros(max(sizes), *shape, dtype=torch.int32)
    if own:
        facts_nF[: len(own)] = torch.tensor(facts, dtype=torch.float64)
        demand_nLE[: len(own)] = torch.from_numpy(np.stack(counts))
    all_facts = _rows(facts_nF, sizes, mesh)
    all_demand = _rows(demand_nLE, sizes, mesh)
    order = np.argsort(all_facts[:, 0], kind="stable")
    assert np.array_equal(all_facts[order, 0], np.arange(num_samples)), "each sample is held by exactly one rank"
    all_facts = all_facts[order]
    window = Window(
        all_facts[:, 1].astype(np.int64),
        all_demand[order],
        group_ids=np.arange(num_samples) // group_size,
        top_k=top_k,
    )
    return SealedWindow(window, all_facts[:, 3].astype(np.float64), all_facts[:, 2].astype(np.int64))


def _rows(mine: torch.Tensor, sizes: list[int], mesh: ParallelMesh) -> NDArray[Any]:
    """The first ``sizes[d]`` rows of every rank d's tensor."""
    gathered = all_gather_equal(mine.to(mesh.device), mesh.dp_group)
    return np.concatenate([rows[:size].cpu().numpy() for rows, size in zip(gathered, sizes, strict=True)])
