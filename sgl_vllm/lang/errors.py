"""What can go wrong in a program, as exceptions.

Owns the exception types of the language and nothing else. `ProgramError` is what a program raises;
`BackendError` is what a backend raises, and is then the cause of a `ProgramError`.
"""

from __future__ import annotations


class BackendError(Exception):
    """A server did not do what was asked.

    `status` is the HTTP status it answered with, or None when it did not answer at all.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedError(BackendError):
    """The backend has no such feature, and no fall-back gives the same answer."""

    def __init__(self, backend: str, feature: str, advice: str) -> None:
        super().__init__(f"{feature} is not supported by {backend}: {advice}")
        self.backend = backend
        self.feature = feature
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.backend, self.feature, self.advice)


class ProgramError(Exception):
    """An operation of a program failed; the operations after it on its stream did not run.

    `operation` names it as it stands in the program, such as ``gen 'answer'``. The reason is the
    chained ``__cause__``.
    """

    def __init__(self, operation: str, where: str, cause: BaseException) -> None:
        place = f" in {where}" if where else ""
        said, kind = str(cause), type(cause).__name__
        reason = said if said and isinstance(cause, Exception) else f"{kind} {said}".strip()
        super().__init__(f"{operation}{place} failed: {reason}")
        self.operation = operation
        self.where = where
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type, tuple[str, str, BaseException | None]]:
        return type(self), (self.operation, self.where, self.__cause__)


class ProgramCancelled(Exception):
    """The program was given up before this operation ran: its body raised or was interrupted."""
