"""The plugin's counters in vLLM's own Prometheus registry, prefix `sgl_vllm:`.

Owns no counters: the engines do. A scrape of `/metrics` asks the engines first, at most once per
second, because the route needs no API key. Between scrapes nothing runs. With several API servers,
each one asks all its engines, so any of them reports the whole server. Each has its own last
report, so two of them can differ while requests run. A scrape that arrives a second or more after
the end of another one never has older numbers, whichever API server answers.

A server in vLLM's development mode, which is not for untrusted clients, asks for each scrape. How
old the numbers may be is in the page's header `Cache-Control`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import ceil

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
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_vllm.counters import Declaration, Kind, declarations
from sgl_vllm.scheduler.stats import ON, EngineStats

logger = logging.getLogger("vllm.sgl_vllm.server")

REFRESH_TIMEOUT_S = 2.0
"""How long a scrape waits for the engines."""

MAX_AGE_S = 1
"""The engines are asked no more than this long before a scrape arrives."""

PREFIX = "sgl_vllm:"

_Family = CounterMetricFamily | GaugeMetricFamily


class SglCollector(Collector):
    """Exports `stats`, the engines' last report; nothing while it is None."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        families: dict[str, _Family] = {}
        timers: dict[str, list[tuple[Declaration, float]]] = {}
        for _, counters in self.stats.sections():
            for declared in declarations(counters):
                if declared.metric is None:
                    continue
                value = getattr(counters, declared.key)
                if declared.kind.metric_type == "summary":
                    timers.setdefault(declared.metric, []).append((declared, value))
                else:
                    _add_sample(families, declared, value)
        yield from families.values()
        for name, values in timers.items():
            yield _summary(name, values)
        if self.stats.parts:
            yield _parts_family(self.stats.parts)


def _add_sample(families: dict[str, _Family], declared: Declaration, value: float) -> None:
    """Several samples of one metric differ by their labels. The first one's help text counts."""
    names, metric = dict(declared.labels), declared.metric
    assert metric is not None
    if metric not in families:
        is_counter = declared.kind is Kind.COUNTER
        family_type = CounterMetricFamily if is_counter else GaugeMetricFamily
        families[metric] = family_type(f"{PREFIX}{metric}", declared.help, labels=list(names))
    families[metric].add_metric(list(names.values()), value)


def _summary(name: str, values: Sequence[tuple[Declaration, float]]) -> Metric:
    by_kind = {declared.kind: (declared, value) for declared, value in values}
    declared, count = by_kind[Kind.TIMER_COUNT]
    _, seconds = by_kind[Kind.TIMER_SUM]
    return SummaryMetricFamily(f"{PREFIX}{name}", declared.help, int(count), seconds)


def _parts_family(parts: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}part_on", "1 if the part is on, 0 if it is off.", labels=["part"]
    )
    for part, state in parts.items():
        family.add_metric([part], state == ON)
    return family


class MetricsMiddleware:
    """Asks for the counters before `/metrics` is answered. Other requests pass through unchanged.

    vLLM answers from the process's registry, or from a temporary one that merges the counts of
    several processes (`PROMETHEUS_MULTIPROC_DIR`). Nothing can be added to the temporary one, so
    there this middleware writes the answer: vLLM's metrics, and the plugin's.
    """

    def __init__(
        self,
        app: ASGIApp,
        collector: SglCollector,
        registry: CollectorRegistry,
        ask: Callable[[FastAPI], Awaitable[EngineStats]],
        max_age_s: float,
    ) -> None:
        """`registry` is vLLM's, with `collector` in it. `ask(app)` returns the engines' report, and
        is called if the last one is older than `max_age_s`."""
        self._app = app
        self._collector = collector
        self._registry = registry
        self._ask = ask
        self._max_age_s = max_age_s
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path.rstrip("/") != "/metrics":
            return await self._app(scope, receive, send)
        arrived_at = time.monotonic()
        async with self._asking:  # scrapes that wait here share the report that is under way
            if arrived_at - self._asked_at > self._max_age_s:
                self._asked_at = time.monotonic()
                self._collector.stats = await self._report(scope["app"])

        async def with_age(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Cache-Control"] = f"max-age={ceil(self._max_age_s)}"
            await send(message)

        if self._registry is REGISTRY:
            await self._app(scope, receive, with_age)
        else:
            page = await run_in_threadpool(generate_latest, self._registry)
            answer = Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})
            await answer(scope, receive, with_age)

    async def _report(self, app: FastAPI) -> EngineStats | None:
        """None if the engines do not answer. Old numbers would be wrong: another API server may
        have reported higher ones since, so that counters would seem to be reset."""
        try:
            return await asyncio.wait_for(self._ask(app), REFRESH_TIMEOUT_S)
        except Exception as error:
            logger.warning("sgl_vllm: /metrics is without the plugin's: %r", error)
            return None
