"""What makes the engines of one process start quickly, for tests and the soak."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.engine.engine import Engine


@contextmanager
def small_heap() -> Iterator[None]:
    """vLLM collects garbage eight times for each engine that starts and ends in this process. With
    torch, vLLM and all tests in the heap each takes about half a second, longer than most tests.

    Modules and caches that the first engine loads are frozen here, once. vLLM would freeze each
    engine after its start and unfreeze the heap at its end; it does neither here, so that the
    collector frees engines that have ended.
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


@contextmanager
def nothing_twice() -> Iterator[None]:
    """Skip work that vLLM repeats at each start with the same result: it asks `lscpu` for the
    cores, twice, and searches all modules for kernels to replace.

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
