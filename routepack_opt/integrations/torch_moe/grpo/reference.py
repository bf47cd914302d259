"""The policy that the KL term holds on to: the model as it was when reinforcement learning began, never moved.

Shape suffixes: T packed tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from routepack_opt.integrations.torch_moe.grpo.job import Job
from routepack_opt.integrations.torch_moe.parallel.mesh import all_reduce_
from routepack_opt.integrations.torch_moe.step.route_tape import RouteTape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from routepack_opt.integrations.torch_moe.grpo.run_config import RunConfig
    from routepack_opt.integrations.torch_moe.grpo.sampling import Rollout


class ReferencePolicy:
    """Log-probabilities of answers under the first policy; its experts lie contiguously and route as they choose.

    It is made anew from the seed and the warm start, at the start as at a restart, so that no checkpoint holds it.
    """

    def __init__(self, config: RunConfig, device: torch.device | str) -> None:
        """Every rank calls it; repeats the warm start."""
        job = Job.build(config, device)
        job.warm_start()
        self.model, self.mesh = job.model.requires_grad_(False), job.mesh
        self.temperature, self.token_cap = config.sampling.temperature, config.plan.token_cap

    @torch.no_grad()
    def log_probs(self, rollouts: Mapping[int, Rollout]) -> dict[int, NDArray[np.float32]]:
        """Of the answer tokens of each rollout of this rank; every rank of an EP group calls it."""
        cells = _cut({index: len(rollout.tokens) for index, rollout in rollouts.items()}, self.token_cap)
        count = torch.tensor([len(cells)], device=self.mesh.device)
        group = self.mesh.ep_group
        most = int(all_reduce_(count, group, dist.ReduceOp.MAX if group is not None else None).item())
        result: dict[int, NDArray[np.float32]] = {}
        for cell in [*cells, *([[]] * (most - len(cells)))]:  # the others of the group need this rank's experts
            result.update(self._forward([(index, rollouts[index]) for index in cell]))
        return result

    def _forward(self, cell: Sequence[tuple[int, Rollout]]) -> dict[int, NDArray[np.float32]]:
        device = self.mesh.device
        tokens_T = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(r.tokens for _, r in cell)])).to(device)
        borders = np.cumsum([0, *(len(r.tokens) for _, r in cell)])
        logits_TV = self.model(
            tokens_T, torch.from_numpy(borders).to(device, torch.int32), tape=RouteTape.off()
        ).float()
        log_probs_TV = torch.log_softmax(logits_TV / self.temperature, dim=-1)
        result = {}
        for start, (index, rollout) in zip(borders, cell, strict=False):
            first, last = int(start) + rollout.prompt_len, int(start) + len(rollout.tokens)
            chosen = log_probs_TV[first - 1 : last - 1].gather(1, tokens_T[first:last, None])
            result[index] = chosen[:, 0].cpu().numpy()
        return result


def _cut(lengths: Mapping[int, int], token_cap: int) -> list[list[int]]:
    """Samples in order, cut where the cap is reached."""
    cells: list[list[int]] = []
    room = 0
    for index, length in lengths.items():
        if not cells or length > room:
            cells.append([])
            room = token_cap
        cells[-1].append(index)
        room -= length
    return cells
