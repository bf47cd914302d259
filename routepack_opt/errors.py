"""Every refusal of user input, one class per exit code of the command line."""

from __future__ import annotations


class RoutePackError(Exception):
    """Base of all errors a user can cause; ``exit_code`` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        """One line, whatever the values quoted in ``message`` look like (arrays print over several)."""
        super().__init__(" ".join(line.strip() for line in str(message).splitlines()))


class VerificationError(RoutePackError):
    """A plan breaks one of its own claims; ``claim`` names the first broken one."""

    exit_code = 1

    def __init__(self, claim: str, message: str) -> None:
        """The message shown is "claim: message"."""
        super().__init__(f"{claim}: {message}")
        self.claim, self._message = claim, message

    def __reduce__(self) -> tuple[type[VerificationError], tuple[str, str]]:
        """Both arguments, so that the error survives the way back from a worker process."""
        return type(self), (self.claim, self._message)


class MissingDependency(RoutePackError):
    """An optional library is needed; the message names the extra to install."""

    exit_code = 2


class Infeasible(RoutePackError):
    """No plan exists under the given constraints.

    ``dummy_samples`` is how many more samples would make it feasible (None when that is not the cure).
    """

    exit_code = 3

    def __init__(self, message: str, *, dummy_samples: int | None = None) -> None:
        """``message`` says why, and what would do."""
        super().__init__(message)
        self.dummy_samples = dummy_samples


class InvalidInput(RoutePackError, ValueError):
    """A value is wrong; the message names the field, the index and what would be right."""

    exit_code = 4


class FormatError(InvalidInput):
    """A file cannot be read as what it should be; the message names the file and the field."""


class TopologyError(InvalidInput):
    """Parallel sizes that do not fit together; the message names them."""


def dummy_samples_needed(count: int, why: str) -> Infeasible:
    """The one sentence users see when a window has too few samples."""
    return Infeasible(f"{why}; needs {count} dummy sample{'' if count == 1 else 's'}", dummy_samples=count)
