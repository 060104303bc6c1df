"""Ray's vLLM replica whose engine tells what it has cached.

Named in Ray's own configuration, `server_cls: sgl_vllm.routing.ray.server.KVEventServer`. Owns
which ports an engine publishes on, and the telling of them to routers through Ray's routing stats.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.llm import LLMServer

from sgl_vllm.routing.kv_events import KVEventSource
from sgl_vllm.routing.ray.router import EVENTS_KEY
from sgl_vllm.server_process import free_port


class KVEventServer(LLMServer):
    """One engine, with KV events on two free ports of its machine."""

    async def start(self) -> None:
        """Ray's constructor calls it."""
        address = ray.util.get_node_ip_address()
        ports = (free_port(), free_port())
        self._kv_events = KVEventSource(*(f"tcp://{address}:{port}" for port in ports))
        endpoint, replay_endpoint = (f"tcp://*:{port}" for port in ports)
        config = await self.llm_config()
        config.update_engine_kwargs(
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint,
                "replay_endpoint": replay_endpoint,
            }
        )
        await super().start()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray's controller asks for it every some seconds, and tells all routers."""
        return {**await super().record_routing_stats(), EVENTS_KEY: self._kv_events.as_stats()}
