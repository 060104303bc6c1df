"""A worker's process is there as long as the worker is."""

from __future__ import annotations

import gc
import os
import subprocess
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


def worker_of(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options) -> Worker:
    (tmp_path / "the_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return Worker("the_module", **({"timeout_s": 10.0, "memory_bytes": 1 << 30} | options))


ANSWERS = """
from sgl_vllm.fsm.worker import serve
serve(lambda question: (0, b""))
"""


def test_a_worker_without_references_is_gone_with_its_process_and_what_it_held(
    tmp_path, monkeypatch
) -> None:
    vocabulary = Vocabulary()
    worker = worker_of(ANSWERS, tmp_path, monkeypatch, opening=vocabulary.question)
    assert worker.ask(b"[a-c]+")[0] == 0
    assert worker._process is not None
    process = psutil.Process(worker._process.pid)
    assert process.is_running()
    held: list[weakref.ref[object]] = [weakref.ref(worker), weakref.ref(vocabulary)]
    del worker, vocabulary
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert not process.is_running()


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


def test_a_process_that_was_killed_is_started_again(tmp_path, monkeypatch) -> None:
    worker = worker_of(WAITS_OR_WORKS, tmp_path, monkeypatch)
    assert worker.ask(b"") == (0, b"done")
    process_of(worker).kill()
    process_of(worker).wait()
    assert worker.ask(b"") == (0, b"done")


def process_of(worker: Worker) -> subprocess.Popen[bytes]:
    assert worker._process is not None
    return worker._process


def test_the_process_ends_with_its_parent(tmp_path, monkeypatch) -> None:
    worker_of(WAITS_OR_WORKS, tmp_path, monkeypatch)  # for the module
    program = (
        "import os\nfrom sgl_vllm.fsm.worker import Worker\n"
        "worker = Worker('the_module', timeout_s=10.0, memory_bytes=1 << 30)\n"
        "worker.ask(b'')\nprint(worker._process.pid, flush=True)\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(100):
        if has_ended(pid):
            return
        time.sleep(0.05)
    pytest.fail("the process is still there")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_forked_child_has_a_process_of_its_own(tmp_path, monkeypatch) -> None:
    worker = worker_of(WAITS_OR_WORKS, tmp_path, monkeypatch)
    worker.ask(b"")
    parents = process_of(worker).pid
    child = os.fork()
    if child == 0:
        is_good = worker.ask(b"") == (0, b"done") and process_of(worker).pid != parents
        worker.stop()
        os._exit(0 if is_good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.ask(b"") == (0, b"done")
    assert process_of(worker).pid == parents
