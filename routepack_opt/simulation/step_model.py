"""step_time.json: seconds of one layer's kernels as calibrate fits them and simulate reads them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import read_json

if TYPE_CHECKING:
    import os

    from routepack_opt.simulation.calibrate import Calibration

FORMAT = "routepack.step-time/1"


@dataclass(frozen=True)
class StepModel:
    """Seconds of one layer.

    Parameters
    ----------
    blocks
        Block name -> (constant, a token, a squared token).
    experts
        (constant, an active expert, an assignment); None without expert times.
    hidden, expert_width
        Sizes the times belong to, None when unknown.
    backward
        Whether the times are forward and backward.
    source
        Where they come from.
    """

    blocks: dict[str, tuple[float, float, float]]
    experts: tuple[float, float, float] | None
    hidden: int | None
    expert_width: int | None
    backward: bool
    source: str = ""

    @classmethod
    def from_calibration(cls, fits: Calibration) -> StepModel:
        """The fitted terms."""
        blocks = {
            name: (fit.terms["constant"], fit.terms["token"], fit.terms["square"])
            for name, fit in fits.attention.items()
        }
        experts = None
        if fits.experts is not None:
            terms = fits.experts.terms
            experts = (terms["constant"], terms["active"], terms["token"])
        return cls(blocks, experts, fits.hidden, fits.expert_width, fits.backward, "; ".join(fits.sources))

    def to_json(self) -> dict[str, Any]:
        """The object of step_time.json."""
        names = ("constant_s", "token_s", "square_s")
        return {
            "format": FORMAT,
            "source": self.source,
            "hidden": self.hidden,
            "expert_width": self.expert_width,
            "backward": self.backward,
            "blocks": {name: dict(zip(names, values, strict=True)) for name, values in self.blocks.items()},
            "experts": None
            if self.experts is None
            else dict(zip(("constant_s", "active_s", "assignment_s"), self.experts, strict=True)),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepModel:
        """Read step_time.json; raises FormatError naming file and field."""
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise FormatError(f"{path}: field 'format': expected {FORMAT!r}")
        blocks = value.get("blocks")
        if not isinstance(blocks, dict):
            raise FormatError(f"{path}: field 'blocks': expected an object")
        if not isinstance(value.get("backward"), bool):
            raise FormatError(f"{path}: field 'backward': expected true or false")
        sizes = [value.get(name) for name in ("hidden", "expert_width")]
        if any(s is not None and (isinstance(s, bool) or not isinstance(s, int) or s < 1) for s in sizes):
            raise FormatError(f"{path}: fields 'hidden', 'expert_width': expected integers >= 1 or null")
        experts = value.get("experts")
        return cls(
            {
                name: _terms(path, f"blocks[{name!r}]", b, ("constant_s", "token_s", "square_s"))
                for name, b in blocks.items()
            },
            None if experts is None else _terms(path, "experts", experts, ("constant_s", "active_s", "assignment_s")),
            sizes[0],
            sizes[1],
            value["backward"],
            str(value.get("source", path)),
        )

    def check_sizes(self, hidden: int, expert_width: int, where: str) -> None:
        """Raises InvalidInput when the times were taken at other sizes."""
        for name, mine, wanted in (
            ("hidden", self.hidden, hidden),
            ("expert_width", self.expert_width, expert_width),
        ):
            if mine is not None and mine != wanted:
                raise InvalidInput(f"{where}: field {name!r}: measured at {mine}, the model has {wanted}")


def _terms(path: str | os.PathLike[str], where: str, value: Any, names: tuple[str, ...]) -> tuple[float, float, float]:
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {where}: expected an object")
    numbers = [value.get(name) for name in names]
    for name, number in zip(names, numbers, strict=True):
        ok = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= sys.float_info.max
        if not ok:
            raise FormatError(f"{path}: {where}.{name}: {number!r} is not a finite number >= 0")
    first, second, third = map(float, numbers)  # type: ignore[arg-type]
    return first, second, third
