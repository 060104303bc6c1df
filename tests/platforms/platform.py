"""The four pairs of model runner and scheduler, and how a process gets one of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from tests.effort import REQUESTS


@dataclass(frozen=True)
class Platform:
    """A model runner and a way of scheduling.

    Attributes:
        uses_v2_runner: vLLM's V2 model runner, interpreted; otherwise the deprecated V1 runner.
        is_async: a step is scheduled while the one before it runs.
    """

    name: str
    uses_v2_runner: bool
    is_async: bool

    def set_up(self, patch: pytest.MonkeyPatch) -> None:
        """Make engines that start in this process run on this platform.

        Call it before Triton or vLLM is imported: both look at the environment once.
        """
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(self.uses_v2_runner)))
        if self != VLLMS_CHOICE_ON_A_CPU:
            patch.setenv("SGL_VLLM_CONFIG", '{"self_check": "off"}')  # it has tests of its own
        if self.uses_v2_runner:
            patch.setenv(REQUESTS, os.environ.get(REQUESTS, "0.25"))
            from tests.platforms import interpreter

            interpreter.set_up(patch)
        if self.is_async:
            from tests.platforms import asynchronous, v1

            asynchronous.allow(patch)
            v1.count_all_sampled_tokens(patch)


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("v2-async", uses_v2_runner=True, is_async=True),
        Platform("v2-sync", uses_v2_runner=True, is_async=False),
        Platform("v1-async", uses_v2_runner=False, is_async=True),
        Platform("v1-sync", uses_v2_runner=False, is_async=False),
    )
}
VLLMS_CHOICE_ON_A_CPU = PLATFORMS["v1-sync"]


def chosen(config: pytest.Config) -> Platform:
    """The platform of a test run."""
    return PLATFORMS[config.getoption("--vllm-platform", VLLMS_CHOICE_ON_A_CPU.name)]
