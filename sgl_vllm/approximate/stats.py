"""The counters of approximate reuse. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.counters import counter


@dataclass(slots=True)
class ApproximateCounters:
    """Requests that asked for approximate reuse, and what they got, since start."""

    requests: int = counter(
        "Requests that asked for approximate reuse.",
        unit="requests",
        metric="approximate_requests",
    )
    reusing_requests: int = counter(
        "Of these, requests that reused a segment from another place.",
        unit="requests",
        metric="approximate_reusing_requests",
    )
    segments: int = counter(
        "Segments whose KV was copied from another place.",
        unit="segments",
        metric="approximate_segments",
    )
    tokens: int = counter(
        "Prompt tokens whose KV was copied from another place instead of computed.",
        unit="tokens",
        metric="approximate_tokens",
    )
    given_up: int = counter(
        "Requests that computed their segments, because they had no room while others held the "
        "cached ones.",
        unit="requests",
        metric="approximate_given_up",
    )
