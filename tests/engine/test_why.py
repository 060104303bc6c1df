"""Why prompt tokens of a real engine's requests were not cached, next to what vLLM counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.counters import declarations
from sgl_vllm.protocol.request_keys import REPORT
from sgl_vllm.radix.misses import MissCounters
from tests.engine import memory_connector
from tests.engine.engine import Ask, Engine, greedy, random_asks, words
from tests.engine.memory_connector import BEHAVIOUR, STORE, Behaviour

BEGINNINGS = [words(num_tokens, seed=100 + num_tokens) for num_tokens in (50, 90, 145, 195)]


def counted(engine: Engine) -> tuple[int, int]:
    """All missed tokens, and the sum over their causes."""
    counters = engine.scheduler.sgl_vllm.stats().misses
    labeled = [declared.key for declared in declarations(MissCounters) if declared.labels]
    return counters.missed_prompt_tokens, sum(getattr(counters, key) for key in labeled)


def num_computed(results: Sequence[RequestOutput]) -> int:
    """Prompt tokens that vLLM says it has neither found nor loaded."""
    return sum(len(one.prompt_token_ids) - one.num_cached_tokens for one in results)


def why(engine: Engine, result: RequestOutput) -> dict[str, Any]:
    (answer,) = engine.scheduler.sgl_vllm.why(result.request_id)
    return answer


def test_every_missed_token_has_a_cause_while_requests_are_preempted(start):
    engine = start({"why_exact": True}, num_gpu_blocks_override=20, max_model_len=512)
    num_missed = 0
    for seed in (1, 2, 3):
        results = engine.run(random_asks(24, BEGINNINGS, seed))
        num_missed += num_computed(results)
        for result in results:
            answer = why(engine, result)
            assert answer["num_cached_tokens"] == result.num_cached_tokens
            ends = [0, *(one["end"] for one in answer["causes"])]
            starts = [one["start"] for one in answer["causes"]]
            assert starts == [answer["num_cached_tokens"], *ends[1:-1]]
            assert ends[-1] == len(result.prompt_token_ids)
        assert counted(engine) == (num_missed, num_missed)
    assert engine.scheduler.sgl_vllm.stats().misses.evicted > 0
    metrics = {one.name: one for one in engine.llm.get_metrics()}
    assert metrics["vllm:num_preemptions"].value > 0


@pytest.mark.parametrize("load_steps", [0, 2])
def test_what_a_connector_loads_is_not_missed(start, load_steps):
    STORE.clear()
    vars(BEHAVIOUR).update(vars(Behaviour(load_steps=load_steps, send_steps=1)))
    config = KVTransferConfig(**memory_connector.CONFIG)
    engine = start(
        {"why_exact": True},
        kv_transfer_config=config,
        num_gpu_blocks_override=24,
        max_model_len=512,
    )
    num_missed = num_loaded = 0
    for seed in (1, 2):
        results = engine.run(random_asks(24, BEGINNINGS, seed))
        num_missed += num_computed(results)
        num_loaded += sum(why(engine, result)["num_loaded_tokens"] for result in results)
    assert num_loaded > 0
    assert counted(engine) == (num_missed, num_missed)
    engine.settle()
    vars(BEHAVIOUR).update(vars(Behaviour()))
    STORE.clear()


def test_a_report_says_where_its_prompt_left_the_cache(start):
    """Also one with text forced at its start, which enters before the prompt is computed."""
    engine = start({"tree_text": True})
    first = words(100)
    engine.run([Ask(first, greedy(1))])
    grammar = StructuredOutputsParams(regex=r'\{"name": "[A-Z][a-z]{2,8}"\}')
    params = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=grammar, extra_args={REPORT: 1}
    )
    prompt = [*first[:60], *words(30, seed=2)]
    (result,) = engine.run([Ask(prompt, params)])
    report = result.kv_transfer_params[REPORT]
    assert report["forced_tokens"] > 0
    assert report["cache"]["causes"] == [{"cause": "differs", "start": 60, "end": 90}]
    answer = why(engine, result)
    assert answer["prompt"]["tokens"] == prompt[60:76]
    assert answer["cached"]["tokens"] == first[60:76]
    assert counted(engine) == (100 + 30, 100 + 30)
    engine.check_nothing_is_left()
