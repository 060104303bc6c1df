"""The circuit breaker: a part that fails is switched off, and the engine goes on without it.

Owns when a part counts as failed, and that its failure is logged once, in one wording. Does not own
what happens without the part: that is the caller's, in `on_trip`. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

_REPORT = "Please report this with the traceback below"


class CircuitBreaker:
    """Runs the steps of one part and trips after `max_errors` unexpected errors.

    Invariant: once tripped it stays tripped, runs no step, and logs nothing more. A step that fails
    never raises into the engine. Costs one attribute check and one call per step.

    Args:
        part: what fails, for the log, such as "the radix tree".
        fallback: what happens from then on, such as "vLLM's own prefix cache is used instead".
        logger: where errors go.
        max_errors: how many errors trip it. All are logged, with their tracebacks.
        on_trip: called once, when it trips.
    """

    def __init__(
        self,
        part: str,
        fallback: str,
        logger: logging.Logger,
        *,
        max_errors: int = 1,
        on_trip: Callable[[], None] | None = None,
    ) -> None:
        self.part = part
        self.fallback = fallback
        self.num_errors = 0
        self._logger = logger
        self._max_errors = max_errors
        self._on_trip = on_trip

    @property
    def tripped(self) -> bool:
        """Whether the part is off because of errors."""
        return self.num_errors >= self._max_errors

    def run(
        self, step: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result | None:
        """The step's result. None if it fails, or if the breaker has tripped."""
        if self.tripped:
            return None
        try:
            return step(*args, **kwargs)
        except Exception:
            self.record()
            return None

    def record(self, scope: str = "") -> None:
        """Count the exception being handled; call it from an `except` block.

        Args:
            scope: what of the part failed, if less than all of it, such as "request 7".
        """
        if self.tripped:
            return
        self.num_errors += 1
        failed = f"{self.part} failed for {scope}" if scope else f"{self.part} failed"
        if not self.tripped:
            self._logger.exception("sgl-vllm: %s. %s", failed, _REPORT)
            return
        times = f" {self.num_errors} times" if self._max_errors > 1 else ""
        self._logger.exception(
            "sgl-vllm: %s%s and is switched off: %s. %s", failed, times, self.fallback, _REPORT
        )
        if self._on_trip is not None:
            try:
                self._on_trip()
            except Exception:
                self._logger.exception("sgl-vllm: %s failed to switch off. %s", self.part, _REPORT)
