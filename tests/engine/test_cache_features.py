"""What the cache promises next to vLLM's other features: statistics, eviction policies, pins,
priorities, resets, aborts, and inputs that are more than tokens."""

from __future__ import annotations

import logging

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.radix.keys import CacheNamespace
from sgl_vllm.radix.tokens import pack
from sgl_vllm.scheduler import assembly
from tests.engine.engine import Ask, Engine, greedy, words

SMALL = {"num_gpu_blocks_override": 24, "max_model_len": 512}
"""23 blocks of 32 tokens to use, and a longest request of 16."""


def in_tree(engine: Engine, prompt: list[int]) -> int:
    """How much of it is cached, without using it."""
    return engine.scheduler.parts.radix.tree.match_prefix(CacheNamespace(), pack(prompt)).num_tokens


def answer(engine: Engine, prompt: list[int], max_tokens: int = 1) -> list[int]:
    return engine.tokens([Ask(prompt, greedy(max_tokens))])[0][0]


def flood(engine: Engine) -> None:
    """More than the cache holds, in prompts that nobody repeats."""
    for seed in range(1000, 1004):
        answer(engine, words(400, seed))


def begin(engine: Engine, name: str, prompt: list[int], max_tokens: int, num_steps: int) -> None:
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(max_tokens))
    for _ in range(num_steps):
        engine.llm.llm_engine.step()


def finish(engine: Engine) -> dict[str, list[int]]:
    """Run to the end what is there: each request's tokens."""
    tokens = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start({}, max_num_batched_tokens=256, **SMALL)


@pytest.fixture(autouse=True)
def empty_cache(request):
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.scheduler.defer_block_free = False
        for pin in engine.scheduler.sgl_vllm.pins():
            engine.scheduler.sgl_vllm.unpin(pin.pin_id)
        engine.core.step()
        engine.check_nothing_is_left()
        assert engine.llm.reset_prefix_cache()


# -- vLLM's statistics ----------------------------------------------------------------------------


@pytest.fixture
def statistics(engine, monkeypatch) -> PrefixCacheStats:
    """The sum of what vLLM's scheduler reports."""
    total = PrefixCacheStats()
    make_stats = engine.scheduler.make_stats

    def recorded(*args, **kwargs):
        stats = make_stats(*args, **kwargs)
        part = stats.prefix_cache_stats
        for name in ("requests", "queries", "hits", "preempted_requests", "preempted_hits"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        return stats

    monkeypatch.setattr(engine.scheduler, "make_stats", recorded)
    return total


def test_statistics_count_tokens_not_blocks(engine, statistics):
    first, second = words(100), words(100)[:70] + words(20, seed=1)
    results = [engine.run([Ask(prompt, greedy())])[0] for prompt in (first, second)]
    assert (statistics.requests, statistics.queries, statistics.hits) == (2, 190, 70)
    assert [result.num_cached_tokens for result in results] == [0, 70]
    assert [result.num_cache_creation_tokens for result in results] == [100, 20]


def test_statistics_stay_right_when_requests_are_preempted(engine, statistics):
    prompts = [words(50) + words(110, seed) for seed in range(1, 6)]
    results = engine.run([Ask(prompt, greedy(60)) for prompt in prompts])
    assert statistics.preempted_requests > 0
    assert statistics.preempted_hits > 0
    assert (statistics.requests, statistics.queries) == (5, 800)
    assert statistics.hits == sum(result.num_cached_tokens for result in results)
    for result in results:
        # A request of a later step than the first finds the 50 common tokens.
        assert result.num_cached_tokens in (0, 32, 50)
        assert result.num_cached_tokens + result.num_cache_creation_tokens == 160


# -- pins -----------------------------------------------------------------------------------------


def test_a_pinned_prefix_survives_a_flood_until_it_is_unpinned(engine):
    prompt = words(100)
    answer(engine, prompt)
    pin = engine.scheduler.sgl_vllm.pin(prompt).pinned
    assert (pin.num_tokens, pin.num_blocks) == (100, 4)
    flood(engine)
    assert in_tree(engine, prompt) == 100
    assert engine.scheduler.sgl_vllm.unpin(pin.pin_id) is True
    assert engine.scheduler.sgl_vllm.unpin(pin.pin_id) is False
    flood(engine)
    assert in_tree(engine, prompt) == 0


def test_a_pin_moves_to_the_longer_copy_that_replaces_its_last_block(engine):
    prompt = words(100)
    answer(engine, prompt)
    engine.scheduler.sgl_vllm.pin(prompt)
    (before,) = engine.scheduler.parts.radix.pins.all().values()
    old_blocks = before.blocks
    answer(engine, prompt + words(9, seed=1))
    (after,) = engine.scheduler.parts.radix.pins.all().values()
    assert after.blocks[:3] == old_blocks[:3] and after.blocks[3] is not old_blocks[3]
    assert old_blocks[3].ref_cnt == 0
    flood(engine)
    assert in_tree(engine, prompt) == 100


def test_a_reset_that_is_refused_keeps_pins(engine):
    answer(engine, words(100))
    engine.scheduler.sgl_vllm.pin(words(100))
    begin(engine, "running", words(50, seed=1), max_tokens=9, num_steps=2)
    assert not engine.llm.reset_prefix_cache()
    finish(engine)
    flood(engine)
    assert in_tree(engine, words(100)) == 100


def test_what_cannot_be_pinned_is_refused_with_its_reason(engine):
    assert "nothing of this prefix is cached" in engine.scheduler.sgl_vllm.pin(words(9)).error
    answer(engine, words(200))
    error = engine.scheduler.sgl_vllm.pin(words(200)).error
    assert "7 blocks would be pinned and at most 5 may be" in error


# -- resets, sleep, aborts ------------------------------------------------------------------------


def test_a_reset_with_running_requests_changes_no_answer(engine):
    prompt, late = words(100), words(60, seed=1)
    expected = {"a": answer(engine, prompt, 20), "b": answer(engine, late, 20)}
    assert engine.llm.reset_prefix_cache()
    begin(engine, "a", prompt, max_tokens=20, num_steps=5)
    begin(engine, "b", late, max_tokens=20, num_steps=1)
    engine.scheduler.sgl_vllm.pin(prompt)
    assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    assert in_tree(engine, prompt) == 0 and not engine.scheduler.sgl_vllm.pins()
    assert finish(engine) == expected


def test_sleeping_empties_the_cache(engine):
    prompt = words(100)
    expected = answer(engine, prompt, 5)
    engine.core.sleep(level=1)
    engine.core.wake_up()
    assert in_tree(engine, prompt) == 0
    assert answer(engine, prompt, 5) == expected


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(0, 0), (1, 256), (2, 400), (5, 403)],
    ids=["waiting", "in the first chunk of its prompt", "after its prompt", "while it answers"],
)
def test_an_abort_leaves_what_was_computed(engine, num_steps, expected):
    begin(engine, "gone", words(400), max_tokens=20, num_steps=num_steps)
    request = next(iter(engine.scheduler.requests.values()))
    tokens = list(request.all_token_ids)
    engine.llm.llm_engine.abort_request(["gone"])
    engine.check_nothing_is_left()
    assert in_tree(engine, tokens) == expected


@pytest.mark.parametrize("defer_block_free", [False, True])
def test_an_abort_during_a_forward_pass_leaves_what_earlier_ones_computed(
    engine, monkeypatch, defer_block_free
):
    """With asynchronous scheduling vLLM keeps such blocks until the pass has ended."""
    prompt = words(400)
    expected = answer(engine, prompt, 5)
    assert engine.llm.reset_prefix_cache()
    scheduler = engine.scheduler
    scheduler.defer_block_free = defer_block_free
    scheduler.processed_step_seq = scheduler.sched_step_seq
    begin(engine, "gone", prompt, max_tokens=5, num_steps=1)
    output = scheduler.schedule()
    (request_id,) = output.num_scheduled_tokens
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
    assert in_tree(engine, prompt) >= 256
    assert bool(scheduler.deferred_frees) == defer_block_free
    engine.core.model_executor.execute_model(output)
    scheduler.update_from_output(output, engine.core.model_executor.sample_tokens(None))
    engine.llm.llm_engine.abort_request(["gone"])
    engine.check_nothing_is_left()
    assert answer(engine, prompt, 5) == expected


# -- several samples, adapters, images, embeddings ------------------------------------------------


def test_several_samples_of_a_prompt_are_those_of_single_requests(engine):
    prompt = words(100)

    def sampled(n: int, seed: int) -> list[list[int]]:
        params = SamplingParams(n=n, temperature=1, seed=seed, max_tokens=8, ignore_eos=True)
        (result,) = engine.run([Ask(prompt, params)])
        return [list(output.token_ids) for output in result.outputs]

    together = sampled(3, seed=7)
    assert together == [sampled(1, seed)[0] for seed in (7, 8, 9)]
    assert len({tuple(tokens) for tokens in together}) == 3


class Cache:
    """The manager alone: what a request finds, and what it leaves."""

    def __init__(self, engine: Engine) -> None:
        self.manager = engine.scheduler.kv_cache_manager
        self.num_requests = 0

    def request(self, prompt: list[int] | None, **more) -> Request:
        self.num_requests += 1
        return Request(f"r{self.num_requests}", prompt, greedy(), None, **more)

    def find(self, prompt: list[int] | None, **more) -> int:
        self.manager.new_step_starts()
        request = self.request(prompt, **more)
        num_tokens = self.manager.get_computed_blocks(request)[1]
        self.manager.free(request)
        return num_tokens

    def compute(self, prompt: list[int] | None, **more) -> Request:
        """Without freeing its blocks."""
        self.manager.new_step_starts()
        request = self.request(prompt, **more)
        assert self.manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.manager.new_step_starts()
        return request

    def leave(self, prompt: list[int] | None, **more) -> None:
        self.manager.free(self.compute(prompt, **more))


@pytest.fixture
def cache(engine) -> Cache:
    return Cache(engine)


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


@pytest.mark.parametrize("offset", [5, 40], ids=["inside the first block", "later"])
def test_images_with_the_same_placeholders_are_told_apart(cache, offset):
    prompt = words(offset) + [7] * 20 + words(60, seed=1)
    cache.leave(prompt, mm_features=[image("cat", offset, 20)])
    assert cache.find(prompt, mm_features=[image("cat", offset, 20)]) == len(prompt) - 1
    assert cache.find(prompt, mm_features=[image("dog", offset, 20)]) == offset
    assert cache.find(prompt) == offset


def test_two_images_in_another_order_share_nothing_of_them(cache):
    prompt = words(10) + [7] * 40 + words(30, seed=1)
    cache.leave(prompt, mm_features=[image("cat", 10, 20), image("dog", 30, 20)])
    assert cache.find(prompt, mm_features=[image("cat", 10, 20), image("cat", 30, 20)]) == 30
    assert cache.find(prompt, mm_features=[image("dog", 10, 20), image("cat", 30, 20)]) == 10


def test_embedded_prompts_are_shared_by_their_contents(cache):
    embeds = torch.randn(50, 8)
    cache.leave(None, prompt_embeds=embeds)
    assert cache.find(None, prompt_embeds=embeds.clone()) == 49
    assert cache.find(None, prompt_embeds=embeds + 1) == 0
    assert cache.find([0] * 50) == 0


def test_a_streaming_session_goes_on_from_what_it_computed(engine):
    """Its turns; the last sampled token of each is given up, which is why it is not in the tree."""
    first, second = words(100), words(40, seed=1)

    def turn(prompt: list[int]) -> list[int]:
        request = Request("session", list(prompt), greedy(5), None, resumable=True)
        engine.scheduler.add_request(request)
        tokens: list[int] = []
        while len(tokens) < 5:
            for outputs in engine.core.step()[0].values():
                tokens += [token for output in outputs.outputs for token in output.new_token_ids]
        return tokens

    answers = [turn(first), turn(second)]
    assert engine.scheduler.parts.radix.tree.num_tokens == 0
    engine.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.parts.radix.tree.num_tokens == 0
    assert answers[0] == answer(engine, first, 5)
    assert answers[1] == answer(engine, first + answers[0][:4] + second, 5)


def test_blocks_whose_release_is_deferred_are_cached_but_not_evictable(cache, engine):
    request = cache.compute(words(100))
    blocks = cache.manager.pop_blocks_for_free(request)
    assert cache.find(words(100)) == 99
    assert engine.scheduler.parts.radix.tree.num_locked_blocks == 4
    cache.manager.block_pool.free_blocks(reversed(blocks))
    assert engine.scheduler.parts.radix.tree.num_evictable_blocks == 4
    engine.check_nothing_is_left()


# -- engines of their own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("lru", {"often": 0, "once": 0, "important": 96, "new": 128}),
        ("lfu", {"often": 128, "once": 96, "important": 0, "new": 0}),
        ("slru", {"often": 96, "once": 128, "important": 0, "new": 0}),
        ("priority", {"often": 0, "once": 0, "important": 128, "new": 96}),
    ],
)
def test_each_eviction_policy_keeps_what_it_says(start, policy, kept):
    engine = start({"radix_policy": policy}, **SMALL)
    prompts = {name: words(128, seed) for seed, name in enumerate(kept)}
    for name, num_runs in [("often", 4), ("once", 2), ("important", 1), ("new", 1)]:
        for _ in range(num_runs):
            engine.llm.generate(
                {"prompt_token_ids": prompts[name]},
                greedy(),
                priority=[-5 if name == "important" else 0],
                use_tqdm=False,
            )
    answer(engine, words(511, seed=9))  # 16 blocks; 7 are free: 9 have to go
    assert {name: in_tree(engine, prompt) for name, prompt in prompts.items()} == kept
    engine.check_nothing_is_left()


def test_what_nobody_uses_expires(start):
    engine = start({"radix_ttl_s": 300}, **SMALL)
    tree = engine.scheduler.parts.radix.tree
    now_s = tree.clock()
    tree.clock = lambda: now_s
    for seed in (0, 1, 2):
        answer(engine, words(100, seed))
    engine.scheduler.sgl_vllm.pin(words(100, seed=1))
    now_s += 301
    answer(engine, words(100, seed=2))
    assert [in_tree(engine, words(100, seed)) for seed in (0, 1, 2)] == [0, 100, 100]
    assert engine.llm.reset_prefix_cache()


def test_a_model_the_tree_does_not_support_runs_on_vllms_own_cache(start, monkeypatch):
    prompts = [words(200), words(200)[:150] + words(30, seed=1)]
    overrides = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}

    def run(plugin) -> tuple[Engine, list]:
        engine = start(
            plugin, hf_overrides=overrides, num_gpu_blocks_override=64, max_model_len=512
        )
        results = [engine.run([Ask(prompt, greedy(8))])[0] for prompt in prompts]
        engine.check_nothing_is_left()
        return engine, [(list(r.outputs[0].token_ids), r.num_cached_tokens) for r in results]

    warnings = []
    monkeypatch.setattr(assembly.logger, "log", lambda level, *args: warnings.append((level, args)))
    engine, results = run({})
    reason = "SlidingWindowSpec layers keep only the last"
    assert reason in engine.scheduler.parts.states()["radix"]
    assert engine.scheduler.parts.radix is None
    [(level, said)] = warnings
    assert level == logging.WARNING and "radix off (" in said[-1] and reason in said[-1]
    assert results == run(None)[1]
