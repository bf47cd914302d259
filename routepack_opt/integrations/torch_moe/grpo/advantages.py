"""Group-relative advantages: an answer is judged against the other answers to the same prompt (GRPO).

Names: N samples, K answers of one prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_FLOOR = 1e-4  # of the standard deviation: one lucky answer in a large group must not weigh without bound


def group_advantages(rewards: ArrayLike, group_size: int, *, scale: str = "std") -> NDArray[np.float32]:
    """Reward minus the group's mean, float32 [N]; groups are ``group_size`` consecutive samples.

    Parameters
    ----------
    rewards
        [N], N a multiple of ``group_size``.
    scale
        "std" divides by the group's standard deviation (DeepSeekMath); "none" leaves differences as they are
        (Dr. GRPO), which weighs easy and hard prompts alike. A group of equal rewards gets zeros either way.

    Raises
    ------
    InvalidInput
        N does not split into groups, or a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or group_size < 1 or values.size % group_size:
        raise InvalidInput(f"rewards: shape {values.shape} does not split into groups of {group_size}")
    if not np.isfinite(values).all():
        raise InvalidInput(f"rewards[{int(np.argmin(np.isfinite(values)))}]: not a finite number")
    groups = values.reshape(-1, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    if scale == "std":
        advantages = advantages / (groups.std(axis=1, keepdims=True) + _FLOOR)
    elif scale != "none":
        raise InvalidInput(f"scale: {scale!r} is not one of std, none")
    advantages[groups.max(axis=1) == groups.min(axis=1)] = 0.0  # not the rounding of their mean
    return np.asarray(advantages.reshape(-1), dtype=np.float32)
