"""KV connectors below the tree of models that have layers with windows, or with chunks: vLLM's
native offloading, and a connector that loads within a step or over several, and may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from vllm.config import KVTransferConfig

from sgl_vllm.radix.stats import RadixCounters
from tests.effort import some_nightly
from tests.engine import host_tiers, memory_connector
from tests.engine.engine import Ask, Engine, greedy, random_asks, tokens_of, words
from tests.engine.memory_connector import BEHAVIOUR, STORE, behave
from tests.engine.soak_models import starting
from tests.engine.window_models import CONFIGS

HOST_BYTES = 4 << 20
SMALL_CACHE = 80
"""Blocks: less than what a few of the requests hold."""

BEGINNINGS = [words(num_tokens, seed=100 + num_tokens) for num_tokens in (50, 90, 160, 205, 240)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    behave()
    yield
    behave()
    STORE.clear()


@pytest.fixture(scope="module", params=some_nightly(CONFIGS, ["gemma3"]))
def start_model(request, start, tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    with starting(request.param, start, tmp_path_factory.mktemp("models")) as start_engine:
        yield start_engine


def start_with(start_model, connector: dict, num_blocks: int = 400) -> Engine:
    config = KVTransferConfig(**connector, kv_load_failure_policy="recompute")
    cache = {"num_gpu_blocks_override": num_blocks, "max_model_len": 512}
    engine = start_model({"tier_rule": "always"}, kv_transfer_config=config, **cache)
    assert engine.scheduler.parts.states()["radix"] == "on"
    return engine


def counters(engine: Engine) -> RadixCounters:
    return engine.scheduler.sgl_vllm.stats().radix


def num_loaded(engine: Engine) -> int:
    found = counters(engine)
    return found.host_hit_tokens + found.disk_hit_tokens + found.other_tier_hit_tokens


def ask(engine: Engine, prompt: list[int], max_tokens: int = 4):
    (result,) = engine.run([Ask(prompt, greedy(max_tokens))])
    engine.settle()
    return result


# -- vLLM's offloading ------------------------------------------------------------------------


def test_a_load_goes_on_from_the_whole_blocks_that_the_tree_has(start_model, tmp_path):
    connector = host_tiers.config(HOST_BYTES, host_tiers.checked_files(tmp_path))
    engine = start_with(start_model, connector)
    prompt = words(300)
    first = ask(engine, prompt)
    assert engine.llm.reset_prefix_cache()
    whole = ask(engine, prompt)
    loaded_whole = num_loaded(engine)
    assert engine.llm.reset_prefix_cache()
    ask(engine, prompt[:110], 1)
    before = num_loaded(engine)
    rest = ask(engine, prompt)
    size = engine.scheduler.block_size
    assert (whole.num_cached_tokens, loaded_whole) == (300 - 300 % size, 300 - 300 % size)
    # The partial block is in the tree too; the load begins where it begins.
    assert rest.num_cached_tokens == 300 - 300 % size
    assert num_loaded(engine) - before == (300 - 300 % size) - (110 - 110 % size)
    in_tree = ask(engine, prompt)
    assert in_tree.num_cached_tokens == 299
    answers = [tokens_of(result) for result in (first, whole, rest, in_tree)]
    assert answers == [answers[0]] * 4
    engine.check_nothing_is_left()


# -- loads within a step, over several, and those that fail -------------------------------------


@pytest.mark.parametrize("load_steps", [0, 2])
def test_random_requests_get_stocks_tokens(start_model, load_steps):
    stock = start_model(None, enable_prefix_caching=False, max_model_len=512)
    want = [stock.tokens(random_asks(24, BEGINNINGS, seed)) for seed in (1, 2, 3)]
    behave(load_steps=load_steps, send_steps=2)
    engine = start_with(start_model, memory_connector.GROUPS_CONFIG, SMALL_CACHE)
    assert [engine.tokens(random_asks(24, BEGINNINGS, seed)) for seed in (1, 2, 3)] == want
    assert num_loaded(engine) > 400
    assert counters(engine).partial_block_hits > 0
    engine.settle()
    engine.check_nothing_is_left()


def test_a_failed_load_leaves_nothing_wrong_in_the_cache(start_model):
    engine = start_with(start_model, memory_connector.GROUPS_CONFIG)
    prompt = words(322)  # all but a little is loaded, whatever a block's size
    behave(send_steps=2)
    first = ask(engine, prompt)
    assert engine.llm.reset_prefix_cache()
    ask(engine, prompt[:110], 1)
    behave(load_steps=2, failing_block=2, names_request=True)
    failed = ask(engine, prompt)
    assert BEHAVIOUR.failing_block is None, "a load was to fail"
    again = ask(engine, prompt)
    assert [tokens_of(failed), tokens_of(again)] == [tokens_of(first)] * 2
    assert again.num_cached_tokens == 321
    engine.check_nothing_is_left()
