"""A worker's process is there as long as the worker is."""

from __future__ import annotations

import gc
import os
import sys
import weakref

import psutil

from sgl_vllm.fsm.worker import Worker


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


MODULE = """
import os, time
time.sleep(0.2)  # imports
niceness = os.nice(0)
from sgl_vllm.fsm.worker import serve
serve(lambda question: (0, str(niceness).encode()))
"""


def test_a_process_has_low_priority_while_it_imports(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    worker = Worker("slow_to_import", timeout_s=10.0, memory_bytes=1 << 30)
    assert worker.ask(b"") == (0, str(min(19, os.nice(0) + 10)).encode())
