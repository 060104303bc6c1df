"""Jumps beside KV connectors: a connector does not see them, and what it stores is right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import host_tiers, memory_connector
from tests.engine.engine import Ask, Engine, greedy, tokens_of, words
from tests.engine.memory_connector import STORE, behave
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_pressure import MAX_MODEL_LEN, Run, jobs, run, start_tiny

pytestmark = pytest.mark.platforms

ENDS_FORCED = r"[a-z]{3} is what we asked for, and [a-z]{2} is what we got in the end, after all"
LONG_RUNS = (
    r"[a-z]{3} is what we asked for, and nobody in the whole city has ever seen anything like it "
    r"before or after, so that [a-z]{2} is what we got in the end, after all that we had been "
    r"through, and this is all that can ever be said about it in so many words as we have here"
)
"""The first forced run fills whole blocks; `max_tokens` ends the request inside the second."""
SHAPES = [
    # block size, blocks, at once, chunked, policy
    (32, 9, 4, True, "fcfs"),
    (32, 12, 16, True, "priority"),
    (32, 20, 16, False, "fcfs"),
]


@pytest.fixture(autouse=True)
def clean():
    behave()
    yield
    behave()
    STORE.clear()


@pytest.fixture(scope="module")
def want(start) -> Run:
    """What the jobs get one after the other, without a connector."""
    stock = start(async_scheduling=False, max_model_len=MAX_MODEL_LEN)
    with decoding_one_by_one(stock.scheduler):
        return run(stock, jobs(32, 24, seed=32), 10_000, None)


def offloading_config(tmp_path) -> dict[str, Any]:
    config = host_tiers.config(64 << 20, host_tiers.files(tmp_path))
    config["kv_connector_extra_config"]["offload_prompt_only"] = False
    return config


def offloading(tmp_path) -> KVTransferConfig:
    """vLLM's connector for host memory, and files below that: prompts and answers."""
    return KVTransferConfig(**offloading_config(tmp_path))


def all_get_what_they_should(engine: Engine, want: Run, seeds: int) -> None:
    """Once undisturbed, then with aborts, preemptions and resets of the cache. In the later rounds
    prompts are loaded."""
    todo = jobs(32, 24, seed=32)
    max_steps = 20 * sum(len(tokens) for tokens, _ in want.answers.values())
    assert run(engine, todo, max_steps, None).answers == want.answers
    for seed in range(seeds):
        disturbed = run(engine, todo, max_steps, random.Random(seed))
        assert disturbed.answers == {name: want.answers[name] for name in disturbed.answers}
        for name, tokens in disturbed.partial.items():
            assert tokens == want.answers[name][0][: len(tokens)]
    stats = engine.scheduler.sgl_vllm.stats().jump_forward
    assert stats.forced_tokens > 400
    assert stats.errors == 0


# -- what a connector is told ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "load_steps"),
    [
        (SHAPES[1], 2),
        pytest.param(SHAPES[0], 0, marks=pytest.mark.slow),
        pytest.param(SHAPES[2], 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_connector_is_told_of_requests_that_run_on_and_on(start, want, shape, load_steps):
    config = KVTransferConfig(**memory_connector.WITNESS_CONFIG)
    engine = start_tiny(start, *shape, plugin={"tier_rule": "always"}, kv_transfer_config=config)
    behave(load_steps=load_steps, send_steps=2)
    all_get_what_they_should(engine, want, seeds=3)
    assert engine.scheduler.connector.num_several > 50


def test_what_a_connector_answers_goes_with_an_output_that_ends_in_forced_text(start):
    config = KVTransferConfig(**memory_connector.WITNESS_CONFIG)
    engine = start({}, kv_transfer_config=config, num_gpu_blocks_override=24, max_model_len=256)
    grammar = StructuredOutputsParams(regex=ENDS_FORCED)
    params = SamplingParams(
        temperature=0, max_tokens=120, structured_outputs=grammar, extra_args={"sgl_report": 1}
    )
    (result,) = engine.run([Ask(words(40), params)])
    assert result.outputs[0].text.endswith("after all")
    assert result.kv_transfer_params == {"witness": len(tokens_of(result))}
    engine.settle()
    engine.check_nothing_is_left()


# -- what it stores -------------------------------------------------------------------------------


def stored_and_computed(start, tmp_path) -> tuple[list[int], list[float], list[float]]:
    """Of conversations that go on in or after an answer which ended inside forced text, each once
    loaded and once computed: loaded tokens beyond the prompt, and how likely the next token is."""
    engine = start(
        {"tier_rule": "always"},
        kv_transfer_config=offloading(tmp_path),
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=40,
    )
    grammar = StructuredOutputsParams(regex=LONG_RUNS)
    params = SamplingParams(temperature=0, max_tokens=72, structured_outputs=grammar)
    prompts = [words(20 + 3 * number, seed=number) for number in range(24)]
    turns = []
    for prompt in prompts:
        (result,) = engine.run([Ask(prompt, params)])
        engine.settle()
        assert result.outputs[0].finish_reason == "length"
        answer = tokens_of(result)
        # Near what the first jump has filled, and after what the second has left uncomputed.
        turns += [[*prompt, *answer[:40], 5, 6], [*prompt, *answer, *words(40, seed=99)]]
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens > 1000
    assert engine.llm.reset_prefix_cache()
    beyond, found = [], []
    for number, turn in enumerate(turns):
        (loaded,) = engine.run([Ask(turn, greedy(1, logprobs=0))])
        engine.settle()
        beyond.append(loaded.num_cached_tokens - len(prompts[number // 2]))
        found.append(loaded)
    afresh = greedy(1, logprobs=0, skip_reading_prefix_cache=True)
    computed = engine.run([Ask(turn, afresh) for turn in turns])
    engine.settle()
    engine.check_nothing_is_left()
    return beyond, [likelihood(one) for one in found], [likelihood(one) for one in computed]


def likelihood(result) -> float:
    (row,) = result.outputs[0].logprobs
    return max(entry.logprob for entry in row.values())


def test_what_was_stored_of_a_jumped_request_is_what_it_had_computed(start, tmp_path):
    beyond, loaded, computed = stored_and_computed(start, tmp_path)
    assert sum(num_tokens > 0 for num_tokens in beyond) >= 6
    assert loaded == pytest.approx(computed, abs=1e-4)
