"""What an unexpected error costs: one request, or one part, and never the engine.

Owns the two ways of containing errors, and how they are logged. Does not own what happens instead:
that is the caller's. Imports neither vLLM nor torch.

    error in                                          then
    a step with a fallback for this request alone     `Guard`: the fallback; every part stays on
    what all requests share, which may be damaged     `CircuitBreaker`: the part is switched off

A client that can cause one error can cause a thousand. So an error that depends on a request must
be contained by a `Guard`: it must not cost other clients a part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

_REPORT = "Please report this with the traceback below"


class Guard:
    """Contains the errors of one kind of step. Nothing is ever switched off.

    All errors are counted. The first, the second, the fourth, the eighth, ... is logged with its
    traceback, so that errors which a client repeats do not fill the log.

    Args:
        what: what fails, for the log, such as "the order of the queue".
        instead: what happens instead, such as "requests are served in order of arrival".
        logger: where errors go.
    """

    def __init__(self, what: str, instead: str, logger: logging.Logger) -> None:
        self.num_errors = 0
        self._what = what
        self._instead = instead
        self._logger = logger

    def run(
        self, step: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result | None:
        """The step's result; None if it fails."""
        try:
            return step(*args, **kwargs)
        except Exception:
            self.record()
            return None

    def record(self, scope: str = "") -> None:
        """Count the exception being handled; call it from an `except` block.

        Args:
            scope: where it failed, such as "request 7".
        """
        self.num_errors += 1
        if self.num_errors & (self.num_errors - 1):
            return
        failed = f"{self._what} failed for {scope}" if scope else f"{self._what} failed"
        times = f" (error {self.num_errors:,} of this kind)" if self.num_errors > 1 else ""
        self._logger.exception("sgl-vllm: %s: %s%s. %s", failed, self._instead, times, _REPORT)


class CircuitBreaker:
    """Switches a part off at its first error, because what it shares between requests may be
    damaged. It must not be reachable by what a client sends: see `Guard`.

    Invariant: once tripped it stays tripped, and logs nothing more.

    Args:
        part: what fails, for the log, such as "the radix tree".
        fallback: what happens from then on, such as "vLLM's own prefix cache is used instead".
        logger: where the error goes.
        on_trip: called once, when it trips.
    """

    def __init__(
        self, part: str, fallback: str, logger: logging.Logger, on_trip: Callable[[], None]
    ) -> None:
        self.tripped = False
        self._part = part
        self._fallback = fallback
        self._logger = logger
        self._on_trip = on_trip

    def trip(self) -> None:
        """Switch the part off; call it from an `except` block."""
        if self.tripped:
            return
        self.tripped = True
        self._logger.exception(
            "sgl-vllm: %s failed and is switched off: %s. %s", self._part, self._fallback, _REPORT
        )
        try:
            self._on_trip()
        except Exception:
            self._logger.exception("sgl-vllm: %s failed to switch off. %s", self._part, _REPORT)
