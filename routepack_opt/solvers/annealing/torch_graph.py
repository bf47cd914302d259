"""Blocks of rounds, replayed as one CUDA graph and compiled where that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RoundBlock:
    """Runs ``step(draw)`` for every round of a block.

    A round is some hundred small kernels, so on a GPU starting them costs more than running them; a graph starts a
    whole block at once. The first full block captures it.

    Parameters
    ----------
    step
        Changes the state in place; no host synchronisation, fixed shapes.
    num_rounds
        Length of a block; shorter ones run kernel by kernel.
    changed
        The tensors ``step`` changes, to be put back after the trial runs that capturing needs.
    use_graph
        False on devices without graphs.
    compiled
        Let ``torch.compile`` fuse the kernels of a round: needs a C++ compiler (CPU) or Triton (CUDA), and up to a
        minute for the first round with new shapes; torch caches the result on disk. The results stay the same.
    """

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self,
        step: Callable[[Any], None],
        num_rounds: int,
        changed: Sequence[torch.Tensor],
        use_graph: bool,
        compiled: bool,
    ) -> None:
        self._step = torch.compile(step, fullgraph=True, dynamic=False) if compiled else step
        self._num_rounds, self._changed, self._use_graph = num_rounds, changed, use_graph
        self._graph: Any = None
        self._static: Any = None

    def run(self, draws: Any, count: int) -> None:
        """Run the first ``count`` rounds of ``draws``, a named tuple of tensors [Q, ..]."""
        if not self._use_graph or count != self._num_rounds:
            self._rounds(draws, count)
            return
        if self._graph is None:
            self._capture(draws)
        for static, drawn in zip(self._static, draws, strict=True):
            static.copy_(drawn)
        self._graph.replay()

    def _rounds(self, draws: Any, count: int) -> None:
        for index in range(count):
            self._step(type(draws)(*(tensor[index] for tensor in draws)))

    def _capture(self, draws: Any) -> None:
        self._static = type(draws)(*(tensor.clone() for tensor in draws))
        saved = [tensor.clone() for tensor in self._changed]
        with torch.cuda.device(self._static[0].device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._rounds(self._static, 2)  # lazily made handles and workspaces must exist before the capture
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._rounds(self._static, self._num_rounds)
        for tensor, old in zip(self._changed, saved, strict=True):
            tensor.copy_(old)
        self._graph = graph
