"""Joining the job: rank, backend, device and timeouts from the environment of torchrun or of our launcher.

torch is imported inside the functions: the launcher reads this module and needs none.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput, RoutePackError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_log = logging.getLogger(__name__)
STORE_VARIABLE = "ROUTEPACK_STORE"  # rendezvous file of our launcher; torchrun brings MASTER_ADDR and MASTER_PORT


@dataclass(frozen=True)
class ProcessSetup:
    """Who this process is.

    Attributes
    ----------
    rank, world_size
        Place in the job.
    local_rank
        Place on this machine, which is also the index of its GPU.
    backend
        ``"gloo"`` or ``"nccl"``.
    device
        torch.device of the parameters.
    """

    rank: int
    world_size: int
    local_rank: int
    backend: str
    device: Any


def under_launcher(env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun or our launcher started this process."""
    env = os.environ if env is None else env
    return "RANK" in env and "WORLD_SIZE" in env


def init_process_group(
    *, backend: str = "auto", timeout_s: float = 600.0, num_threads: int | None = None
) -> ProcessSetup:
    """Join the default process group described by the environment; alone when there is none.

    Parameters
    ----------
    backend
        ``"gloo"`` (CPU), ``"nccl"`` (GPUs; tensors on the host still go through gloo) or ``"auto"``: nccl where a GPU
        is at hand.
    timeout_s
        How long a collective waits for the others before it fails.
    num_threads
        Threads of torch in this process; None keeps torch's own choice.

    Raises
    ------
    InvalidInput
        Environment or backend that cannot work, with what would.
    RoutePackError
        The ranks did not meet within ``timeout_s``.
    """
    import torch
    import torch.distributed as dist

    env = os.environ
    alone = not under_launcher()
    world_size = 1 if alone else _integer(env, "WORLD_SIZE", 1, 1 << 20)
    rank = 0 if alone else _integer(env, "RANK", 0, world_size - 1)
    local_rank = _integer(env, "LOCAL_RANK", 0, world_size - 1) if "LOCAL_RANK" in env and not alone else rank
    backend, device = _backend_and_device(backend, local_rank)
    if not timeout_s > 0:
        raise InvalidInput(f"timeout_s: {timeout_s!r} is not a positive number of seconds")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if dist.is_initialized():
        raise InvalidInput("process group: already initialised in this process; call destroy_process_group() first")
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "rank": rank, "world_size": world_size}
    if alone:
        options["store"] = dist.HashStore()
    elif STORE_VARIABLE in env:
        options["store"] = dist.FileStore(env[STORE_VARIABLE], world_size)
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise InvalidInput(f"environment: RANK is set but {missing[0]} is not; start ranks with torchrun")
        options["init_method"] = "env://"
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl", **options)
    except (RuntimeError, ValueError) as error:
        raise RoutePackError(f"rank {rank} of {world_size}: the ranks did not meet ({error})") from error
    return ProcessSetup(rank, world_size, local_rank, backend, device)


def destroy_process_group() -> None:
    """Leave the default process group; nothing when there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(**options: Any) -> Iterator[ProcessSetup]:
    """:func:`init_process_group` and, after a body that ended well, :func:`destroy_process_group`.

    After an exception the group is left as it is: leaving it may wait for peers that wait for us. The process is
    about to end, which closes its connections and fails the peers at once.
    """
    setup = init_process_group(**options)
    yield setup
    destroy_process_group()


def _integer(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = env[name]
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise InvalidInput(f"environment: {name}={text!r}; expected an integer from {low} to {high}")
    return int(text)


def _backend_and_device(backend: str, local_rank: int) -> tuple[str, Any]:
    import torch
    import torch.distributed as dist

    if backend not in ("auto", "gloo", "nccl"):
        raise InvalidInput(f"backend: {backend!r} is not one of auto, gloo, nccl")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if backend == "auto":
        backend = "nccl" if num_gpus > local_rank else "gloo"
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not num_gpus:
        raise InvalidInput("backend: nccl needs a CUDA device and there is none here; use gloo")
    if local_rank >= num_gpus:
        raise InvalidInput(f"backend: nccl needs a GPU for local rank {local_rank} and this machine has {num_gpus}")
    return backend, torch.device("cuda", local_rank)
