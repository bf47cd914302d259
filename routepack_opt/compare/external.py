"""Methods of other installed packages. A plug-in is one line of :data:`TABLE`; nothing of theirs is copied here.

A package of your own can offer a method too: an entry point of the group ``routepack_opt.compare`` that names a
:class:`~routepack_opt.compare.methods.Method`.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.compare.case import Answer
from routepack_opt.compare.heuristics import ffd_cells, partition_cells
from routepack_opt.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from routepack_opt.compare.case import Case

ENTRY_POINTS = "routepack_opt.compare"


@dataclass(frozen=True)
class External:
    """A function of another package and how to call it.

    Attributes
    ----------
    module, attribute
        Where the function lives; ``attribute`` may be dotted.
    distribution
        What to install, for the message.
    answer
        (the function, case) -> Answer.
    """

    name: str
    about: str
    module: str
    attribute: str
    distribution: str
    answer: Callable[[Any, Case], Answer]

    def missing(self) -> str | None:
        """Why it cannot run here; None when it can."""
        try:
            found = importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):  # a parent package is missing or half installed
            found = False
        return None if found else f"{self.distribution} is not installed"

    def run(self, case: Case, budget_s: float, seed: int) -> Answer:
        """Call it; these methods know neither budget nor seed."""
        del budget_s, seed
        try:
            function: Any = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                function = getattr(function, part)
        except (ImportError, AttributeError) as error:
            raise MissingDependency(f"method {self.name!r}: {self.module}.{self.attribute}: {error}") from None
        return self.answer(function, case)


def _partitioned(function: Any, case: Case) -> Answer:
    """Rows by a function (lengths, parts, equal counts) -> index lists; experts by LPT."""
    from routepack_opt.compare.builtin import lpt_slots

    def partition(weights: list[int], num_parts: int, equal_counts: bool) -> list[list[int]]:
        return [[int(i) for i in part] for part in function(weights, num_parts, equal_counts)]

    return Answer(partition_cells(case, partition), lpt_slots(case))


def _deepseek_eplb(function: Any, case: Case) -> Answer:
    import torch

    weight = torch.from_numpy(case.window.total_load)
    table = function(weight, case.window.num_experts, 1, 1, case.topology.ep)[0]
    return Answer(ffd_cells(case), _slots_of_table(table))


def _vllm_eplb(function: Any, case: Case) -> Answer:
    import torch

    weight = torch.from_numpy(case.window.total_load)
    table = function(weight, case.window.num_experts, 1, 1, case.topology.ep)
    return Answer(ffd_cells(case), _slots_of_table(table[0] if isinstance(table, tuple) else table))


def _slots_of_table(table: Any) -> NDArray[np.int64]:
    """int64 [L, E], the slot of each expert, from the expert of each slot (no expert twice: E slots for E experts)."""
    return np.argsort(np.asarray(table, dtype=np.int64), axis=1, kind="stable").astype(np.int64)


TABLE = (
    External(
        "verl", "verl's sequence balancing, experts by LPT",
        "verl.utils.seqlen_balancing", "get_seqlen_balanced_partitions", "verl", _partitioned,
    ),
    External(
        "eplb+ffd", "DeepSeek EPLB without replicas, first fit decreasing",
        "eplb", "rebalance_experts", "EPLB (github.com/deepseek-ai/EPLB)", _deepseek_eplb,
    ),
    External(
        "vllm-eplb+ffd", "vLLM's EPLB policy without replicas, first fit decreasing",
        "vllm.distributed.eplb.policy.default", "DefaultEplbPolicy.rebalance_experts", "vllm", _vllm_eplb,
    ),
)  # fmt: skip
