"""While a search runs: Ctrl-C ends it early but keeps its result, and a bar on a terminal shows the time used."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_SHORT_S = 3.0  # shorter searches are over before anyone reads a line about them


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; a second Ctrl-C interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stop
        return

    def first(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, old)


@contextmanager
def search_progress(budget_s: float | None, quiet: bool) -> Iterator[None]:
    """Announce a long search on stderr, and draw a bar there when it is a terminal.

    Parameters
    ----------
    budget_s
        None when the budget is in steps.
    """
    if quiet or (budget_s is not None and budget_s < _SHORT_S):
        yield
        return
    length = "" if budget_s is None else f" for {budget_s:g} s"
    logger.info("searching%s; Ctrl-C stops early and keeps the best plan so far", length)
    if budget_s is None or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    bar = threading.Thread(target=_draw, args=(budget_s, done), daemon=True)
    bar.start()
    try:
        yield
    finally:
        done.set()
        bar.join()


def _draw(budget_s: float, done: threading.Event) -> None:
    from tqdm import tqdm

    start = time.monotonic()
    form = "{l_bar}{bar}| {n:.0f}/{total:.0f} s"
    with tqdm(total=budget_s, bar_format=form, leave=False, file=sys.stderr) as bar:
        while not done.wait(0.25):
            bar.n = min(time.monotonic() - start, budget_s)
            bar.refresh()
