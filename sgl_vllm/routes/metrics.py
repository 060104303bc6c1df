"""The plugin's counters in vLLM's own Prometheus registry, prefix `sgl_vllm:`.

Owns nothing that counts: the engine does. A scrape of `/metrics` asks it first, so the numbers are
of that moment, and between scrapes nothing runs. Of several API servers each asks all its engines,
so whichever answers a scrape tells the whole of it, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.sgl_vllm.server")

REFRESH_TIMEOUT_S = 2.0
PREFIX = "sgl_vllm:"

_COUNTERS = {
    "forward_passes": ("forward_passes", None, "Steps in which the model ran."),
    "prefix_lookups": ("radix", "lookups", "Admitted requests that were looked up in the cache."),
    "prefix_lookup_tokens": ("radix", "prompt_tokens", "Tokens of the requests looked up."),
    "prefix_hit_tokens": ("radix", "hit_tokens", "Tokens found in the prefix cache."),
    "tier_declined_tokens": (
        "radix",
        "tier_declined_tokens",
        "Tokens found by a KV connector that were cheaper to compute than to load.",
    ),
    "partial_block_hits": ("radix", "partial_block_hits", "Hits that end inside a block."),
    "retained_tails": ("radix", "retained_tails", "Partial last blocks kept for later requests."),
    "ordered_steps": ("schedule", "ordered_steps", "Steps with an order to decide."),
    "evicted_blocks": ("radix", "evicted_blocks", "KV blocks that the tree gave up to make room."),
    "evicted_tokens": ("radix", "evicted_tokens", "Tokens that the tree gave up to make room."),
    "expired_tokens": ("radix", "expired_tokens", "Tokens forgotten because of radix_ttl_s."),
    "held_back": (
        "schedule",
        "held_back",
        "Times a request waited a step for what another was computing.",
    ),
    "passes": ("schedule", "passes", "Times a later request was admitted before a waiting one."),
    "grammars": ("fsm", "ours", "Formats compiled to automata of the plugin."),
    "grammars_cached": ("fsm", "ours_cached", "Structured requests whose automaton was known."),
    "grammars_xgrammar": ("fsm", "xgrammar", "Structured requests handed on to xgrammar."),
    "grammars_guidance": ("fsm", "guidance", "Structured requests handed on to guidance."),
    "grammars_refused": ("fsm", "refused", "Structured requests whose format nobody takes."),
    "grammar_errors": ("fsm", "errors", "Unexpected errors in a grammar; see the log."),
    "jumps": ("jump_forward", "jumps", "Times forced text was appended to a request."),
    "forced_tokens": ("jump_forward", "forced_tokens", "Output tokens that no pass had to decide."),
    "stale_tokens": (
        "jump_forward",
        "stale_tokens",
        "Tokens that a pass in flight at a jump sampled, and that were dropped.",
    ),
    "released_when_stuck": (
        "jump_forward",
        "released_when_stuck",
        "Jumped requests that gave up their blocks because nothing else could run.",
    ),
    "jump_errors": ("jump_forward", "errors", "Unexpected errors in a jump; see the log."),
    "scored_requests": ("select", "scored_requests", "Prompt scores that read a cached prefix."),
}
_GAUGES = {
    "tree_nodes": ("radix", "tree_nodes", "Nodes of the radix tree."),
    "tree_tokens": ("radix", "tree_tokens", "Tokens that the radix tree holds."),
    "tree_blocks": ("radix", "tree_blocks", "KV blocks that the radix tree holds."),
    "cache_tokens": ("radix", "cache_tokens", "Tokens that all KV blocks have room for."),
    "protected_tokens": (
        "radix",
        "protected_tokens",
        "Tokens' room in blocks of the tree that running requests or pins hold.",
    ),
    "pinned_tokens": ("radix", "pinned_tokens", "Tokens' room in blocks of the tree with a pin."),
}
_SUMMARIES = {
    "compile_seconds": (
        "fsm",
        ("compilations", "compile_s"),
        "Compiling the formats of structured output.",
    ),
    "mask_seconds": (
        "structured_output",
        ("masked_steps", "mask_s"),
        "What a step waits for the masks of legal tokens.",
    ),
}


class SglCollector(Collector):
    """Shows `stats`, the engine's last answer."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family, names in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (part, key, text) in names.items():
                value: Any = self.stats.get(part)
                if key is not None and value is not None:
                    value = value.get(key)
                if value is not None:
                    yield family(f"{PREFIX}{name}", text, value=value)
        for name, (part, keys, text) in _SUMMARIES.items():
            if keys[0] in (counts := self.stats.get(part, {})):
                num, seconds = (counts[key] for key in keys)
                yield SummaryMetricFamily(f"{PREFIX}{name}", text, num, seconds)
        yield from self._labelled()

    def _labelled(self) -> Iterator[Metric]:
        radix = self.stats.get("radix", {})
        if "hit_tokens" in radix:
            inside = radix["partial_block_hit_tokens"]
            tiers = CounterMetricFamily(
                f"{PREFIX}tier_hit_tokens", "Prompt tokens found, by where.", labels=["tier"]
            )
            tiers.add_metric(["whole_blocks"], radix["hit_tokens"] - inside)
            tiers.add_metric(["partial_block"], inside)
            for tier in ("host", "disk", "p2p", "other_tier"):
                tiers.add_metric([tier], radix[f"{tier}_hit_tokens"])
            yield tiers
        if parts := self.stats.get("parts"):
            is_on = GaugeMetricFamily(
                f"{PREFIX}part_on", "1 if the part is on, 0 if it is off.", labels=["part"]
            )
            for part, state in parts.items():
                is_on.add_metric([part], state == "on")
            yield is_on


class MetricsMiddleware:
    """Asks for the counters before `/metrics` is answered; any other request passes untouched.

    vLLM answers from the process's registry, or from one it makes for that answer out of what
    several processes have counted (`PROMETHEUS_MULTIPROC_DIR`). To the second nobody can add, so
    there this gives the answer: the same, and ours.
    """

    def __init__(
        self,
        app: ASGIApp,
        collector: SglCollector,
        registry: CollectorRegistry,
        ask: Callable[[FastAPI], Awaitable[dict[str, Any]]],
    ) -> None:
        """`registry` is vLLM's, with `collector` in it; `ask(app)` what that shows."""
        self._app = app
        self._collector = collector
        self._registry = registry
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path.rstrip("/") != "/metrics":
            return await self._app(scope, receive, send)
        try:
            stats = await asyncio.wait_for(self._ask(scope["app"]), REFRESH_TIMEOUT_S)
        except Exception as error:
            # Not the last ones: another API server may have told more since, so that counters would
            # seem to be reset.
            stats = {}
            logger.warning("sgl_vllm: /metrics is without the plugin's: %r", error)
        self._collector.stats = stats
        if self._registry is REGISTRY:
            return await self._app(scope, receive, send)
        page = await run_in_threadpool(generate_latest, self._registry)
        await Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})(scope, receive, send)
