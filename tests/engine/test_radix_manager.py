"""The manager on its own: what loads, pins and neighbours in a step may not do to the cache."""

from __future__ import annotations

import itertools
import weakref

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.request import RequestStatus

from benchmarks.schedulers import runner_output
from sgl_vllm.programs.programs import Programs
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.hints import Hints
from sgl_vllm.radix.lookup import max_copies
from sgl_vllm.radix.tokens import pack
from tests.engine.cache import SIZE, Cache
from tests.engine.machine import Machine

PREFIX = list(range(4 * SIZE))


def test_the_copies_of_a_step_are_bounded():
    cache, other = Cache(max_copies=2), itertools.count()
    cache.serve([*PREFIX, 1, 2, 3])
    for _ in range(2):
        cache.manager.new_step_starts()
        prompts = ([*PREFIX, 1, 2, 1000 + next(other)] for _ in range(4))
        found = [cache.allocate(cache.request(prompt)) for prompt in prompts]
        assert found == [len(PREFIX) + 2, len(PREFIX) + 2, len(PREFIX), len(PREFIX)]


def test_the_bytes_of_layers_of_several_shapes_are_counted_once():
    """Such as an index beside MLA. Blocks of 8 MiB, in one allocation."""
    tensors = [
        KVCacheTensor(size=100 * (8 << 20), layers=["latent"], layer_stride=0, block_stride=0),
        KVCacheTensor(size=100 * (8 << 20), layers=["index"], layer_stride=0, block_stride=0),
    ]
    assert max_copies(KVCacheConfig(100, tensors, kv_cache_groups=[])) == 8
    assert max_copies(KVCacheConfig(100, [], kv_cache_groups=[])) is None


@pytest.mark.parametrize("connector", [False, True])
def test_what_a_running_request_generates_is_found_when_it_ends(connector):
    """A connector looks its blocks up by their hashes, so there they are found as they fill."""
    cache = Cache(has_connector=connector, hashes=connector)
    request, generated = cache.request(PREFIX[:SIZE]), list(range(1000, 1000 + 2 * SIZE + 3))
    cache.allocate(request)
    cache.manager.before_schedule([request])
    for token in generated:
        request.append_output_token_ids(token)
        cache.manager.new_step_starts()
        assert cache.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        (held,) = cache.manager.get_block_ids(request.request_id)
        assert len(held) == -(-request.num_computed_tokens // SIZE)
    again = [*PREFIX[:SIZE], *generated, 1]
    assert cache.hit(again) == (3 * SIZE if connector else SIZE)
    request.status = RequestStatus.FINISHED_STOPPED
    cache.manager.free(request)
    assert cache.hit(again) == 3 * SIZE + 3


def test_what_only_an_earlier_lookup_found_leaves_with_the_request():
    cache = Cache(has_connector=True, hashes=True)
    cache.serve(PREFIX)
    request = cache.request([*PREFIX, 7])
    assert cache.look_up(request)[1] == len(PREFIX)  # and it is not admitted
    assert cache.manager.reset_prefix_cache()
    assert cache.allocate(request) == 0
    request.num_computed_tokens = 0  # preempted in the same step, before anything is computed
    request.status = RequestStatus.PREEMPTED
    cache.manager.free(request)
    assert cache.hit([*PREFIX, 1]) == 0


@pytest.mark.parametrize("external", [16, 20, 6])
def test_of_what_is_found_and_then_loaded_only_the_first_is_sure(external):
    """Some connectors load parts of blocks."""
    cache = Cache(has_connector=True, hashes=True)
    cache.serve(PREFIX[:32])
    loading = cache.request([*PREFIX, 7])
    assert cache.allocate(loading, external=external, delay=True) == 32
    loading.status = RequestStatus.FINISHED_ABORTED
    cache.manager.free(loading)
    assert cache.hit([*PREFIX, 1]) == 32


def test_what_is_computed_after_a_load_is_found_to_the_token():
    cache = Cache(has_connector=True, hashes=True)
    request = cache.request([*PREFIX[:55], 7])
    cache.allocate(request, external=48, delay=True)
    cache.manager.cache_blocks(request, 48)  # Scheduler._update_waiting_for_remote_kv
    cache.manager.allocate_slots(request, 7)
    request.num_computed_tokens = 55
    cache.manager.free(request)
    assert cache.hit([*PREFIX, 1]) == 55


def test_a_failed_load_does_not_cost_others_their_prefix():
    cache = Cache(has_connector=True, hashes=True)
    cache.serve([*PREFIX, *[5] * 32])
    loading = cache.request([*PREFIX, *[9] * 64])
    cache.allocate(loading, external=48, delay=True)
    loading.num_computed_tokens = 0  # Scheduler._handle_failed_recving, policy recompute
    cache.manager.free(loading)
    assert cache.hit([*PREFIX, *[5] * 32, 1]) == len(PREFIX) + 32


@pytest.mark.parametrize("connector", [False, True])
def test_a_sharer_in_the_same_step_does_not_cost_a_partial_hit(connector):
    cache = Cache(has_connector=connector, hashes=connector)
    cache.serve(PREFIX)
    cache.manager.new_step_starts()
    cache.allocate(cache.request([*PREFIX, *[5] * 20]))
    assert cache.manager.get_computed_blocks(cache.request([*PREFIX[:24], 900]))[1] == 24


def test_what_a_request_did_not_read_is_neither_used_nor_ended_by_it():
    cache = Cache()
    prompt = list(range(96))
    cache.serve(prompt)
    cache.manager.new_step_starts()
    reader = cache.request([*prompt[:50], 900])
    cache.allocate(reader)
    tree = cache.tree
    rest = tree.match_prefix(CacheNamespace(None, None), pack(prompt)).node
    assert rest is not None
    last_used = rest.last_used
    reader.num_computed_tokens = 50  # it leaves nothing of its own
    cache.manager.free(reader)
    assert (rest.start, rest.num_hits, rest.last_used) == (50, 0, last_used)
    assert rest.parent is not None
    assert (rest.parent.end, rest.parent.num_hits) == (50, 1)
    assert rest.parent.last_used > last_used


def test_pins_never_grow_beyond_their_share():
    cache = Cache(num_blocks=61, max_model_len=300)
    for number in range(3):
        prompt = [number, *range(1000, 1287)]
        cache.serve(prompt[:20])
        cache.manager.pins.pin(prompt)
        cache.serve([*prompt, 4])
    manager = cache.manager
    assert len(manager.pins.block_ids) <= manager.pins.max_blocks
    longest = cache.request([77] * 299)
    cache.allocate(longest)


def test_an_eviction_looks_at_the_pins_of_the_evicted_blocks_only(monkeypatch):
    cache = Cache(num_blocks=400)
    pins = cache.manager.pins
    for number in range(30):  # they share all blocks but one
        cache.serve([*PREFIX, 1_000 + number])
        pins.pin([*PREFIX, 1_000 + number])
    assert len(pins.block_ids) == len(PREFIX) // SIZE + 30
    looked_up = []
    find = pins._cached

    def counted(*of):
        looked_up.append(of)
        return find(*of)

    monkeypatch.setattr(pins, "_cached", counted)
    cache.serve([*PREFIX, 1_000, 7])  # replaces the partial block of one of them
    cache.manager.new_step_starts()
    assert len(looked_up) == 1
    for pin_id in pins.all():
        pins.unpin(pin_id)
    assert not pins.block_ids
    pool = cache.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    pins.pin(PREFIX)
    assert pins.all() and cache.manager.reset_prefix_cache() and not pins.all()


def test_a_request_that_is_preempted_behind_two_passes_gets_the_tokens_of_both():
    """vLLM asks for what is cached of a request when its first token arrives. By then, this one has
    no computed tokens, and a token that is in flight."""
    machine = Machine(async_scheduling=True)
    request = machine.add(PREFIX, max_tokens=4)
    prefill, decode = machine.scheduler.schedule(), machine.scheduler.schedule()
    machine.scheduler.running.remove(request)
    machine.scheduler._preempt_request(request, timestamp=0.0)
    for token, scheduled in enumerate((prefill, decode)):
        assert scheduled.num_scheduled_tokens[request.request_id]
        output = runner_output([request.request_id], [[token]])
        machine.scheduler.update_from_output(scheduled, output)
    assert list(request.output_token_ids) == [0, 1]
    machine.run()
    assert machine.ended == [request.request_id]


def test_an_error_that_switches_the_tree_off_releases_what_was_pinned():
    cache = Cache()
    cache.serve(PREFIX)
    cache.manager.pins.pin(PREFIX)
    cache.manager.pool.guarded(lambda: 1 / 0)
    pool = cache.manager.block_pool
    assert not cache.manager.pins.all() and cache.manager.failed
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_blocks_that_are_held_for_approximate_reuse_are_released_after_an_error():
    cache = Cache()
    cache.serve(PREFIX)
    pool = cache.manager.pool
    held = [pool.blocks[block_id] for block_id in [*cache.tree.blocks.owners][:2]]
    cache.manager.new_step_starts()
    request = cache.request([500 + i for i in range(64)])
    pool.inexact.begin(request.request_id, SIZE, [held])
    cache.allocate(request)
    pool.guarded(lambda: 1 / 0)
    request.status = RequestStatus.FINISHED_STOPPED
    cache.manager.free(request)
    assert cache.manager.failed
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("status", ["PREEMPTED", "WAITING_FOR_REMOTE_KVS"])
def test_what_a_client_has_said_outlives_a_release_of_the_blocks(status):
    cache = Cache()
    programs = Programs(cache.manager)
    cache.manager.new_step_starts()
    request = cache.request(PREFIX)
    programs.arrived(request, Hints(program="p"))
    records = cache.manager.pool.records
    cache.allocate(request)
    request.status = RequestStatus[status]
    cache.manager.free(request)
    assert records.of(request).own is None
    other = cache.request(PREFIX)
    programs.arrived(other, Hints(program="p"))
    counts = programs.sections()["programs"]
    assert counts is not None and counts.running == 1
    request.status = RequestStatus.FINISHED_ABORTED
    cache.manager.free(request)
    records.discard(other)
    assert not [*records.all()]


def test_what_a_request_has_left_is_noted_without_the_request():
    cache = Cache()
    programs = Programs(cache.manager)
    cache.manager.new_step_starts()
    request = cache.request(PREFIX)
    programs.arrived(request, Hints(program="p"))
    cache.allocate(request)
    request.num_computed_tokens = len(PREFIX)
    request.status = RequestStatus.FINISHED_STOPPED
    cache.manager.free(request)
    ended = weakref.ref(request)
    del request
    assert ended() is None
    counts = programs.sections()["programs"]
    assert counts is not None and counts.unknown == 1
