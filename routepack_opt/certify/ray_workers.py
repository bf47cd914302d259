"""The same tasks on the machines of a Ray cluster that is already up."""

from __future__ import annotations

import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from routepack_opt.certify.tasks import Task, work
from routepack_opt.errors import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from routepack_opt.certify.one import Record, Settings

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0


def run_ray(tasks: Iterable[Task], wanted: Settings, address: str) -> Iterator[Record]:
    """Records in the order they are finished; one CPU of the cluster a case.

    The machines of the cluster need this package installed. As with local workers, a case whose worker dies is tried
    once more by the cheap rungs alone.

    Parameters
    ----------
    address
        Of the cluster: "auto", "host:port" or "ray://host:port".

    Raises
    ------
    MissingDependency
        Ray is not installed.
    InvalidInput
        No cluster answers.
    """
    ray = _import_ray()
    _connect(ray, address)
    remote = ray.remote(num_cpus=1, max_retries=0)(_work_remotely)
    queue = deque(tasks)
    running: dict[Any, Task] = {}
    try:
        while queue or running:
            room = max(1, int(ray.cluster_resources().get("CPU", 1)))
            while queue and len(running) < room:
                task = queue.popleft()
                running[remote.remote(task)] = task
            done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in done:
                record = _collect(ray, reference, running.pop(reference), queue, wanted)
                if record is not None:
                    yield record
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _collect(ray: Any, reference: Any, task: Task, queue: deque[Task], wanted: Settings) -> Record | None:
    try:
        return task.finish(ray.get(reference), wanted)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"Ray worker lost: {type(error).__name__}: {lines[-1].strip()[:200]}"
    once_more = task.again(reason)
    if once_more is None:
        return task.fail(reason, wanted)
    queue.append(once_more)
    return None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependency("running on a Ray cluster needs ray: pip install routepack-opt[ray]") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    where = f"ray address {address!r}"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # Ray itself tries for more than a minute
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{where}: no cluster answers ({error})") from None
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    except Exception as error:  # connection, value, runtime and timeout errors, by the form of the address
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "a cluster with authentication wants its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        raise InvalidInput(f"{where}: cannot be joined ({line[:200]}); {hint}") from None


def _work_remotely(task: Task) -> Record:
    """In a Ray worker, which lives on between tasks: kernels are loaded once."""
    from routepack_opt.certify import one

    global _warm
    if not _warm:
        one.warmup(task.settings.ep is not None)
        _warm = True
    return work(task)


_warm = False
