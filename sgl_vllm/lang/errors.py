"""The exceptions of the language.

Owns these types, and which errors a program has handled. A program raises `ProgramError`. A backend
raises `BackendError`, which becomes the cause of a `ProgramError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BackendError(Exception):
    """A backend could not do what a program asked for.

    `status` is the HTTP status of the answer, or None if there was no answer.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedError(BackendError):
    """The backend does not have a feature, and there is no other way to the same answer.

    `feature` and `backend` name them, and `advice` says what to do instead.
    """

    def __init__(self, backend: str, feature: str, advice: str) -> None:
        super().__init__(f"{feature} is not supported by {backend}: {advice}")
        self.backend = backend
        self.feature = feature
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.backend, self.feature, self.advice)


class ProgramError(Exception):
    """An operation of a program failed. The operations after it in the same prompt did not run.

    `operation` names it as the program has it, such as ``gen 'answer'``, and `where` its branch,
    such as ``fork[1]``. The reason is the chained ``__cause__``. Once the program has read it,
    `is_handled` is True, and the run does not raise it at its end.
    """

    def __init__(self, operation: str, where: str, cause: BaseException) -> None:
        place = f" in {where}" if where else ""
        says_it_all = isinstance(cause, (BackendError, ProgramError, ProgramCancelled))
        reason = str(cause) if says_it_all else _described(cause)
        super().__init__(f"{operation}{place} failed: {reason}")
        self.operation = operation
        self.where = where
        self.is_handled = False
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type, tuple[str, str, BaseException | None]]:
        return type(self), (self.operation, self.where, self.__cause__)


@contextmanager
def reading() -> Iterator[None]:
    """In the ``with`` block, the program reads: a ProgramError raised there becomes handled."""
    try:
        yield
    except ProgramError as error:
        error.is_handled = True
        raise


def cause_of(error: ProgramError) -> BaseException:
    """What the program's function has raised, if the operation was canceled because of that;
    otherwise `error`."""
    reason = error.__cause__
    return (isinstance(reason, ProgramCancelled) and reason.__cause__) or error


class ProgramCancelled(Exception):
    """The run was canceled before this operation finished: the program's function raised an
    exception or was interrupted, or another branch was chosen. In a run with ``stream=True``, that
    exception is the ``__cause__``."""


def canceled_by(error: BaseException) -> ProgramCancelled:
    """The reason for canceling a run whose function has raised `error`."""
    reason = ProgramCancelled(f"the program's function raised {_described(error)}")
    reason.__cause__ = error
    return reason


def _described(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
