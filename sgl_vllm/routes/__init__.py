"""The server's routes, and its counters on `/metrics`.

Owns what HTTP shows of the plugin. Runs in vLLM's API process and calls the engines' processes
through vLLM's own utility call. Routes with data are under `/v1`, so that `--api-key` guards them
like vLLM's own.

    GET  /v1/sgl/stats         counters of every part, and which parts are on
    GET  /v1/sgl/tree          the radix tree: sizes, hits, ages; text only by an option
    GET  /sgl/tree             the same as a page in the browser; holds no data itself
    GET  /v1/sgl/why           which prompt tokens of a request were not cached, and why
    POST /v1/sgl/match         how many tokens of some prefixes are cached
    POST /v1/sgl/pin           compute a prefix and keep it in the cache
    POST /v1/sgl/unpin         let it be evicted again
    GET  /v1/sgl/pins          what is pinned
    POST /v1/sgl/flush_cache   empty the prefix cache; 409 while requests run
    POST /v1/sgl/batch         many requests at once, each answered as soon as it is done
    POST /v1/sgl/batch/abort   stop single ones of them
    POST /v1/sgl/score         scores of some continuations of a prompt
    POST /generative_scoring   vLLM's own; labels may have several tokens
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any  # Any: JSON

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import State
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.prometheus import get_prometheus_registry

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.routes import match, pins, tree
from sgl_vllm.routes.bodies import JSON_ONLY, router
from sgl_vllm.routes.body_limit import BodyLimitMiddleware
from sgl_vllm.routes.engines import answered, end_requests_at_shutdown, engine_stats
from sgl_vllm.routes.forced_usage import TallyMiddleware, show_in_usage
from sgl_vllm.routes.incoming import IncomingRequests, read_bodies
from sgl_vllm.routes.metrics import MAX_AGE_S, MetricsMiddleware, SglCollector
from sgl_vllm.routes.standard_hints import read_standard_hints
from sgl_vllm.routes.tenants import TenantMiddleware, TenantSource
from sgl_vllm.routes.tool_calls import ToolCallMiddleware
from sgl_vllm.scheduler.stats import EngineStats
from sgl_vllm.vllm_api.probe import missing_hooks

logger = init_logger("vllm.sgl_vllm.server")


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """With `cached_block_size`: in which unit this client's `usage` counts cached tokens."""
    body = (await _stats(request.app)).to_json()
    incoming: IncomingRequests | None = getattr(request.app.state, "sgl_vllm_incoming", None)
    if incoming is not None:
        body["cached_block_size"] = incoming.cached_block_size()
    return body


async def _stats(app: FastAPI) -> EngineStats:
    """The merged report of all engines behind `app`."""
    return await engine_stats(app.state.engine_client)


@router.post("/flush_cache", dependencies=JSON_ONLY)
async def flush_cache(request: Request) -> dict[str, bool]:
    client: AsyncLLM = request.app.state.engine_client
    if not await answered(client, client.reset_prefix_cache()):
        raise HTTPException(409, "the cache is in use: try again when no request is running")
    return {"flushed": True}


class SglEndpointPlugin:
    """An entry of vLLM's `vllm.endpoint_plugins` group."""

    name = "sgl_vllm"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        try:
            from sgl_vllm.routes import batch, score  # noqa: F401
        except ImportError as error:  # these use more of vLLM's internals than other routes do
            logger.warning(
                "no /v1/sgl/batch and /v1/sgl/score on this vLLM (%s): programs do without", error
            )
        app.state.sgl_vllm_matching = asyncio.Semaphore(match.MAX_TOKENIZING)
        app.state.sgl_vllm_pinning = asyncio.Semaphore(pins.MAX_COMPUTING)
        app.state.sgl_vllm_running = {}  # requests of batches, by id
        app.include_router(router)
        app.get("/sgl/tree", include_in_schema=False)(tree.tree_page)
        app.add_middleware(BodyLimitMiddleware)
        app.add_middleware(TenantMiddleware)
        app.add_middleware(ToolCallMiddleware)
        app.add_middleware(TallyMiddleware)
        registry, collector = get_prometheus_registry(), SglCollector()
        registry.register(collector)
        app.add_middleware(
            MetricsMiddleware,
            collector=collector,
            registry=registry,
            ask=_stats,
            max_age_s=0 if envs.VLLM_SERVER_DEV_MODE else MAX_AGE_S,
        )

    async def init_state(
        self, engine_client: AsyncLLM | None, state: State, args: Namespace
    ) -> None:
        if engine_client is None:
            return
        config = engine_client.vllm_config
        options = Options.from_mapping((config.additional_config or {}).get(CONFIG_KEY, {}))
        state.sgl_vllm_tenants = TenantSource(options.tenant_from)
        state.sgl_vllm_max_body_bytes = int(options.max_body_mb * (1 << 20))
        processor: OutputProcessor | None = getattr(engine_client, "output_processor", None)
        if processor is None:
            return
        state.sgl_vllm_incoming = incoming = IncomingRequests(
            state.sgl_vllm_tenants,
            lambda: config.cache_config.block_size or 1,
            is_exact=options.tells_exactly,
        )
        incoming.attach(engine_client)
        moves_segments = options.approximate_reuse and not missing_hooks("approximate_reuse")
        read_bodies(state.online_renderer, moves_segments=moves_segments)
        serving = getattr(state, "serving_generative_scoring", None)
        if serving is not None and not missing_hooks("labels"):
            from sgl_vllm.routes.labels import accept_labels

            accept_labels(serving)
        if not missing_hooks("tools_and_format"):
            from sgl_vllm.routes.tools_and_format import combine_tools_and_formats

            combine_tools_and_formats(options)
        read_standard_hints(state)
        show_in_usage()
        state.sgl_vllm_ending = end_requests_at_shutdown(engine_client)


def endpoint_plugin() -> SglEndpointPlugin:
    """Entry point of `vllm.endpoint_plugins`."""
    return SglEndpointPlugin()
