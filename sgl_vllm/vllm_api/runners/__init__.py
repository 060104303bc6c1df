"""vLLM's model runners behind one interface, and which of them an engine has.

runner.py   the interface
v2.py       vLLM's default
v1.py       the deprecated one, which nothing else in the plugin names
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.runners.runner import Runner
from sgl_vllm.vllm_api.runners.v1 import V1
from sgl_vllm.vllm_api.runners.v2 import V2 as V2

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_worker import Worker


def kind_of(engine: VllmConfig | Scheduler) -> type[Runner]:
    """The kind that an engine has, by its configuration or its scheduler."""
    return V2 if engine.use_v2_model_runner else V1


def runner_in(worker: Worker) -> Runner:
    """The runner of a worker, called in its process. ValueError if its kind is unknown."""
    kinds: tuple[type[Runner], ...] = (V2, V1)
    for kind in kinds:
        if hasattr(worker.model_runner, kind.updates_by):
            return kind(worker.model_runner)
    raise ValueError("this vLLM's model runner has no known method that updates requests")


def take_forced(worker: Worker) -> str | None:
    """Make a worker apply forced tokens from now on. Returns the reason if it cannot, else None."""
    try:
        runner_in(worker).take_forced()
    except ValueError as error:
        return str(error)
    return None
