"""Several worker processes on a CPU: what vLLM's CPU build needs for a pipeline of two stages.

The later stages of a pipeline receive activations in buffers that vLLM allocates in its profiling
run. Its CPU build has none with `enforce_eager`.
"""

from __future__ import annotations

from typing import Any


class WithBuffers:
    """For `worker_extension_cls`: `collective_rpc("make_buffers")` before the first request."""

    model_runner: Any

    def make_buffers(self) -> None:
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
