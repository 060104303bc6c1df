"""Which of vLLM's two model runners a worker has.

Owns the distinction, by the method of each that takes a step's changes of requests. `wrap` finds it
on the runner. Does not own what is done there (`approximate/copies.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


def is_v1(runner: object) -> TypeGuard[RunnerV1]:
    return hasattr(runner, "_update_states")


def is_v2(runner: object) -> TypeGuard[RunnerV2]:
    return hasattr(runner, "update_requests")


UNKNOWN = "this vLLM's model runner has no known method that updates requests"
"""Why a runner cannot be changed unless `is_known`."""


def is_known(runner: object) -> TypeGuard[RunnerV1 | RunnerV2]:
    return is_v1(runner) or is_v2(runner)


class InRunner(Protocol):
    """What changes a method of a live runner."""

    def install_in_v1(self, runner: RunnerV1) -> None: ...

    def install_in_v2(self, runner: RunnerV2) -> None: ...


def install(part: InRunner, runner: RunnerV1 | RunnerV2) -> None:
    """Install a part in a runner, whichever it is."""
    if is_v2(runner):
        part.install_in_v2(runner)
    elif is_v1(runner):
        part.install_in_v1(runner)
