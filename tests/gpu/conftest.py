"""On a GPU: without CUDA nothing here runs, unless SGL_VLLM_TEST_DEVICE=cpu asks for the same tests
on the CPU, which says whether they are right themselves.

vLLM reads its environment when it is imported, so these tests are a process of their own: run
`pytest tests/gpu` and no other folder with it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_vllm.server_process import CPU_ENVIRONMENT, QUIET_ENVIRONMENT
from tests.gpu.configuration import Configuration, on_cpu

CONFIGURATION = Configuration.of_environment()
MODEL_VARIABLE = "SGL_VLLM_TEST_MODEL"
MODEL = "demo" if on_cpu() else "shape:qwen2.5-0.5b"

for name, value in {
    **QUIET_ENVIRONMENT,
    **(CPU_ENVIRONMENT | {"OMP_NUM_THREADS": "1"} if on_cpu() else {}),
    **CONFIGURATION.environment,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is looked into
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ[name] = value
os.environ.pop("VLLM_PLUGINS", None)


def why_skipped() -> str | None:
    """Why no test here can run; None if all can."""
    if on_cpu():
        return None
    try:
        import torch
    except ImportError:
        return "tests/gpu: there is no torch"
    if torch.cuda.is_available():
        return None
    return "tests/gpu: there is no CUDA device (SGL_VLLM_TEST_DEVICE=cpu runs them on the CPU)"


WHY_SKIPPED = why_skipped()

needs_exact = pytest.mark.skipif(
    CONFIGURATION.numerics == "plain" and not on_cpu(),
    reason="answers are equal to the token in the batch-invariant mode alone",
)
needs_cuda = pytest.mark.skipif(on_cpu(), reason="there is nothing of the kind on a CPU")


class Skipped(pytest.Item):
    """In place of a file's tests."""

    def runtest(self) -> None:
        pytest.skip(WHY_SKIPPED or "")

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(__file__).parent, None, self.name


class SkippedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield Skipped.from_parent(self, name="needs_cuda")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Without CUDA no test file is imported: some cannot be."""
    return SkippedFile.from_parent(parent, path=module_path) if WHY_SKIPPED else None


@pytest.fixture(scope="session")
def model() -> str:
    """The folder of the model; made on first use, without network."""
    from benchmarks.models import resolve_model

    return str(resolve_model(os.environ.get(MODEL_VARIABLE, MODEL)))


@pytest.fixture(scope="module")
def start(model: str) -> Iterator[Callable[..., Any]]:
    """Start an engine: `start(plugin={...})` with the plugin and its options, `start()` stock.

    `configuration` is another than this process has; its numerics must be the same. Each engine is
    stopped when the next one starts, so at most one runs at a time.
    """
    import torch
    from vllm import envs
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.engine.engine import Engine

    running: list[Engine] = []

    def stop() -> None:
        while running:
            running.pop().stop()
        gc.collect()
        if torch.cuda.is_available():
            cleanup_dist_env_and_memory()

    def start_engine(
        plugin: dict[str, Any] | None = None,
        configuration: Configuration = CONFIGURATION,
        **engine_args: Any,
    ) -> Engine:
        stop()
        assert configuration.numerics == CONFIGURATION.numerics
        os.environ.update(configuration.environment)
        envs.disable_envs_cache()  # the last engine has filled it
        set_cudagraph_capturing_enabled(True)  # the V1 runner ends with False, V2 needs True
        arguments = {"model": model, **configuration.engine_args, **engine_args}
        engine = Engine(plugin, **arguments)
        running.append(engine)
        if not on_cpu():  # the process is what it says it is
            config = engine.core.vllm_config
            assert config.use_v2_model_runner == (configuration.runner == "v2")
            is_async = configuration.scheduling == "async"
            assert bool(config.scheduler_config.async_scheduling) == is_async
        return engine

    yield start_engine
    stop()
