"""What the cache promises next to vLLM's other features: statistics, eviction policies, pins,
priorities, resets, aborts, and inputs that are more than tokens."""

from __future__ import annotations

import logging

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.radix.keys import CacheNamespace
from sgl_vllm.radix.tokens import pack
from sgl_vllm.scheduler import assembly
from tests.engine import host_tiers
from tests.engine.cache import Cache
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
    engine.begin("running", words(50, seed=1), greedy(9), num_steps=2)
    assert not engine.llm.reset_prefix_cache()
    engine.finish()
    flood(engine)
    assert in_tree(engine, words(100)) == 100


def test_what_cannot_be_pinned_is_refused_with_its_reason(engine):
    assert "nothing of this prefix is cached" in engine.scheduler.sgl_vllm.pin(words(9)).error
    answer(engine, words(200))
    error = engine.scheduler.sgl_vllm.pin(words(200)).error
    assert "7 blocks would be pinned and at most 5 may be" in error


# -- resets, sleep, aborts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(0, 0), (1, 256), (2, 400), (5, 403)],
    ids=["waiting", "in the first chunk of its prompt", "after its prompt", "while it answers"],
)
def test_an_abort_leaves_what_was_computed(engine, num_steps, expected):
    engine.begin("gone", words(400), greedy(20), num_steps)
    request = next(iter(engine.scheduler.requests.values()))
    tokens = list(request.all_token_ids)
    engine.llm.llm_engine.abort_request(["gone"])
    engine.check_nothing_is_left()
    assert in_tree(engine, tokens) == expected


# -- several samples, adapters, images, embeddings ------------------------------------------------


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


@pytest.mark.parametrize("offset", [5, 40], ids=["inside the first block", "later"])
def test_images_with_the_same_placeholders_are_told_apart(offset):
    cache = Cache()
    prompt = words(offset) + [7] * 20 + words(60, seed=1)
    cache.serve(prompt, mm_features=[image("cat", offset, 20)])
    assert cache.hit(prompt, mm_features=[image("cat", offset, 20)]) == len(prompt) - 1
    assert cache.hit(prompt, mm_features=[image("dog", offset, 20)]) == offset
    assert cache.hit(prompt) == offset


def test_embedded_prompts_are_shared_by_their_contents():
    cache = Cache()
    embeds = torch.randn(50, 8)
    cache.serve(None, prompt_embeds=embeds)
    assert cache.hit(None, prompt_embeds=embeds.clone()) == 49
    assert cache.hit(None, prompt_embeds=embeds + 1) == 0
    assert cache.hit([0] * 50) == 0


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


ALL_WINDOWS = {
    "hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4},
    "num_gpu_blocks_override": 64,
    "max_model_len": 512,
}


def two_with_the_same_start(start, plugin, **more) -> tuple[Engine, list]:
    """Their answers, and how many tokens of each prompt were cached."""
    engine = start(plugin, **ALL_WINDOWS, **more)
    prompts = [words(200), words(200)[:150] + words(30, seed=1)]
    results = [engine.run([Ask(prompt, greedy(8))])[0] for prompt in prompts]
    engine.check_nothing_is_left()
    return engine, [(list(r.outputs[0].token_ids), r.num_cached_tokens) for r in results]


def test_with_windows_in_all_layers_a_hit_ends_at_any_token(start):
    engine, results = two_with_the_same_start(start, {})
    assert engine.scheduler.parts.states()["radix"] == "on"
    stock = two_with_the_same_start(start, None)[1]
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in stock]
    assert [cached for _, cached in results] == [0, 150]


def test_a_model_the_tree_does_not_support_runs_on_vllms_own_cache(start, monkeypatch):
    warnings = []
    monkeypatch.setattr(assembly.logger, "log", lambda level, *args: warnings.append((level, args)))
    tier = {"kv_transfer_config": KVTransferConfig(**host_tiers.config(4 << 20))}
    engine, results = two_with_the_same_start(start, {}, **tier)
    reason = "windows in all layers beside a KV connector"
    assert reason in engine.scheduler.parts.states()["radix"]
    assert engine.scheduler.parts.radix is None
    [(level, said)] = warnings
    assert level == logging.WARNING and "radix off (" in said[-1] and reason in said[-1]
    assert results == two_with_the_same_start(start, None, **tier)[1]
