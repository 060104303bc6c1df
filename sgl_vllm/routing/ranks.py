"""vLLM's own data parallelism: which rank a request goes to, chosen in the API server's process.

Owns what a `PrefixRouter` needs to know of vLLM's client of several engines: its requests, its
outputs, its load figures, and where its engines publish KV events. Imports vLLM only to follow
those; `plugin.py` puts it in.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np

from sgl_vllm.protocol.hints import hints_in
from sgl_vllm.routing.kv_events import Followers, KVEventSource
from sgl_vllm.routing.prefix_hashes import Namespace
from sgl_vllm.routing.router import Load, PrefixRouter, Route, Worker

logger = logging.getLogger("vllm.sgl_vllm.ranks")

BEGINNING_TOKENS = 16
"""Tokens per numbered step of a prompt, where no KV events name the engines' blocks."""


class RankRouter:
    """Chooses ranks for one client, a `vllm.v1.engine.core_client.DPLBAsyncMPClient`.

    With KV events all API servers know what each rank has cached. Without, each knows what it has
    sent itself. Costs what `PrefixRouter.choose` does, and a look-up per output while prompts wait.
    An error switches it off, with one warning: vLLM then chooses by load, as it does without it.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        config = client.vllm_config
        self._sources = _event_sources(config)
        num_ranks = len(client.core_engines)
        cache = config.cache_config
        num_tokens = (cache.num_gpu_blocks or 0) * cache.block_size // num_ranks
        self._router = PrefixRouter(
            block_size=cache.block_size if self._sources else BEGINNING_TOKENS,
            **({"capacity_tokens": num_tokens} if num_tokens else {}),
        )
        self._routes: dict[str, Route] = {}
        self._waiting: dict[str, Route] = {}
        self._followers = Followers(self._router.apply_events, self._not_followed)
        logger.info(
            "requests go to the one of %d engines where they have the least to compute; what each "
            "has cached is known %s",
            num_ranks,
            "by its KV events" if self._sources else "by what this API server has sent it",
        )
        self._told: Any = None
        self._others: list[int] = []
        self._most_own: Counter[int] = Counter()
        self.failed = False

    def choose(self, request: Any) -> int | None:
        """The rank for a new `EngineCoreRequest`; None if vLLM is to choose."""
        if self.failed or not _is_open(request, self._client):
            return None
        try:
            if len(self._router.workers) != len(self._client.core_engines):
                self._set_ranks()
            params = request.sampling_params
            route = self._router.choose(
                np.asarray(request.prompt_token_ids, dtype=np.int32),
                self._loads(),
                max_output_tokens=getattr(params, "max_tokens", None),
                group=hints_in(getattr(params, "extra_args", None), request.request_id).together,
                namespace=_namespace(request),
            )
        except Exception:
            self._fail()
            return None
        self._routes[request.request_id] = self._waiting[request.request_id] = route
        rank = route.worker
        assert isinstance(rank, int)
        self._most_own[rank] = max(self._most_own[rank], self._router.load(rank).num_running)
        return rank

    def hear(self, outputs: Any) -> None:
        """The outputs of one engine's step: whose prompt is computed, and who has ended."""
        for output in outputs.outputs if self._waiting else ():
            if (route := self._waiting.pop(output.request_id, None)) is not None:
                self._router.first_token(route)
        for request_id in (outputs.finished_requests or ()) if self._routes else ():
            self._waiting.pop(request_id, None)
            if (route := self._routes.pop(request_id, None)) is not None:
                self._router.finished(route)

    def _set_ranks(self) -> None:
        """As many workers as there are engines, whose number may change while serving."""
        ranks = range(len(self._client.core_engines))
        self._followers.keep(ranks)
        for rank in self._sources.keys() & ranks:
            self._followers.follow(rank, self._sources[rank])
        self._router.set_workers({rank: rank in self._followers for rank in ranks})

    def _not_followed(self, rank: Worker, error: BaseException | None) -> None:
        logger.warning(
            "KV events of rank %d cannot be followed (%r): what it has cached is guessed from what "
            "this API server sends it",
            rank,
            error,
        )
        self._set_ranks()

    def _loads(self) -> dict[Worker, Load] | None:
        """With what the other API servers have sent, which vLLM's coordinator tells every 100 ms.

        Its figures have this one's requests in them, some that have ended since. So the most that
        this one had there since the figures before is taken off: others count too little rather
        than that requests keep away from where nobody is.
        """
        if self._client.client_count == 1:
            return None
        own = [self._router.load(rank) for rank in range(len(self._router.workers))]
        told = self._client.lb_engines
        if told is not self._told:
            self._told = told
            self._others = [
                max(0, int(waiting + running) - self._most_own[rank])
                for rank, (waiting, running, _) in enumerate(told)
            ]
            self._most_own = Counter({rank: load.num_running for rank, load in enumerate(own)})
        return {
            rank: Load(load.num_queued_tokens, load.num_running + others)
            for rank, (load, others) in enumerate(zip(own, self._others, strict=False))
        }

    def _fail(self) -> None:
        logger.exception(
            "the prefix-aware choice of a rank failed and is switched off; vLLM chooses by load. "
            "Please report this with the lines below"
        )
        self.failed = True
        self._routes.clear()
        self._waiting.clear()
        self._followers.keep(())


def _is_open(request: Any, client: Any) -> bool:
    """Whether nobody has chosen yet, and there are tokens to go by."""
    return (
        bool(request.prompt_token_ids)
        and request.data_parallel_rank is None
        and request.pooling_params is None
        and request.request_id not in client.reqs_in_flight
    )


def _namespace(request: Any) -> Namespace:
    """Images stand in the prompt as so many equal tokens: who they are goes with the tenant."""
    lora = request.lora_request
    names = [feature.identifier for feature in request.mm_features or ()]
    salt = "\0".join([request.cache_salt or "", *names]) if names else request.cache_salt
    return Namespace(lora.lora_name if lora is not None else None, salt)


def _event_sources(config: Any) -> dict[int, KVEventSource]:
    """By rank, where its engine publishes; empty unless all ranks are here and publish for us."""
    events = config.kv_events_config
    parallel = config.parallel_config
    is_local = parallel.data_parallel_size_local == parallel.data_parallel_size
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}
    is_bound = "*" in events.endpoint or events.endpoint.startswith("ipc://")
    if not (is_bound and events.replay_endpoint and is_local):
        logger.warning(
            "KV events are not used to choose ranks: that takes an endpoint that the engines bind "
            "(tcp://*:PORT or ipc://PATH), a replay_endpoint, and all ranks on this machine"
        )
        return {}
    from vllm.distributed.kv_events import ZmqEventPublisher

    def endpoint(pattern: str, rank: int) -> str:
        offset = ZmqEventPublisher.offset_endpoint_port(pattern, rank)
        return str(offset).replace("*", "127.0.0.1")

    return {
        rank: KVEventSource(endpoint(events.endpoint, rank), endpoint(events.replay_endpoint, rank))
        for rank in range(parallel.data_parallel_size)
    }
