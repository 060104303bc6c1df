"""Ray's vLLM replica with KV events, so that routers know what it has cached.

Set as `server_cls: sgl_vllm.routing.ray.server.KVEventServer` in Ray's configuration. Owns the
addresses at which events are published, and how routers learn them: from Ray's routing stats.
Events hold the tokens of prompts, so they are published at the node's own address in the cluster,
not on all interfaces.
"""

from __future__ import annotations

import tempfile
from typing import Any  # Any: Ray's statistics

import ray
from ray.serve.llm import LLMServer

from sgl_vllm.routing.kv_events import KvEventSource, forward_events
from sgl_vllm.routing.ray.router import EVENTS_KEY
from sgl_vllm.server_process import free_port


class KVEventServer(LLMServer):
    """One engine, which publishes KV events on two free ports of its node's address."""

    async def start(self) -> None:
        """Called by Ray's constructor."""
        address = ray.util.get_node_ip_address()
        source = KvEventSource(*(f"tcp://{address}:{free_port()}" for _ in range(2)))
        self._kv_events = source
        # vLLM binds a TCP endpoint for events on all interfaces or not at all.
        self._folder = tempfile.TemporaryDirectory(prefix="sgl-kv-")
        local = f"ipc://{self._folder.name}/events"
        forward_events(local, source.endpoint)
        config = await self.llm_config()
        config.update_engine_kwargs(
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": local,
                "replay_endpoint": source.replay_endpoint,
            }
        )
        await super().start()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Collected by Ray's controller every few seconds and sent to all routers."""
        return {**await super().record_routing_stats(), EVENTS_KEY: self._kv_events.as_stats()}
