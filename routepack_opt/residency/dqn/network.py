"""The network: one small MLP scores every candidate, so that any number of candidates, layers and experts will do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import MissingDependency
from routepack_opt.residency.dqn.candidates import FEATURES, NUM_GAINS

try:
    import torch
except ImportError:
    raise MissingDependency(
        "the dqn policy and its training need torch; install it with: pip install routepack-opt[torch]"
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class QNetwork(torch.nn.Module):
    """Q(s, a) = V(s) + A(x_a) - A(x_no-op), for candidates x [B, K, F] of which row 0 is no-op.

    No-op is the zero of all advantages: what decides, an edit against none, is not drowned by the value of the state.
    A is an MLP of two layers plus a linear part; V reads the mean of the legal candidates' hidden values.

    Parameters
    ----------
    hidden
        Width.
    gains
        Whether the network sees the gains that the stage model predicts.
    rng
        Draws the first weights.
    """

    def __init__(self, *, hidden: int = 64, gains: bool = True, rng: np.random.Generator | None = None) -> None:
        """He-normal weights, zero biases, a zero linear part."""
        super().__init__()
        self.hidden, self.gains = hidden, gains
        self.num_features = len(FEATURES) - (0 if gains else NUM_GAINS)
        rng = np.random.default_rng(0) if rng is None else rng
        shapes = {
            "layer1": (self.num_features, hidden), "layer2": (hidden, hidden), "advantage": (hidden, 1),
            "value": (hidden, 1),
        }  # fmt: skip
        for name, shape in shapes.items():
            scale = np.sqrt(2.0 / shape[0]) * (1.0 if name.startswith("layer") else 0.1)
            weights = torch.from_numpy((scale * rng.standard_normal(shape)).astype(np.float32))
            setattr(self, f"{name}_weight", torch.nn.Parameter(weights))
            if name != "advantage":  # a constant of A cancels
                setattr(self, f"{name}_bias", torch.nn.Parameter(torch.zeros(shape[1])))
        self.linear_weight = torch.nn.Parameter(torch.zeros(self.num_features, 1))

    def advantage(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A relative to no-op [B, K], and hidden values [B, K, H]."""
        x = features[..., : self.num_features]
        hidden = torch.relu(x @ self.layer1_weight + self.layer1_bias)
        hidden = torch.relu(hidden @ self.layer2_weight + self.layer2_bias)
        scores = (hidden @ self.advantage_weight + x @ self.linear_weight)[..., 0]
        return scores - scores[..., :1], hidden

    def forward(self, features: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
        """Q [B, K]; -inf where not ``legal`` [B, K]."""
        scores, hidden = self.advantage(features)
        share = legal.to(hidden.dtype)
        pooled = (hidden * share[..., None]).sum(dim=1) / share.sum(dim=1, keepdim=True)
        value = pooled @ self.value_weight + self.value_bias
        return (value + scores).masked_fill(~legal, -torch.inf)

    def scores(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """A relative to no-op, float32 [K], of one window's candidates.

        In numpy: for a hundred rows torch would spend more time on its threads than on the sums.
        """
        weights = {name: value.detach().numpy() for name, value in self.named_parameters()}
        x = features[:, : self.num_features]
        hidden = np.maximum(x @ weights["layer1_weight"] + weights["layer1_bias"], 0.0)
        hidden = np.maximum(hidden @ weights["layer2_weight"] + weights["layer2_bias"], 0.0)
        scores = (hidden @ weights["advantage_weight"] + x @ weights["linear_weight"])[:, 0]
        return np.asarray(scores - scores[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Deterministic algorithms on one thread; the process's settings come back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)
