"""The real engine, in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): it starts in about two
seconds and its scheduler can be looked into."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_vllm.server_process import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
from tests.engine import starts
from tests.engine.engine import Engine

ENVIRONMENT = {
    # `Engine` says how large the cache is. This could do so in whole GiB only.
    **{name: value for name, value in CPU_ENVIRONMENT.items() if name != "VLLM_CPU_KVCACHE_SPACE"},
    **QUIET_ENVIRONMENT,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # With more threads, a small model waits for the slowest core all the time. Where PyTorch is
    # loaded already, `Engine` sees to it; for that, vLLM must not bind threads to cores.
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    """For the engines of this package only: the servers of other tests inherit what is set."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def no_plugin_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line with `--plugin` names the plugin in the environment, where every engine that
    starts later would find it."""
    monkeypatch.setenv("VLLM_PLUGINS", "")  # so that it is unset again afterwards
    monkeypatch.delenv("VLLM_PLUGINS")


@pytest.fixture(scope="package")
def quick_starts(environment: None) -> Iterator[None]:
    with starts.small_heap(), starts.nothing_twice():
        yield


@pytest.fixture(scope="module")
def start(quick_starts: None) -> Iterator[Callable[..., Engine]]:
    """Start an engine: `start(plugin={...})` with the plugin and its options, `start()` stock.

    Each is stopped when the next one starts, so at most one runs at a time.
    """
    running: list[Engine] = []

    def start_engine(plugin: dict[str, Any] | None = None, **engine_args: Any) -> Engine:
        for engine in running:
            engine.stop()
        running.clear()
        gc.collect()
        running.append(Engine(plugin, **engine_args))
        return running[0]

    yield start_engine
    for engine in running:
        engine.stop()
