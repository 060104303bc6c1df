"""A KV connector that keeps whole blocks in this process's memory, and misbehaves when told to.

It stands for the ones that need other hardware: it loads within a step or over several, keeps the
blocks of finished requests until they are "sent", and can fail a load half-way, leaving garbage in
the blocks. What it does is in `BEHAVIOUR`, which tests set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

CONFIG = {
    "kv_connector": "MemoryConnector",
    "kv_connector_module_path": "tests.engine.memory_connector",
    "kv_role": "kv_both",
}

WITNESS_CONFIG = {**CONFIG, "kv_connector": "WitnessConnector"}


@dataclass
class Behaviour:
    """Attributes:
    load_steps: steps that a load takes after the one that asks for it; 0 loads before the forward
        pass of that step.
    send_steps: steps for which a finished request's blocks have to be kept; 0 for none.
    failing_block: the next load fails from this block of it on.
    names_request: that failure is told by the request's id, not by its blocks.
    """

    load_steps: int = 0
    send_steps: int = 0
    failing_block: int | None = None
    names_request: bool = False


BEHAVIOUR = Behaviour()


def behave(**behaviour: Any) -> None:
    """Set `BEHAVIOUR`; what is not given is as usual."""
    vars(BEHAVIOUR).update(vars(Behaviour(**behaviour)))


STORE: dict[tuple[int, ...], list[torch.Tensor]] = {}
"""From the number of a KV-cache group, and all tokens up to a block's end, to the block, by layer
of the group."""


@dataclass
class Transfer:
    """Blocks of a request on their way from the store, or to it."""

    request_id: str
    block_ids: list[int]
    keys: list[tuple[int, ...]]
    steps_left: int


@dataclass
class Transfers(KVConnectorMetadata):
    """What begins with a step."""

    loads: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one for the scheduler and one for the worker.

    A hit of n tokens needs all blocks of full attention, and of another group, with windows or
    chunks, those that attention after the n-th token reads.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._begun = Transfers()
        self._loads: list[Transfer] = []
        self._sends: list[Transfer] = []
        self._invalid: set[int] = set()
        self._layers = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._manager: Any = None
        self._managers: Any = ()
        self._wanted: dict[str, tuple[int, int]] = {}
        """By request id: the tokens of its last hit that the engine has, and all of them."""

    # -- the scheduler's ----------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._manager = kv_cache_manager
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._block_size = math.lcm(*(manager.block_size for manager in self._managers))

    def _needed(self, token_ids, begin: int, end: int) -> list[list[tuple[int, tuple[int, ...]]]]:
        """For each group the number and key of every block that a hit of `end` tokens needs, whose
        first `begin` the engine has."""
        needed = []
        for number, manager in enumerate(self._managers):
            size = manager.block_size
            first = max(begin, manager.get_num_skipped_tokens(end)) // size
            blocks = range(first, end // size)
            needed.append([(i, (number, *token_ids[: (i + 1) * size])) for i in blocks])
        return needed

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        token_ids = request.prompt_token_ids
        size = self._block_size
        assert num_computed_tokens % size == 0
        for end in range((len(token_ids) - 1) // size * size, num_computed_tokens, -size):
            needed = self._needed(token_ids, num_computed_tokens, end)
            if all(key in STORE for blocks in needed for _, key in blocks):
                self._wanted[request.request_id] = num_computed_tokens, end
                return end - num_computed_tokens, BEHAVIOUR.load_steps > 0
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        begin, end = self._wanted[request.request_id]
        assert end - begin == num_external_tokens
        load = Transfer(request.request_id, [], [], BEHAVIOUR.load_steps)
        needed = self._needed(request.prompt_token_ids, begin, end)
        for ids, of_group in zip(blocks.get_block_ids(), needed, strict=True):
            load.block_ids += [ids[number] for number, _ in of_group]
            load.keys += [key for _, key in of_group]
        assert all(load.block_ids), "a block that a hit needs is null"
        self._begun.loads.append(load)

    def build_connector_meta(self, scheduler_output):
        begun, self._begun = self._begun, Transfers()
        return begun

    def request_finished_all_groups(self, request, block_ids):
        if request.status == RequestStatus.FINISHED_ABORTED or not BEHAVIOUR.send_steps:
            return False, None
        send = Transfer(request.request_id, [], [], BEHAVIOUR.send_steps)
        token_ids = request.all_token_ids[: request.num_computed_tokens]
        for number, (ids, manager) in enumerate(zip(block_ids, self._managers, strict=True)):
            for end in range(manager.block_size, len(token_ids) + 1, manager.block_size):
                block_id = ids[end // manager.block_size - 1]
                if block_id:  # not a null block
                    send.block_ids.append(block_id)
                    send.keys.append((number, *token_ids[:end]))
        self._begun.sends.append(send)
        return True, None

    # -- the worker's -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches):
        self._of_group = [[kv_caches[name] for name in names] for names in self._layers]

    def start_load_kv(self, forward_context, **kwargs):
        begun = self._get_connector_metadata()
        self._loads += begun.loads
        self._sends += begun.sends
        for load in [load for load in self._loads if load.steps_left == 0]:
            self._load(load)
            self._loads.remove(load)

    def _load(self, load: Transfer) -> bool:
        """Whether all went well."""
        failing, BEHAVIOUR.failing_block = BEHAVIOUR.failing_block, None
        for number, (block_id, key) in enumerate(zip(load.block_ids, load.keys, strict=True)):
            failed = failing is not None and number >= failing
            for cache, block in zip(self._of_group[key[0]], STORE[key], strict=True):
                cache[block_id] = torch.randn_like(block) if failed else block
        if failing is not None and not BEHAVIOUR.names_request:
            self._invalid = set(load.block_ids[failing:])
        return failing is None

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_transfer_results(self, finished_req_ids):
        results = KVConnectorTransferResults()
        for load in list(self._loads):
            load.steps_left -= 1
            if load.steps_left == 0:
                self._loads.remove(load)
                results.finished_recving.add(load.request_id)
                if not self._load(load) and BEHAVIOUR.names_request:
                    results.failed_recving.add(load.request_id)
        for send in list(self._sends):
            send.steps_left -= 1
            if send.steps_left == 0:
                self._sends.remove(send)
                results.finished_sending.add(send.request_id)
                for block_id, key in zip(send.block_ids, send.keys, strict=True):
                    STORE[key] = [cache[block_id].clone() for cache in self._of_group[key[0]]]
        return results

    def get_block_ids_with_load_errors(self):
        invalid, self._invalid = self._invalid, set()
        return invalid


class WitnessConnector(MemoryConnector):
    """Follows what it is told of each request, and compares that with the request in each step.

    Raises AssertionError if a request begins twice, if blocks are told twice or not at all, or if
    tokens are missing between two steps.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.tables: dict[str, list[int]] = {}
        self.num_several = 0
        """How often a running request got more than one token."""
        self._requests: dict[str, Any] = {}
        self._num_computed: dict[str, int] = {}

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        known = self._requests.setdefault(request.request_id, request)
        assert known is request
        if request.status == RequestStatus.PREEMPTED:  # by a reset in this step
            self.tables.pop(request.request_id, None)
        assert request.request_id not in self.tables, "a running request is not allocated again"
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        finished = scheduler_output.finished_req_ids
        assert finished.isdisjoint(scheduler_output.num_scheduled_tokens)
        for name in finished | (scheduler_output.preempted_req_ids or set()):
            for of_request in (self.tables, self._num_computed):
                of_request.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            assert new.req_id not in self.tables, "a request is new once"
            self.tables[new.req_id] = [*new.block_ids[0]]
        cached = scheduler_output.scheduled_cached_reqs
        for name, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                assert name not in self.tables, "only a preempted request is resumed"
                self.tables[name] = [*block_ids[0]]
                continue
            self.tables[name] += block_ids[0] if block_ids is not None else []
            assert num_computed <= self._num_computed[name], "no token is left out"
            self.num_several += scheduler_output.num_scheduled_tokens[name] > 1
        for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            assert self._manager is not None
            assert self.tables[name] == self._manager.get_block_ids(name)[0]
            self._num_computed[name] = request.num_computed_tokens + num_tokens
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request, block_ids):
        keeps_blocks, _ = super().request_finished_all_groups(request, block_ids)
        return keeps_blocks, {"witness": len(request.output_token_ids)}
