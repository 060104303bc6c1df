"""A worker's process is there as long as the worker is."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from pathlib import Path

import psutil
import pytest

from sgl_vllm.fsm.time_limit import PATIENCE
from sgl_vllm.fsm.worker import Worker, WorkerFailedError


class Vocabulary:
    """Something large, which only the first question needs."""

    def question(self) -> bytes:
        return b"a"


def test_a_worker_that_nobody_holds_is_gone_with_its_process_and_what_it_held() -> None:
    vocabulary = Vocabulary()
    worker = Worker(
        "sgl_vllm.fsm.regex_worker",
        timeout_s=10.0,
        memory_bytes=1 << 30,
        opening=vocabulary.question,
    )
    assert worker.ask(b"[a-c]+")[0] == 0
    assert worker._process is not None
    process = psutil.Process(worker._process.pid)
    assert process.is_running()
    held: list[weakref.ref[object]] = [weakref.ref(worker), weakref.ref(vocabulary)]
    del worker, vocabulary
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert not process.is_running()


def worker_of(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options) -> Worker:
    (tmp_path / "the_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return Worker("the_module", **({"timeout_s": 10.0, "memory_bytes": 1 << 30} | options))


TELLS_ITS_NICENESS = """
import os, time
time.sleep(0.2)  # imports
niceness = os.nice(0)
from sgl_vllm.fsm.worker import serve
serve(lambda question: (0, f"{niceness} {os.nice(0)}".encode()))
"""


def test_only_the_first_start_of_a_process_has_the_usual_priority(tmp_path, monkeypatch) -> None:
    usual = os.nice(0)
    low = min(19, usual + 10)
    worker = worker_of(TELLS_ITS_NICENESS, tmp_path, monkeypatch)
    assert worker.ask(b"") == (0, f"{usual} {low}".encode())
    worker.stop()
    assert worker.ask(b"") == (0, f"{low} {low}".encode())


def test_a_question_waits_for_a_process_that_starts_in_the_background(
    tmp_path, monkeypatch
) -> None:
    worker = worker_of(TELLS_ITS_NICENESS, tmp_path, monkeypatch, timeout_s=0.05)
    worker.start_ahead()
    worker.start_ahead()
    assert worker.ask(b"")[0] == 0  # its imports take longer than two questions may
    process = worker._process
    worker._start_first()
    assert worker._process is process


WAITS_OR_WORKS = """
import time
from sgl_vllm.fsm.worker import serve

def answer(question):
    if question.startswith(b"wait"):
        time.sleep(float(question.split()[1]))
    while question == b"work":
        pass
    return 0, b"done"

serve(answer)
"""


def test_the_limit_is_on_what_a_process_gets_of_the_processors(tmp_path, monkeypatch) -> None:
    worker = worker_of(WAITS_OR_WORKS, tmp_path, monkeypatch, timeout_s=0.4)
    assert worker.ask(b"wait 1") == (0, b"done")
    with pytest.raises(WorkerFailedError, match=r"more than 0\.4 s"):
        worker.ask(b"work")
    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"more than 0\.4 s"):
        worker.ask(b"wait 60")
    assert time.monotonic() - started >= PATIENCE * 0.4
