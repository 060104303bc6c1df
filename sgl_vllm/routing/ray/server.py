"""Ray's vLLM replica with KV events, so that routers know what it has cached.

Set as `server_cls: sgl_vllm.routing.ray.server.KVEventServer` in Ray's configuration. Owns the
ports on which an engine publishes, and how routers learn them: from Ray's routing stats.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.llm import LLMServer

from sgl_vllm.routing.kv_events import KvEventSource
from sgl_vllm.routing.ray.router import EVENTS_KEY
from sgl_vllm.server_process import free_port


class KVEventServer(LLMServer):
    """One engine, which publishes KV events on two free ports of its machine."""

    async def start(self) -> None:
        """Called by Ray's constructor."""
        address = ray.util.get_node_ip_address()
        ports = (free_port(), free_port())
        self._kv_events = KvEventSource(*(f"tcp://{address}:{port}" for port in ports))
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
        """Collected by Ray's controller every few seconds and sent to all routers."""
        return {**await super().record_routing_stats(), EVENTS_KEY: self._kv_events.as_stats()}
