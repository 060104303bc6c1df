"""With a step always in flight: the real engine and the V1 runner, asynchronously, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.jump.part import SENT_PER_PASS, least_run
from tests.engine.engine import Ask, Engine, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_forward import CASES, card
from tests.engine.test_jump_pressure import MAX_MODEL_LEN, SHAPES, jobs, run, start_tiny
from tests.engine.test_same_answers import is_constrained, mixed_requests
from tests.engine.test_select import CHOICE_TOKENS, PREFIX_TOKENS, choices, scores, scoring
from tests.platforms import asynchronous

pytestmark = pytest.mark.slow  # on v1-async, `make test-platforms` runs more of the same kind

ON = {"self_check": "off"}


@pytest.fixture(scope="module", autouse=True)
def overlap() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        asynchronous.allow(patch)
        yield


def start_overlapped(start, **engine_args) -> Engine:
    engine: Engine = start(plugin=ON, async_scheduling=True, **engine_args)
    assert engine.core.batch_queue_size == 2
    assert set(engine.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    return engine


def test_mixed_requests_get_the_same_tokens(start):
    settings = {"block_size": 32, "num_gpu_blocks_override": 50, "max_num_batched_tokens": 128}
    asks = mixed_requests(2000, count=80, seed=7)
    constrained = [index for index, ask in enumerate(asks) if is_constrained(ask)]
    stock = start(async_scheduling=False, **settings)
    want = stock.tokens(asks)
    with decoding_one_by_one(stock.scheduler):
        narrowed = stock.tokens([asks[index] for index in constrained])
    without = {**ON, "jump_forward": False, "select": False}
    engine = start(plugin=without, async_scheduling=True, **settings)
    assert engine.tokens(asks) == want
    engine.check_nothing_is_left()
    assert engine.scheduler.sgl_vllm.stats().radix.partial_block_hits > 10

    for index, tokens in zip(constrained, narrowed, strict=True):
        want[index] = tokens
    engine = start_overlapped(start, **settings)
    got = engine.tokens(asks)
    engine.check_nothing_is_left()
    assert [index for index in range(len(asks)) if got[index] != want[index]] == []
    jumps = engine.scheduler.sgl_vllm.stats().jump_forward
    assert jumps.forced_tokens > 100 and jumps.errors == 0  # runs of three or more
    assert 0 < jumps.stale_tokens <= jumps.jumps


def test_a_jump_ends_where_decoding_one_by_one_ends(start):
    cases = dict(CASES)
    del cases["logprobs of given tokens"]  # vLLM's V1 runner gives these to the whole batch

    def answers(engine: Engine) -> list[CompletionOutput]:
        asks = [Ask(engine.encode("A card: "), card(**params)) for params in cases.values()]
        found = [output.outputs[0] for output in engine.run(asks)]
        engine.check_nothing_is_left()
        return found

    stock = start(async_scheduling=False, max_logprobs=-1)
    with decoding_one_by_one(stock.scheduler):
        one_by_one = answers(stock)
    overlapped = answers(start_overlapped(start, max_logprobs=-1))
    for case, want, got in zip(cases, one_by_one, overlapped, strict=True):
        assert (got.token_ids, got.text) == (want.token_ids, want.text), case
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason), case
        if want.logprobs is not None:
            for token, row, other in zip(got.token_ids, want.logprobs, got.logprobs, strict=True):
                assert other[token].logprob == pytest.approx(row[token].logprob, abs=1e-3), case


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=str)
def test_a_cache_that_they_fill_holds_nobody_up(start, shape):
    block_size = shape[0]
    todo = jobs(block_size, 24, seed=block_size)
    stock = start(async_scheduling=False, max_model_len=MAX_MODEL_LEN)
    with decoding_one_by_one(stock.scheduler):
        wanted = run(stock, todo, 10_000, None).answers
    engine = start_tiny(start, *shape, plugin=ON, async_scheduling=True)
    assert engine.core.batch_queue_size == 2
    for disturb in (None, random.Random(0), random.Random(1)):
        done = run(engine, todo, 10_000, disturb)
        assert done.answers == {name: wanted[name] for name in done.answers}
        assert len(done.answers) + len(done.partial) == len(todo)
        for name, tokens in done.partial.items():
            assert tokens == wanted[name][0][: len(tokens)]
    counts = engine.scheduler.sgl_vllm.stats().jump_forward
    assert counts.errors == 0 and counts.stale_tokens > 0


def test_scores_are_stocks_and_the_prefix_is_not_computed_again(start):
    prefix, endings = choices()
    engine = start_overlapped(start, block_size=128)
    want = engine.run([Ask(prefix + ending, scoring()) for ending in endings])
    engine.reset_counts()
    got = engine.run([Ask(prefix + ending, scoring(PREFIX_TOKENS)) for ending in endings])
    assert engine.computed_tokens < PREFIX_TOKENS
    for one, other in zip(got, want, strict=True):
        assert scores(one, CHOICE_TOKENS) == pytest.approx(scores(other, CHOICE_TOKENS), abs=1e-4)
    engine.check_nothing_is_left()


def greedy_text(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, **more)


# One forced token at a time in the first, several in the second.
RUNS = {"of one token": r"([0-9]x){12}", "longer": r"Name: [a-z]{3}, code: [0-9]{3}, that is all\."}


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("mode", ["exact", "canonical"])
def test_jumps_never_take_more_passes_than_decoding(start, mode, at_once):
    formats = [StructuredOutputsParams(regex=regex) for regex in RUNS.values()] * at_once
    asks = [
        Ask(words(20, seed=number), greedy_text(structured_outputs=one))
        for number, one in enumerate(formats)
    ]
    turns = [[ask] for ask in asks] if at_once == 1 else [asks]
    passes = {}
    for jumps in (False, True):
        plugin = {**ON, "jump_forward": jumps, "jump_mode": mode}
        engine = start(plugin=plugin, async_scheduling=True)
        engine.run(asks)  # the formats are compiled
        assert engine.llm.reset_prefix_cache()
        engine.reset_counts()
        for turn in turns:
            engine.run(turn)
        passes[jumps] = engine.forward_passes
        engine.check_nothing_is_left()
    print(f"forward passes, {mode}, {at_once} at a time: {passes}")
    assert passes[True] <= passes[False], passes


def test_a_run_must_be_longer_than_what_it_costs():
    assert least_run(100, has_step_in_flight=False) == 1
    assert least_run(100, has_step_in_flight=True) == 3
    assert least_run(SENT_PER_PASS, has_step_in_flight=False) == 2
    assert least_run(2 * SENT_PER_PASS, has_step_in_flight=True) == 5
