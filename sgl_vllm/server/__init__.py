"""The server's routes under `/v1/sgl/` and its counters on `/metrics`.

Owns what HTTP shows of the plugin. Runs in vLLM's API process and asks the engine's process through
vLLM's own utility call. Under `/v1` so that `--api-key` guards the routes like vLLM's own.

    GET  /v1/sgl/stats         counters of every part, and which parts are on
    GET  /v1/sgl/tree          the shape of the radix tree: sizes and hits, no text
    POST /v1/sgl/flush_cache   empty the prefix cache; 409 while requests run
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.routing import APIRouter
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from sgl_vllm.server.metrics import MetricsMiddleware, SglCollector

router = APIRouter(prefix="/v1/sgl", tags=["sgl-vllm"])


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    return merge_stats(await ask_engines(request.app.state.engine_client, "stats"))


@router.get("/tree")
async def tree(request: Request) -> dict[str, Any]:
    """One entry per engine of a data-parallel server."""
    return {"engines": await ask_engines(request.app.state.engine_client, "tree")}


@router.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, bool]:
    if not await request.app.state.engine_client.reset_prefix_cache():
        raise HTTPException(409, "the cache is in use: try again when no request is running")
    return {"flushed": True}


async def ask_engines(client: EngineClient, what: str) -> list[dict[str, Any]]:
    """What every engine behind `client` answers (`SglSchedulerMixin.sgl_vllm_*`)."""
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        return list(await core.call_utility_all_async("sgl_vllm_call", what))
    return [await core.call_utility_async("sgl_vllm_call", what)]


def merge_stats(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counters of several engines added up; what is no number is the first engine's."""
    merged: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer.items():
            if key == "parts":  # a part that is off in one engine is not on
                known = merged.setdefault(key, dict(value))
                known.update({p: why for p, why in value.items() if known.get(p) in (None, "on")})
            elif isinstance(value, dict):
                merged[key] = merge_stats([merged.get(key, {}), value])
            elif isinstance(value, int) and key != "block_size":
                merged[key] = merged.get(key, 0) + value
            else:
                merged.setdefault(key, value)
    return merged


class SglEndpointPlugin:
    """What vLLM's `vllm.endpoint_plugins` group wants."""

    name = "sgl_vllm"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._collector = SglCollector()

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.add_middleware(MetricsMiddleware, refresh=self._refresh)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        self._client = engine_client
        self._collector.register()

    async def _refresh(self) -> None:
        if self._client is not None:
            self._collector.stats = merge_stats(await ask_engines(self._client, "stats"))


def endpoint_plugin() -> SglEndpointPlugin:
    """Entry point of `vllm.endpoint_plugins`."""
    return SglEndpointPlugin()
