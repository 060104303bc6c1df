"""What the prefix cache finds, against stock, on the real engine."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from sgl_vllm.radix.keys import namespace_of
from sgl_vllm.radix.tree import RadixTree
from tests.engine.engine import Ask, Engine, greedy, words


def cached_tokens(engine: Engine, *asks: Ask) -> list[int | None]:
    """Each request on its own, after the one before it has finished."""
    return [engine.run([ask])[0].num_cached_tokens for ask in asks]


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start(plugin={}, block_size=128, num_gpu_blocks_override=64)


@pytest.fixture(autouse=True)
def empty_cache(engine):
    assert engine.llm.reset_prefix_cache()
    yield
    engine.check_nothing_is_left()


@pytest.mark.parametrize("shared", [1, 100, 127, 128, 129, 300])
def test_a_shared_prefix_is_found_to_the_token(engine, shared):
    first, second = words(300), words(300)[:shared] + words(40, seed=1)
    assert cached_tokens(engine, Ask(first, greedy()), Ask(second, greedy())) == [0, shared]


def test_the_next_turn_of_a_chat_finds_the_answer_too(engine):
    prompt = words(100)
    answer = list(engine.run([Ask(prompt, greedy(20))])[0].outputs[0].token_ids)
    second_turn = prompt + answer + words(10, seed=1)
    # The last sampled token was never fed to the model, so its KV does not exist.
    assert cached_tokens(engine, Ask(second_turn, greedy())) == [119]


def test_a_longer_chat_keeps_one_copy_of_its_history(engine):
    history = words(90)
    for turn in range(6):
        answer = list(engine.run([Ask(history, greedy(5))])[0].outputs[0].token_ids)
        history = history + answer + words(7, seed=turn)
    tree = engine.scheduler.parts.radix.tree
    assert tree.num_blocks == -(-tree.num_tokens // 128)


def test_the_whole_prompt_is_never_a_hit(engine):
    """One token at least has to run, or there is nothing to sample from."""
    prompt = words(50)
    assert cached_tokens(engine, Ask(prompt, greedy()), Ask(prompt, greedy())) == [0, 49]


def test_tenants_find_nothing_of_each_other(engine):
    prompt = words(200)
    asks = [Ask(prompt, greedy(), salt) for salt in ("a", "b", None, "a")]
    assert cached_tokens(engine, *asks) == [0, 0, 0, 199]


def test_a_request_that_runs_is_found_by_those_that_come_later(engine):
    """Stock shares full blocks of running requests; ours shares what is computed, to the token."""
    prompt = words(100)
    long = engine.llm.llm_engine
    long.add_request("long", {"prompt_token_ids": prompt}, greedy(30))
    for _ in range(3):
        long.step()
    long.add_request("late", {"prompt_token_ids": prompt[:80] + words(9, seed=2)}, greedy(1))
    finished = {}
    while long.has_unfinished_requests():
        finished.update({out.request_id: out for out in long.step() if out.finished})
    assert finished["late"].num_cached_tokens == 80


def test_a_request_as_large_as_the_cache_is_still_admitted(start):
    """A hit inside a block needs one block more for the copy; that must not lock a request out."""
    engine = start(plugin={}, block_size=32, num_gpu_blocks_override=9, max_model_len=256)
    prompt = words(250)
    outputs = engine.run([Ask(prompt[:30], greedy()), Ask(prompt, greedy(5))])
    assert len(outputs[1].outputs[0].token_ids) == 5
    assert cached_tokens(engine, Ask(prompt[:250], greedy(5))) > [100]
    engine.check_nothing_is_left()


def test_an_error_in_the_tree_switches_it_off_and_the_engine_goes_on(start, monkeypatch):
    engine = start(plugin={}, block_size=32)

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(RadixTree, "insert", broken)
    prompt = words(100)
    # The request that met the error leaves nothing; from then on vLLM's own cache is at work.
    ask = Ask(prompt, greedy())
    assert cached_tokens(engine, ask, ask, ask) == [0, 0, 96]
    assert engine.scheduler.parts.radix.tree is None
    assert "switched off by an error" in engine.scheduler.sgl_vllm.stats().parts["radix"]


def test_adapters_share_by_name_and_path_as_in_stock():
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    def namespace(name: str | None, number: int = 1, path: str = "/a", salt: str | None = None):
        lora = LoRARequest(name, number, path) if name else None
        return namespace_of(
            Request("id", [1, 2], SamplingParams(), None, lora_request=lora, cache_salt=salt)
        )

    assert namespace("x", 1, "/a") == namespace("x", 2, "/a")
    assert namespace("x", 1, "/a") != namespace("x", 1, "/b")
    assert namespace("x", 1, "/a") != namespace(None)
    assert namespace(None, salt="") == namespace(None)
    assert namespace(None, salt="a") != namespace(None, salt="b")
