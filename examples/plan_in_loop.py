"""Plan every optimizer step of a training loop, while the rest of the step gets ready.

The rollout engine and the trainer are stand-ins of a few lines; the calls to ``routepack_opt`` are the real ones.
Run it: ``python examples/plan_in_loop.py``
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import routepack_opt as rp

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 32, 4
TOKEN_CAP = 512
TOPOLOGY = rp.Topology(dp=8, ep=4)  # 8 DP ranks in two EDP shards of 4


def rollout(step: int, num_samples: int = 96) -> tuple[list[int], list[np.ndarray]]:
    """Stand-in for the rollout engine: lengths, and per sample the counts of its routes.

    A worker holds the routes [tokens - 1, L, K] of its samples; it counts them where they are and sends int32 [L, E].
    """
    rng = np.random.default_rng([7, step])
    popularity = np.random.default_rng(7).gamma(0.5, size=(NUM_LAYERS, NUM_EXPERTS)) + 0.02
    lengths, counts = [], []
    for _ in range(num_samples):
        length = int(rng.integers(8, 160))
        noise = rng.gumbel(size=(length - 1, NUM_LAYERS, NUM_EXPERTS))
        routes = np.argsort(-(np.log(popularity) + noise), axis=2)[:, :, :TOP_K]
        lengths.append(length)
        counts.append(rp.count_experts(routes, NUM_EXPERTS, length=length))
    return lengths, counts


class Trainer:
    """Stand-in for the trainer: it remembers where experts stand and which tokens it has seen."""

    def __init__(self) -> None:
        """Slot e holds expert e at first."""
        self.slots = np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1))
        self.tokens = 0

    def reference_log_probs(self) -> None:
        """Work that does not depend on the plan and hides the time it takes."""

    def move_experts(self, plan: rp.Plan) -> int:
        """Bring weights and optimizer state to the new slots; routers stay as they are (docs/placement.md)."""
        moved = int((self.slots != plan.logical_to_slot).sum())
        self.slots = plan.logical_to_slot
        return moved

    def forward_backward(self, row: int, plan: rp.Plan, lengths: list[int]) -> None:
        """One synchronised microbatch: DP rank d runs the samples of its cell, the loss is divided by all tokens."""
        for samples in plan.cells[row]:
            tokens = sum(lengths[i] for i in samples)
            assert 0 < tokens <= TOKEN_CAP
            self.tokens += tokens  # a real trainer: loss = token_losses.sum() / plan.total_tokens


def main(num_steps: int = 3) -> list[rp.Plan]:
    """Train ``num_steps`` steps; returns their plans."""
    rp.warmup()  # compile and load the kernels now, not in the first step
    trainer, plans = Trainer(), []
    previous = None
    with ThreadPoolExecutor(1) as pool:
        for step in range(num_steps):
            lengths, counts = rollout(step)
            window = rp.Window(lengths, np.stack(counts), top_k=TOP_K)
            pending = pool.submit(
                rp.plan_window,
                window,
                TOPOLOGY,
                token_cap=TOKEN_CAP,
                budget_s=0.3,
                seed=step,
                previous=previous,
                constraints=rp.Constraints(max_moved=0.5),
            )
            trainer.reference_log_probs()
            plan = pending.result()
            plan.verify(window)  # cheap next to a step; raises on any broken promise
            moved = trainer.move_experts(plan)
            for row in range(plan.rows):
                trainer.forward_backward(row, plan, lengths)
            print(
                f"step {step}: {window.num_samples} samples in {plan.rows} rows ({plan.rows_status}),"
                f" {100 * plan.gap:.2f}% above the bound, {moved} slots changed"
            )
            previous = plan
            plans.append(plan)
    return plans


if __name__ == "__main__":
    main()
