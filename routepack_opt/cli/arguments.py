"""Argument parsing shared by the commands: one-line refusals, values checked where they are read."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and where to read on; never guesses abbreviated options."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        """Texts are shown as they are laid out here."""
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Exit 2."""
        print(f"{self.prog}: {' '.join(message.split())}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def integer(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers >= ``low``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {low}")
        return value

    return parse


def number(low: float, high: float, what: str) -> Callable[[str], float]:
    """An argparse type: finite numbers in [low, high]; ``what`` completes "... is not"."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse
