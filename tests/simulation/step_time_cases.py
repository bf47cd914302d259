"""Small windows, plans and timers the step-time tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import routepack_opt as rp
from routepack_opt.simulation.kernel_shape import KernelShape, gqa_shape
from routepack_opt.simulation.work import AttentionKernel, Kernel

CAP = 64
COST = rp.CostModel((rp.Stage("full", 3.0, 5.0),))


def small_window(seed: int = 0, num_samples: int = 20, num_layers: int = 3, num_experts: int = 8) -> rp.Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, num_samples)
    demand = rng.multinomial(1, np.full(num_experts, 1 / num_experts), (num_samples, num_layers)) * 2
    return rp.Window(lengths, demand * lengths[:, None, None], top_k=2)


def small_plan(window: rp.Window, *, dp: int = 4, ep: int = 2, shards: int = 2, cost: rp.CostModel = COST) -> rp.Plan:
    topology = rp.Topology(dp=dp, ep=ep, shards=shards)
    return rp.plan_window(window, topology, token_cap=CAP, cost=cost, budget_steps=20)


def small_shape(num_layers: int = 3) -> KernelShape:
    return gqa_shape("small", hidden=16, expert_width=16, heads=2, head_dim=8, num_layers=num_layers)


@dataclass
class FormulaTimer:
    """A timer that computes: alpha T + beta Q for attention, gamma W for experts, both in units of the cap."""

    alpha: float
    beta: float
    gamma: float = 1.0
    cap: int = CAP
    per_active: float = 0.0
    calls: list[Kernel] = field(default_factory=list)

    def time_s(self, kernel: Kernel) -> float:
        self.calls.append(kernel)
        if isinstance(kernel, AttentionKernel):
            return self.alpha * kernel.tokens / self.cap + self.beta * kernel.squares / self.cap**2
        return self.gamma * kernel.tokens / self.cap + self.per_active * kernel.num_active
