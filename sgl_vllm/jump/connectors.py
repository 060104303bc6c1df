"""Jumps beside a KV connector: which connectors, and what they are told of a jumped request.

Owns the list of connectors and the step as a connector sees it. Does not own the jump (`jump.py`)
nor how the model runner gets a jumped request (`resumption.py`).

vLLM resumes a jumped request as a new one. A connector that took it for new would start
over: it would append all blocks to those that it knows, or store the prompt a second time. So the
connector sees what it sees of a request that never stopped running and got several tokens in one
step, as in a chunk of a prefill:

    scheduled        new request, computed [0, t), blocks b0 .. b3
    as told          running request, computed [0, t), new blocks b3      (it knows b0 .. b2)

A jumped request that had to release its blocks is reported as preempted, and as new when it runs
again, as vLLM reports preempted requests with its V2 runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

DECLARES = "supports_jump_forward"
"""A class attribute by which a connector that is not vLLM's says that it supports jumps."""

_TRANSFERS = "it sends or receives what a request names, and looks at no step"

FIT: dict[str, str] = {
    "OffloadingConnector": "tested: it stores the full blocks of known tokens after each step",
    "ExampleConnector": "tested: it stores prompts, and looks at new requests only",
    "NixlConnector": _TRANSFERS,
    "NixlPullConnector": _TRANSFERS,
    "NixlPushConnector": _TRANSFERS,
    "MooncakeConnector": _TRANSFERS,
    "MooncakeStoreConnector": "it stores the tokens of each step after those that it knows",
}
"""vLLM's connectors beside which requests jump, each with the reason. What is not tested was read
(vLLM 0.32). `MultiConnector` supports jumps if all connectors in it do."""

_MODULE = "vllm.distributed.kv_transfer.kv_connector."


def unfit(connectors: Iterable[type[KVConnectorBase_V1]]) -> str | None:
    """The name of a connector beside which requests must not jump; None if they may."""
    for kind in connectors:
        is_fit = kind.__name__ in FIT and kind.__module__.startswith(_MODULE)
        if not is_fit and getattr(kind, DECLARES, False) is not True:
            return kind.__name__
    return None


class UnseenJumps:
    """Hides from a connector that requests have jumped.

    Args:
        connector: the scheduler's. Three of its methods are replaced in place, so every reference
            to it stays valid. To be made once for a connector.
    """

    def __init__(self, scheduler: Scheduler, connector: KVConnectorBase_V1) -> None:
        self._scheduler = scheduler
        self._opened: WeakSet[Request] = WeakSet()
        """Requests with forced tokens after their prompt that have never run."""
        self._num_told: WeakKeyDictionary[Request, tuple[int, ...]] = WeakKeyDictionary()
        """Of the requests that have jumped and not run since, and have their blocks: how many of
        each KV cache group the connector knows."""
        wrap(connector, "get_num_new_matched_tokens")(self._ask)
        wrap(connector, "update_state_after_alloc")(self._allocated)
        wrap(connector, "build_connector_meta")(self._build)

    def opened(self, request: Request) -> None:
        """Forced tokens follow the prompt of a request that has never run."""
        self._opened.add(request)

    def jumped(self, request: Request) -> None:
        """A running request waits now for the pass that computes its forced tokens."""
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        self._num_told[request] = tuple(map(len, blocks))

    def released(self, request: Request) -> None:
        """A jumped request has released its blocks."""
        self._num_told.pop(request, None)

    def finished(self, request: Request) -> None:
        """A request ends by forced tokens that no pass will compute. Blocks that are not
        computed lose their hashes, by which a connector finds what to store of an ended request."""
        scheduler = self._scheduler
        num_known = min(request.num_computed_tokens, request.num_tokens)
        del request.block_hashes[num_known // scheduler.hash_block_size :]

    # -- the connector's methods ------------------------------------------------------------------

    def _ask(
        self,
        original: Callable[[Request, int], tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """At a request's first admission vLLM counts all that is loaded as prompt. So a connector
        sees no more than the prompt of an opened request."""
        num_seen = request.num_prompt_tokens
        if request not in self._opened or request.num_tokens <= num_seen:
            return original(request, num_computed_tokens)
        all_token_ids, block_hashes = request._all_token_ids, request.block_hashes
        request._all_token_ids = all_token_ids[:num_seen]
        request.block_hashes = block_hashes[: num_seen // self._scheduler.hash_block_size]
        try:
            return original(request, num_computed_tokens)
        finally:
            request._all_token_ids, request.block_hashes = all_token_ids, block_hashes

    def _allocated(
        self,
        original: Callable[[Request, KVCacheBlocks, int], None],
        request: Request,
        blocks: KVCacheBlocks,
        num_external_tokens: int,
    ) -> None:
        """A request that kept its blocks was allocated long ago, as far as the connector knows."""
        if request not in self._num_told:
            original(request, blocks, num_external_tokens)

    def _build(
        self,
        original: Callable[[SchedulerOutput], KVConnectorMetadata],
        scheduler_output: SchedulerOutput,
    ) -> KVConnectorMetadata:
        return original(self.as_told(scheduler_output))

    def as_told(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step as the connector sees it: the same object if no jumped request resumes in it.

        To be called before the request data of jumped requests is rewritten for the V1 runner.
        """
        resumed = list(self._resumed(output)) if self._num_told or self._opened else []
        if not resumed:
            return output
        names = {data.req_id for data, _ in resumed}
        return replace(
            output,
            scheduled_new_reqs=[
                data for data in output.scheduled_new_reqs if data.req_id not in names
            ],
            scheduled_cached_reqs=self._with(output.scheduled_cached_reqs, resumed),
        )

    def _resumed(self, output: SchedulerOutput) -> Iterator[tuple[NewRequestData, tuple[int, ...]]]:
        """The jumped requests that run on in this step, with how many blocks were told."""
        for data in output.scheduled_new_reqs:
            request = self._scheduler.requests[data.req_id]
            self._opened.discard(request)
            if (num_told := self._num_told.pop(request, None)) is not None:
                yield data, num_told

    def _with(
        self,
        cached: CachedRequestData,
        resumed: list[tuple[NewRequestData, tuple[int, ...]]],
    ) -> CachedRequestData:
        """`cached` and, as vLLM would have them there, the requests that have jumped."""
        told = replace(
            cached,
            req_ids=[*cached.req_ids],
            all_token_ids={**cached.all_token_ids},
            new_block_ids=[*cached.new_block_ids],
            num_computed_tokens=[*cached.num_computed_tokens],
            num_output_tokens=[*cached.num_output_tokens],
        )
        for data, num_told in resumed:
            request = self._scheduler.requests[data.req_id]
            new_blocks = tuple(
                ids[known:] for ids, known in zip(data.block_ids, num_told, strict=True)
            )
            if not self._scheduler.use_v2_model_runner:
                told.all_token_ids[data.req_id] = [*request._all_token_ids]
            told.req_ids.append(data.req_id)
            told.new_block_ids.append(new_blocks if any(new_blocks) else None)
            told.num_computed_tokens.append(data.num_computed_tokens)
            told.num_output_tokens.append(request.num_output_tokens)
        return told
