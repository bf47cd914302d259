"""The committed map from logical expert to slot, version-stamped: the one thing dispatch asks where an expert lives.

Names: L MoE layers, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from routepack_opt.errors import InvalidInput, RoutePackError


class PlacementBroken(RoutePackError):
    """Experts were left between two placements; nothing may run until a checkpoint is loaded."""


class SlotMap:
    """Where every logical expert of every MoE layer lives, for one version of the placement.

    The two tensors keep their storage for the life of the job: :meth:`publish` writes into them at a step boundary, so
    that a whole forward-backward (recomputation included) reads one version.

    Parameters
    ----------
    logical_to_slot
        int [L, E], a permutation of 0..E-1 in every layer.
    version
        Of this placement; each publication adds one.
    device
        Where dispatch reads it.

    Raises
    ------
    InvalidInput
        A layer is no permutation; names it.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self, logical_to_slot: Any, version: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        table_LE, inverse_LE = _permutations(logical_to_slot)
        self._logical_to_slot = table_LE.to(device)
        self._slot_to_logical = inverse_LE.to(device)
        self._version = int(version)
        self._poison: str | None = None

    @classmethod
    def identity(cls, num_layers: int, num_experts: int, device: torch.device | str = "cpu") -> SlotMap:
        """Slot e holds expert e."""
        return cls(np.tile(np.arange(num_experts), (num_layers, 1)), device=device)

    @property
    def logical_to_slot(self) -> torch.Tensor:
        """int64 [L, E]; raises PlacementBroken after :meth:`poison`."""
        self._check()
        return self._logical_to_slot

    @property
    def slot_to_logical(self) -> torch.Tensor:
        """int64 [L, E], the inverse; raises PlacementBroken after :meth:`poison`."""
        self._check()
        return self._slot_to_logical

    @property
    def version(self) -> int:
        """How many publications led here; raises PlacementBroken after :meth:`poison`."""
        self._check()
        return self._version

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self._logical_to_slot.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self._logical_to_slot.shape[1])

    @property
    def is_broken(self) -> bool:
        """Whether :meth:`poison` was called."""
        return self._poison is not None

    def publish(self, logical_to_slot: Any, version: int) -> None:
        """Put the next placement in force; call it only once every moved tensor is in place on every rank.

        Raises
        ------
        InvalidInput
            Another shape, no permutation, or a version that is not the current one plus one.
        """
        self._check()
        if version != self._version + 1:
            raise InvalidInput(f"version: {version} does not follow {self._version}; expected {self._version + 1}")
        self._write(logical_to_slot)
        self._version = version

    def restore(self, logical_to_slot: Any, version: int) -> None:
        """Put a checkpoint's placement in force, whatever was before; also heals a broken map.

        The caller has just written every per-expert tensor in this placement.
        """
        self._write(logical_to_slot)
        self._version = int(version)
        self._poison = None

    def poison(self, reason: str) -> None:
        """Refuse every later read: weights and moments may be mixed. The first reason is kept."""
        if self._poison is None:
            self._poison = reason

    def _write(self, logical_to_slot: Any) -> None:
        table_LE, inverse_LE = _permutations(logical_to_slot)
        if table_LE.shape != self._logical_to_slot.shape:
            raise InvalidInput(
                f"logical_to_slot: shape {tuple(table_LE.shape)}, expected {tuple(self._logical_to_slot.shape)}"
            )
        self._logical_to_slot.copy_(table_LE)
        self._slot_to_logical.copy_(inverse_LE)

    def _check(self) -> None:
        if self._poison is not None:
            raise PlacementBroken(f"the placement is broken ({self._poison}); restart from the last checkpoint")


def _permutations(logical_to_slot: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Int64 [L, E] copies on the CPU of the map and its inverse."""
    if isinstance(logical_to_slot, torch.Tensor):
        logical_to_slot = logical_to_slot.detach().cpu().numpy()
    table_LE = np.array(logical_to_slot)
    if table_LE.ndim != 2 or table_LE.dtype.kind not in "iu":
        raise InvalidInput(
            f"logical_to_slot: expected integers [L, E], found {table_LE.dtype} of shape {table_LE.shape}"
        )
    inverse_LE = np.argsort(table_LE, axis=1, kind="stable")
    wrong_L = (np.take_along_axis(table_LE, inverse_LE, axis=1) != np.arange(table_LE.shape[1])).any(axis=1)
    if wrong_L.any():
        raise InvalidInput(
            f"logical_to_slot[{int(np.argmax(wrong_L))}]: not a permutation of slots 0..{table_LE.shape[1] - 1}"
        )
    return torch.from_numpy(table_LE.astype(np.int64)), torch.from_numpy(inverse_LE.astype(np.int64))
