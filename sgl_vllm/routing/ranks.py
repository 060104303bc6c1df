"""vLLM's own data parallelism: which rank a request goes to, chosen in the API server's process.

Owns what a `PrefixRouter` needs from vLLM's client of several engines: its requests, their
outputs, its load figures, and where its engines publish KV events. `plugin.py` installs it. Imports
vLLM only to follow KV events.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sgl_vllm.degrade import Guard
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.hints import read_hints
from sgl_vllm.routing.costs import Load, Route, Worker
from sgl_vllm.routing.kv_events import KvEventFollowers, KvEventSource
from sgl_vllm.routing.router import DEFAULT_CAPACITY_TOKENS, PrefixRouter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

logger = logging.getLogger("vllm.sgl_vllm.ranks")

APPROX_BLOCK_TOKENS = 16
"""The block size of the router where no KV events require that of the engines."""


class RankRouter:
    """Chooses the rank for each request of one client.

    With KV events every API server knows what each rank has cached. Without them, each knows only
    which requests it has sent itself. Costs what `PrefixRouter.choose` costs, and one look-up per
    output while prompts are being computed. After an error vLLM chooses by load, as without the
    plugin.
    """

    def __init__(self, client: DPLBAsyncMPClient) -> None:
        self._client = client
        config = client.vllm_config
        self._sources = _event_sources(config)
        num_ranks = len(client.core_engines)
        cache = config.cache_config
        num_tokens = (cache.num_gpu_blocks or 0) * cache.block_size // num_ranks
        self._router = PrefixRouter(
            block_size=cache.block_size if self._sources else APPROX_BLOCK_TOKENS,
            capacity_tokens=num_tokens or DEFAULT_CAPACITY_TOKENS,
        )
        self._routes: dict[str, Route] = {}
        self._in_prefill: dict[str, Route] = {}
        self._followers = KvEventFollowers(self._router.apply_events, self._not_followed)
        self._guard = Guard(
            "the prefix-aware choice of a data-parallel rank", "vLLM chooses it by load", logger
        )
        self._figures: Sequence[Sequence[float]] | None = None  # last seen, of the coordinator
        self._others: list[int] = []
        self._most_own: Counter[int] = Counter()
        logger.info(
            "sgl-vllm: each request goes to the one of %d engines where it costs the least; what "
            "an engine has cached is known from %s",
            num_ranks,
            "its KV events" if self._sources else "the requests that this API server sent to it",
        )

    def choose(self, request: EngineCoreRequest) -> int | None:
        """The rank for a new request. None if vLLM has to choose."""
        if not _is_ours_to_place(request, self._client):
            return None
        return self._guard.run(self._choose, request)

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """The outputs of one engine's step: which prompts are computed, which requests ended."""
        for output in outputs.outputs if self._in_prefill else ():
            if (route := self._in_prefill.pop(output.request_id, None)) is not None:
                self._router.first_token(route)
        for request_id in (outputs.finished_requests or ()) if self._routes else ():
            self._in_prefill.pop(request_id, None)
            if (route := self._routes.pop(request_id, None)) is not None:
                self._router.finished(route)

    def _choose(self, request: EngineCoreRequest) -> int:
        if len(self._router.workers) != len(self._client.core_engines):
            self._set_ranks()
        params = request.sampling_params
        hints = read_hints(getattr(params, "extra_args", None), request.request_id)
        route = self._router.choose(
            np.asarray(request.prompt_token_ids, dtype=np.int32),
            self._loads(),
            max_output_tokens=getattr(params, "max_tokens", None),
            group=hints.routing_group,
            namespace=_namespace(request),
        )
        self._routes[request.request_id] = self._in_prefill[request.request_id] = route
        rank = route.worker
        assert isinstance(rank, int)
        self._most_own[rank] = max(self._most_own[rank], self._router.load(rank).num_running)
        return rank

    def _set_ranks(self) -> None:
        """As many workers as there are engines. Their number may change while serving."""
        ranks = range(len(self._client.core_engines))
        self._followers.keep(ranks)
        for rank in self._sources.keys() & ranks:
            self._followers.follow(rank, self._sources[rank])
        self._router.set_workers({rank: rank in self._followers for rank in ranks})

    def _not_followed(self, rank: Worker, error: BaseException | None) -> None:
        logger.warning(
            "sgl-vllm: the KV events of rank %s cannot be followed (%r). What it has cached is "
            "guessed from the requests that this API server sends to it.",
            rank,
            error,
        )
        self._set_ranks()

    def _loads(self) -> Mapping[Worker, Load] | None:
        """Loads that include the requests of other API servers. None if there is only one.

        vLLM's coordinator publishes each rank's requests every 100 ms. Its figures include this
        API server's requests, some of which have ended since. So the most that it had there since
        the figures before is subtracted: counting too few requests of others is better than
        avoiding an idle rank.
        """
        if self._client.client_count == 1:
            return None
        own = [self._router.load(rank) for rank in range(len(self._router.workers))]
        figures = self._client.lb_engines
        if figures is not self._figures:
            self._figures = figures
            self._others = [
                max(0, int(waiting + running) - self._most_own[rank])
                for rank, (waiting, running, *_) in enumerate(figures)
            ]
            self._most_own = Counter({rank: load.num_running for rank, load in enumerate(own)})
        return {
            rank: Load(load.num_queued_tokens, load.num_running + others)
            for rank, (load, others) in enumerate(zip(own, self._others, strict=False))
        }


def _is_ours_to_place(request: EngineCoreRequest, client: DPLBAsyncMPClient) -> bool:
    """Whether no rank has been chosen yet and there are tokens to compare."""
    return (
        bool(request.prompt_token_ids)
        and request.data_parallel_rank is None
        and request.pooling_params is None
        and request.request_id not in client.reqs_in_flight
    )


def _namespace(request: EngineCoreRequest) -> CacheNamespace:
    """With the identifiers of images, because their placeholder tokens are all equal."""
    lora = request.lora_request
    images = "\0".join(image.identifier for image in request.mm_features or ())
    return CacheNamespace(
        lora.lora_name if lora is not None else None, request.cache_salt, images.encode() or None
    )


def _event_sources(config: VllmConfig) -> dict[int, KvEventSource]:
    """Where each rank's engine publishes. Empty unless all ranks are local and can be followed."""
    events = config.kv_events_config
    parallel = config.parallel_config
    is_local = parallel.data_parallel_size_local == parallel.data_parallel_size
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}
    is_bound = "*" in events.endpoint or events.endpoint.startswith("ipc://")
    if not (is_bound and events.replay_endpoint and is_local):
        logger.warning(
            "sgl-vllm: KV events are not used to choose ranks. That requires an endpoint that the "
            "engines bind (tcp://*:PORT or ipc://PATH), a replay_endpoint, and all ranks on this "
            "machine."
        )
        return {}
    from vllm.distributed.kv_events import ZmqEventPublisher

    def endpoint(pattern: str, rank: int) -> str:
        offset = ZmqEventPublisher.offset_endpoint_port(pattern, rank)
        return str(offset).replace("*", "127.0.0.1")

    return {
        rank: KvEventSource(endpoint(events.endpoint, rank), endpoint(events.replay_endpoint, rank))
        for rank in range(parallel.data_parallel_size)
    }
