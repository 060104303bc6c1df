"""What one structured-output backend does with one schema: a verdict, and the time of each call.

Owns the walk along an instance. What is compared and shown is `benchmarks.masks`'.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.schemas import Schema


def evenly(chosen: Sequence[Schema], limit: int) -> list[Schema]:
    """`limit` of the schemas, evenly chosen, or all if there are fewer."""
    count = min(limit, len(chosen))
    return [chosen[number * len(chosen) // count] for number in range(count)]


@dataclass
class Times:
    """In nanoseconds, one per call."""

    compile: list[int] = field(default_factory=list)
    compile_again: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    accept: list[int] = field(default_factory=list)


WAYS_TO_FAIL = ("refused", "gave_up", "failed", "valid_refused", "invalid_accepted")


@dataclass
class Verdict:
    """What came out for one schema.

    Attributes:
        refused: why it did not compile.
        gave_up: it took longer than the limit, in compiling or with an instance.
        failed: an error after it had compiled.
        valid_refused, invalid_accepted: indices of the instances that went wrong.
        num_valid, num_invalid: instances that were tried.
        disagreements: tokens over which mask and `accept_tokens` disagree.
        compile_us: of the first compilation; None if there was none.
        compiled_to: the class of the grammar. The plugin hands some schemas to other backends.
    """

    name: str
    refused: str | None = None
    gave_up: bool = False
    failed: str | None = None
    valid_refused: list[int] = field(default_factory=list)
    invalid_accepted: list[int] = field(default_factory=list)
    num_valid: int = 0
    num_invalid: int = 0
    disagreements: int = 0
    compile_us: float | None = None
    compiled_to: str | None = None

    @property
    def kind(self) -> str:
        """In a word or two; with several things wrong, the first of them."""
        wrong = next((name for name in WAYS_TO_FAIL if getattr(self, name)), "right")
        return wrong.replace("_", " ")


class GaveUp(Exception):
    """Something took longer than its limit."""


@dataclass
class Asker:
    """Puts schemas to one backend. Only single calls are timed, with `time.perf_counter_ns`.

    Compilation runs in a thread of its own, as in vLLM, so that it can be given up. Such a thread
    goes on, and so does one that the backend itself gave up, as vLLM does for outlines after 5 s.
    The next schema waits for them, but not longer than the limit again.
    """

    backend: Any
    encode: Callable[[str], Sequence[int]]
    eos_token_id: int
    limit_s: float
    times: Times = field(default_factory=Times)
    abandoned: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        self._json = StructuredOutputOptions.JSON
        self._bitmask = self.backend.allocate_token_bitmask(1)
        self._row = self._bitmask.numpy()[0].view(np.uint32)

    def ask(self, schema: Schema) -> Verdict:
        """Never raises for what the backend does, Rust's panics included."""
        self._wait_for_abandoned()
        verdict = Verdict(schema.name)
        deadline_s = time.monotonic() + self.limit_s
        try:
            self._ask(schema, verdict, deadline_s)
        except GaveUp:
            verdict.gave_up = True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            verdict.failed = in_short(error)
        return verdict

    def _wait_for_abandoned(self) -> None:
        deadline_s = time.monotonic() + self.limit_s
        for thread in self.abandoned:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.abandoned = []

    def _ask(self, schema: Schema, verdict: Verdict, deadline_s: float) -> None:
        try:
            grammar, duration_ns = self._compiled(schema.text, deadline_s)
        except GaveUp:
            self.times.compile.append(round(self.limit_s * 1e9))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            verdict.refused = in_short(error)
            return
        verdict.refused = _late_error(grammar)
        if verdict.refused:
            return
        self.times.compile.append(duration_ns)
        verdict.compile_us = duration_ns / 1000
        verdict.compiled_to = type(grammar).__name__
        for index, one in enumerate(schema.instances):
            if index:
                grammar, duration_ns = self._compiled(schema.text, deadline_s)
                self.times.compile_again.append(duration_ns)
            accepted = self._comes_through(grammar, self.encode(one.text), verdict, deadline_s)
            verdict.num_valid += one.valid
            verdict.num_invalid += not one.valid
            if accepted != one.valid:
                (verdict.valid_refused if one.valid else verdict.invalid_accepted).append(index)

    def _compiled(self, schema: str, deadline_s: float) -> tuple[Any, int]:
        """The grammar and the nanoseconds that it took; GaveUp after the deadline."""

        def timed() -> tuple[Any, int]:
            begun_ns = time.perf_counter_ns()
            grammar = self.backend.compile_grammar(self._json, schema)
            return grammar, time.perf_counter_ns() - begun_ns

        before = set(threading.enumerate())
        executor = ThreadPoolExecutor(1)
        try:
            return executor.submit(timed).result(max(0.0, deadline_s - time.monotonic()))
        except BaseException as error:
            self.abandoned = [one for one in threading.enumerate() if one not in before]
            if isinstance(error, TimeoutError):
                raise GaveUp from None
            raise
        finally:
            executor.shutdown(wait=False)

    def _comes_through(
        self, grammar: Any, tokens: Sequence[int], verdict: Verdict, deadline_s: float
    ) -> bool:
        """Whether the mask allows each token of the instance in its turn, and then the end."""
        row, bitmask, times = self._row, self._bitmask, self.times
        clock = time.perf_counter_ns
        for token in (*tokens, self.eos_token_id):
            begun_ns = clock()
            grammar.fill_bitmask(bitmask, 0)
            times.mask.append(clock() - begun_ns)
            if not int(row[token >> 5]) >> (token & 31) & 1:
                verdict.disagreements += bool(grammar.validate_tokens([token]))
                return False
            accepting = [token]
            begun_ns = clock()
            accepted = grammar.accept_tokens("benchmark", accepting)
            times.accept.append(clock() - begun_ns)
            if not accepted:
                verdict.disagreements += 1
                return False
            if time.monotonic() > deadline_s:
                raise GaveUp
        verdict.disagreements += not grammar.is_terminated()
        return True


def _late_error(grammar: Any) -> str | None:
    """guidance compiles anything, and says afterwards what was wrong with it; vLLM's front end asks
    before it takes the request."""
    matcher = getattr(grammar, "ll_matcher", None)
    return (matcher.get_error() or None) if matcher is not None else None


def in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
