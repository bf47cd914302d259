"""A small random generator for compiled kernels: one uint64 of state, passed in, never global."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.solvers.annealing.kernel import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32), np.uint64(11)


def new_state(seed: int, stream: int) -> NDArray[np.uint64]:
    """uint64 [1], independent for each (seed, stream)."""
    return np.random.SeedSequence([seed % 2**63, stream]).generate_state(1, np.uint64).astype(np.uint64)


@kernel
def next_u64(state):
    """SplitMix64 (Steele, Lea, Flood 2014)."""
    z = state[0] + _GAMMA
    state[0] = z
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@kernel
def below(state, n):
    """Uniform integer in [0, n), n < 2**31."""
    return np.int64(((next_u64(state) >> _S32) * np.uint64(n)) >> _S32)


@kernel
def uniform(state):
    """Uniform float64 in (0, 1]."""
    return (np.float64(next_u64(state) >> _S11) + 1.0) * (1.0 / 9007199254740992.0)
