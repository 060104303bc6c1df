"""What a compilation in the engine's process may take from the engine's loop."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

pytest.importorskip("vllm")

from sgl_vllm.fsm.time_limit import PATIENCE
from sgl_vllm.fsm.vllm import limits
from sgl_vllm.fsm.vllm.limits import (
    CompilationLimitError,
    CompilersBusyError,
    one_of_few,
    within_limits,
)


def test_threads_switch_often_while_anything_compiles() -> None:
    usual = sys.getswitchinterval()

    def compile_two() -> list[float]:
        inner = within_limits(sys.getswitchinterval, "inner")
        return [inner, sys.getswitchinterval()]

    assert within_limits(compile_two, "outer") == pytest.approx([limits.SWITCH_INTERVAL_S] * 2)
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_what_limits_itself_runs_here_and_waits_for_its_turn(monkeypatch) -> None:
    usual = sys.getswitchinterval()
    with one_of_few("schema"):
        assert sys.getswitchinterval() == pytest.approx(limits.SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == pytest.approx(usual)
    monkeypatch.setattr(limits, "COMPILE_TIMEOUT_S", 0.01)
    with contextlib.ExitStack() as others:
        for _ in range(limits.MAX_COMPILING):
            others.enter_context(one_of_few("schema"))
        with pytest.raises(CompilersBusyError, match="4 others"), one_of_few("schema"):
            pytest.fail("a fifth at a time")
    with one_of_few("schema"):
        pass


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMPILE_TIMEOUT_S", 0.05)
    done = threading.Event()
    with pytest.raises(CompilationLimitError, match=r"more than 0\.05 s"):
        within_limits(done.wait, "grammar")
    done.set()


def test_what_keeps_a_processor_busy_is_refused_when_its_time_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "COMPILE_TIMEOUT_S", 0.2)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            pass

    before = time.process_time()
    with pytest.raises(CompilationLimitError, match=r"more than 0\.2 s"):
        within_limits(work, "grammar")
    used = time.process_time() - before
    ended.set()
    assert 0.2 <= used < 0.2 * PATIENCE
