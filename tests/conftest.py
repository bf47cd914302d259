"""Shared fixtures: where the data lies, and which tests this machine can run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def find_data() -> Path | None:
    """The data folder: ROUTEPACK_DATA, or shared/data beside the checkout."""
    named = os.environ.get("ROUTEPACK_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


def pytest_configure() -> None:
    """Drop kernels compiled before the newest kernel source; let tests interrupt what they start.

    numba keys its cache by the file a kernel stands in and does not see that a function it calls, in another file, has
    changed: tests would pass on code that is gone.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a background job of a plain shell; its children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    package = Path(__file__).resolve().parents[1] / "routepack_opt"
    sources = [path for path in package.rglob("*.py") if "njit" in path.read_text("utf-8")]
    newest = max(path.stat().st_mtime for path in sources)
    for path in package.rglob("__pycache__/*.nb[ic]"):
        if path.stat().st_mtime < newest:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = find_data()
    if folder is None:
        if os.environ.get("ROUTEPACK_REQUIRE_DATA") == "1":
            pytest.fail("the data folder is required (ROUTEPACK_REQUIRE_DATA=1) but was not found")
        pytest.skip("the data folder was not found; set ROUTEPACK_DATA")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    try:
        import torch

        available = torch.cuda.is_available()
    except ImportError:
        available = False
    if not available:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
