"""What jumps count."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.counters import counter


@dataclass(slots=True)
class JumpCounters:
    """Jumps since start."""

    jumps: int = counter("Runs of forced tokens appended to an output.", unit="runs")
    forced_tokens: int = counter("Tokens in these runs.", unit="tokens")
    stale_tokens: int = counter(
        "Tokens sampled by a forward pass that was in flight at a jump, and dropped.",
        unit="tokens",
    )
    held_passes: int = counter(
        "Passes that waited for the one in flight, because forced text was expected after it.",
        unit="passes",
    )
    outside_full_graphs: int = counter(
        "Passes with forced tokens in no full CUDA graph, with `--cudagraph-metrics`.",
        unit="passes",
        metric="jump_passes_outside_full_graphs",
    )
    errors: int = counter(
        "Unexpected errors in a jump. Each is in the log.", unit="errors", metric="jump_errors"
    )
