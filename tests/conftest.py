"""What holds for all tests."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# A shell lets its background jobs ignore SIGINT, and the programs that tests start and interrupt
# would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A parallel loop of numba's, such as that of vLLM's n-grams, gives all OpenMP loops of the thread
# that runs it as many threads as this says, whatever PyTorch was told: by default one per core. Two
# test processes then wait for each other's threads at every layer, and take five times as long.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def no_logger_silenced() -> Iterator[None]:
    """A module that silences a logger is named here, instead of the later one that misses a log."""

    def heard() -> set[str]:
        loggers = ("root", "vllm", "sgl_vllm")
        return {name for name in loggers if logging.getLogger(name).isEnabledFor(logging.WARNING)}

    before = heard()
    yield
    assert heard() == before
