"""What a worker gets and gives back, wherever it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routepack_opt.certify.one import Record, Settings, blank_record, certify_case

if TYPE_CHECKING:
    from routepack_opt.certify.cases import Case

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A case to certify; ``lost`` says why an earlier worker did not come back with it."""

    case: Case
    settings: Settings
    lost: str = ""

    def again(self, reason: str) -> Task | None:
        """After a worker was lost: once more, with no time beyond the cheap rungs; None after the second loss."""
        if self.lost:
            return None
        logger.warning("%s: %s; trying once more without the expensive rungs", self.case.name, reason)
        return replace(self, settings=replace(self.settings, time_limit_s=0.0), lost=reason)

    def finish(self, record: Record, wanted: Settings) -> Record:
        """The record as it is written: of the time limit asked for, and with what went wrong."""
        record["time_limit_s"] = wanted.time_limit_s
        if self.lost:
            record["error"] = "; ".join(filter(None, (self.lost, record.get("error"))))
        return record

    def fail(self, reason: str, wanted: Settings) -> Record:
        """A record that claims nothing."""
        return self.finish({**blank_record(self.case, self.settings), "error": reason}, wanted)


def work(task: Task) -> Record:
    """Certify; where a solver raises, what the cheap rungs find is kept, and the other cases go on."""
    errors = []
    for settings in (task.settings, replace(task.settings, time_limit_s=0.0)):
        try:
            record = certify_case(task.case, settings)
        except Exception as error:  # solvers fail in many ways
            logger.debug("certify %s", task.case.name, exc_info=True)
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        else:
            return {**record, "error": errors[0]} if errors else record
    return {**blank_record(task.case, task.settings), "error": errors[0]}
