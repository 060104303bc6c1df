"""The real engine, in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): it starts in about two
seconds and its scheduler can be looked into."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_vllm.server_process import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
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
def small_heap(environment: None) -> Iterator[None]:
    """vLLM collects garbage eight times for each engine that starts and ends in this process. With
    torch, vLLM and all tests in the heap each takes about half a second, longer than most tests.

    What one engine has loaded is frozen here once and for all. vLLM, which freezes an engine that
    has started and unfreezes everything when it ends, does neither: engines are collected.
    """
    with pytest.MonkeyPatch.context() as patch:
        freeze = gc.freeze
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        Engine({}).stop()
        gc.collect()
        freeze()
        yield
    gc.unfreeze()


@pytest.fixture(scope="package")
def quick_starts(environment: None) -> Iterator[None]:
    """What vLLM does again at each start, although the answer cannot differ in one process: it asks
    `lscpu` for the cores, twice, and searches all modules for kernels to replace.

    It also starts a process for each class of models that it has not seen on this machine, which
    only imports it, and compiles how it ranks log-probabilities. Either takes longer than most
    tests."""
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import cpu_resource_utils

    with torch.compiler.set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        cores = functools.cache(cpu_resource_utils._get_cpu_list)
        patch.setattr(cpu_resource_utils, "_get_cpu_list", cores)
        replace_kernels = functools.cache(CpuPlatform.register_triton_kernel_overrides)
        patch.setattr(
            CpuPlatform, "register_triton_kernel_overrides", staticmethod(replace_kernels)
        )
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield


@pytest.fixture(scope="module")
def start(quick_starts: None, small_heap: None) -> Iterator[Callable[..., Engine]]:
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
