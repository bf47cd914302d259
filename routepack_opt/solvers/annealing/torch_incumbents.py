"""Best state every member has seen, kept on the device (shape suffixes: :mod:`.torch_state`)."""

from __future__ import annotations

import torch


class Incumbents:
    """Scores are compared as the device sums them: rounding may decide between states that agree to 15 digits."""

    def __init__(self, score_M3: torch.Tensor, cells_MN: torch.Tensor, rank_MLE: torch.Tensor) -> None:
        """Start from the given states; placements [1, L, E] are shared by all members and never change."""
        self.score_M3 = score_M3.clone()
        self.cells_MN = cells_MN.clone()
        self.rank_MLE = rank_MLE.to(torch.int16)

    def reset(self, score_M3: torch.Tensor, cells_MN: torch.Tensor, rank_MLE: torch.Tensor) -> None:
        """Forget everything but the given states."""
        self.score_M3.copy_(score_M3)
        self.cells_MN.copy_(cells_MN)
        self.rank_MLE.copy_(rank_MLE)

    def offer(self, score_M3: torch.Tensor, cells_MN: torch.Tensor, rank_MLE: torch.Tensor) -> None:
        """Keep the states that are lexicographically better than their member's incumbent."""
        (s0, s1, s2), (b0, b1, b2) = score_M3.unbind(1), self.score_M3.unbind(1)
        better = ((s0 < b0) | ((s0 == b0) & ((s1 < b1) | ((s1 == b1) & (s2 < b2)))))[:, None]
        self.score_M3.copy_(torch.where(better, score_M3, self.score_M3))
        self.cells_MN.copy_(torch.where(better, cells_MN, self.cells_MN))
        if self.rank_MLE.shape[0] == self.cells_MN.shape[0]:
            self.rank_MLE.copy_(torch.where(better[..., None], rank_MLE.to(torch.int16), self.rank_MLE))

    def best(self) -> int:
        """Member with the best incumbent (waits for the device)."""
        scores = [tuple(row) for row in self.score_M3.cpu().tolist()]
        return min(range(len(scores)), key=lambda member: scores[member])
