"""KV connectors beside the tree: what they load, keep and fail to load, against stock vLLM."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.effort import some_nightly
from tests.engine import memory_connector
from tests.engine.engine import Ask, Engine, greedy, random_asks, tokens_of, words
from tests.engine.memory_connector import BEHAVIOUR, STORE, behave
from tests.engine.models import WINDOWS, starting


def forget(engine: Engine) -> None:
    """Empty the cache, but not the connector's store."""
    engine.settle()
    assert engine.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    config = KVTransferConfig(**memory_connector.CONFIG, kv_load_failure_policy="recompute")
    return start(
        plugin={}, kv_transfer_config=config, num_gpu_blocks_override=24, max_model_len=512
    )


@pytest.fixture(autouse=True)
def clean(request):
    behave()
    yield
    behave()
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.settle()
        engine.check_nothing_is_left()
        assert engine.llm.reset_prefix_cache()
    STORE.clear()


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    """What comes without cache and connector's store, which holds `prompt` afterwards."""
    behave(send_steps=2)
    (result,) = engine.run([Ask(prompt, greedy(4))])
    forget(engine)
    behave()
    return tokens_of(result)


def computed_afresh(engine: Engine, prompt: list[int]) -> list[int]:
    """With what is in the cache, but nothing in the connector's store."""
    engine.settle()
    STORE.clear()
    behave()
    return tokens_of(engine.run([Ask(prompt, greedy(4))])[0])


@pytest.mark.parametrize("load_steps", [0, 2])
def test_a_partial_tail_gives_way_to_a_load_that_goes_further(engine, load_steps):
    prompt = words(200)
    expected = answer(engine, prompt)
    engine.run([Ask(prompt[:80], greedy(1))])
    hits = engine.scheduler.parts.radix.counters.hit_tokens
    behave(load_steps=load_steps)
    (result,) = engine.run([Ask(prompt, greedy(4))])
    assert tokens_of(result) == expected
    assert result.num_cached_tokens == 192
    assert engine.scheduler.parts.radix.counters.hit_tokens == hits + 64
    assert computed_afresh(engine, prompt) == expected


@pytest.mark.parametrize("load_steps", [0, 2])
def test_scores_beside_a_store_that_has_more_than_the_prefix(engine, load_steps):
    prompt, whole = words(160), {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}
    (stock,) = engine.run([Ask(prompt, SamplingParams(**whole))])
    # The first score inside the load, at its end, and one token after it.
    for first_scored, num_loaded in ((100, 0), (128, 0), (129, 128)):
        answer(engine, prompt)
        behave(load_steps=load_steps)
        engine.reset_counts()
        params = SamplingParams(**whole, extra_args={"sgl_score_from": first_scored})
        (result,) = engine.run([Ask(prompt, params)])
        assert engine.computed_tokens == len(prompt) - num_loaded
        scored = prompt[first_scored:]
        got, want = (
            [row[token].logprob for row, token in zip(rows[-len(scored) :], scored, strict=True)]
            for rows in (result.prompt_logprobs, stock.prompt_logprobs)
        )
        assert got == pytest.approx(want, abs=1e-4)
        forget(engine)


@pytest.mark.parametrize(("load_steps", "failing_block"), [(0, 1), (2, 0), (2, 1)])
def test_a_failed_load_leaves_nothing_wrong_in_the_cache(engine, load_steps, failing_block):
    prompt = words(150)
    expected = answer(engine, prompt)
    behave(load_steps=load_steps, failing_block=failing_block)
    (result,) = engine.run([Ask(prompt, greedy(4))])
    assert tokens_of(result) == expected
    assert computed_afresh(engine, prompt) == expected


@pytest.mark.parametrize("failing_block", [None, 1])
def test_a_request_aborted_while_it_loads_leaves_only_what_is_there(engine, failing_block):
    prompt = words(150)
    expected = answer(engine, prompt)
    behave(load_steps=4, failing_block=failing_block)
    engine.begin("gone", prompt, greedy(4), num_steps=2)
    engine.llm.llm_engine.abort_request(["gone"])
    assert computed_afresh(engine, prompt) == expected


def test_blocks_are_kept_until_they_are_sent(engine):
    prompt = words(100)
    expected = answer(engine, prompt)
    STORE.clear()
    behave(send_steps=8)
    engine.run([Ask(prompt, greedy(4))])
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < pool.num_gpu_blocks - 1
    behave()
    engine.run([Ask(words(300, seed=seed), greedy(1)) for seed in range(2, 6)])
    engine.settle()
    assert len(STORE) == 3
    forget(engine)
    (result,) = engine.run([Ask(prompt, greedy(4))])
    assert (tokens_of(result), result.num_cached_tokens) == (expected, 96)


# Together far more than the cache holds.
BEGINNINGS = [words(num_tokens, seed=100 + num_tokens) for num_tokens in (50, 90, 145, 195)]


def test_random_requests_get_stocks_tokens(start):
    """With a cache so tight that requests are preempted, and loads and sends all the time."""

    def run(plugin) -> list:
        STORE.clear()
        behave(load_steps=2, send_steps=2)
        config = KVTransferConfig(**memory_connector.CONFIG)
        engine = start(
            plugin, kv_transfer_config=config, num_gpu_blocks_override=20, max_model_len=512
        )
        tokens = [engine.tokens(random_asks(14, BEGINNINGS, seed)) for seed in (1, 2)]
        engine.settle()
        engine.check_nothing_is_left()
        return tokens

    assert run({}) == run(None)


@pytest.mark.slow
def test_prefill_in_one_engine_and_decode_in_another(start, tmp_path):
    """vLLM's example of disaggregation, with the plugin on both sides: what goes over is files."""

    def config(role: str) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )

    prompts = [words(num_tokens, num_tokens) for num_tokens in (100, 140, 180)]
    alone = start(None, max_model_len=512)
    expected = alone.run([Ask(prompt, greedy(6)) for prompt in prompts])
    prefill = start({}, kv_transfer_config=config("kv_producer"), max_model_len=512)
    first = [tokens_of(result) for result in prefill.run([Ask(p, greedy(1)) for p in prompts])]
    decode = start({}, kv_transfer_config=config("kv_consumer"), max_model_len=512)
    asks = [Ask(prompt + token, greedy(5)) for prompt, token in zip(prompts, first, strict=True)]
    results = decode.run(asks)
    found = [token + tokens_of(result) for token, result in zip(first, results, strict=True)]
    assert found == [tokens_of(result) for result in expected]
    assert [result.num_cached_tokens for result in results] == [96, 128, 160]
    decode.check_nothing_is_left()


# -- windows and chunks ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", some_nightly(WINDOWS, ["gemma3"]))
def test_so_do_they_on_models_with_several_groups(start, model, tmp_path):
    """Random requests, and a load that fails."""
    beginnings = [words(number, seed=100 + number) for number in (50, 90, 160, 205, 240)]
    config = KVTransferConfig(**memory_connector.CONFIG, kv_load_failure_policy="recompute")

    def run(engine: Engine) -> list:
        return [engine.tokens(random_asks(24, beginnings, seed)) for seed in (1, 2, 3)]

    with starting(model, start, tmp_path) as start_model:
        want = run(start_model(None, enable_prefix_caching=False, max_model_len=512))
        behave(load_steps=2, send_steps=2)
        engine = start_model(
            {"tier_rule": "always"},
            kv_transfer_config=config,
            num_gpu_blocks_override=80,
            max_model_len=512,
        )
        assert run(engine) == want
        found = engine.scheduler.sgl_vllm.stats().radix
        assert found.other_tier_hit_tokens > 400 and found.partial_block_hits > 0
        forget(engine)
        prompt = words(322)  # all but a little is loaded, whatever a block's size
        first = answer(engine, prompt)
        engine.run([Ask(prompt[:110], greedy(1))])
        behave(load_steps=2, failing_block=2, names_request=True)
        (failed,) = engine.run([Ask(prompt, greedy(4))])
        assert BEHAVIOUR.failing_block is None, "a load was to fail"
        (again,) = engine.run([Ask(prompt, greedy(4))])
        assert [tokens_of(failed), tokens_of(again)] == [first] * 2
        assert again.num_cached_tokens == 321
        engine.settle()
        engine.check_nothing_is_left()
