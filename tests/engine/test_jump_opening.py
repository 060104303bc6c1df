"""A pattern that begins with forced text is opened before the first pass."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engine import Ask, Engine
from tests.engine.one_by_one import decoding_one_by_one

CARD = r'\{"the city where it all began": "[A-Z][a-z]{2,5}", "seen": (true|false)\}'
SENTENCE = r"The answer to your question is [a-z ]{3,9}\."
WHOLE = "Nothing is left to decide here"
MAX_MODEL_LEN = 256


def constrained(pattern: str, max_tokens: int = 60, **more: Any) -> SamplingParams:
    grammar = StructuredOutputsParams(regex=pattern)
    options = {"temperature": 0, "max_tokens": max_tokens, **more}
    return SamplingParams(structured_outputs=grammar, **options)


CASES = {
    "card": constrained(CARD),
    "sentence": constrained(SENTENCE),
    "nothing to decide": constrained(WHOLE),
    "nothing to decide, and on it goes": constrained(WHOLE, 30, ignore_eos=True),
    "a choice": SamplingParams(
        temperature=0,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(choice=["Paris in France", "Paris in Texas"]),
    ),
    **{f"max_tokens {n}": constrained(CARD, n) for n in (1, 2, 3, 9, 13)},
    "stop string in the opening": constrained(CARD, stop=["where it"]),
    "stop string kept": constrained(CARD, stop=["ere i"], include_stop_str_in_output=True),
    "stop string of the sampled token": constrained(SENTENCE, stop=["is "]),
    "stop tokens": constrained(CARD, stop_token_ids=list(range(300, 2000, 2))),
    "several samples": constrained(SENTENCE, n=3, temperature=1, top_k=1),
}
LONG = [*range(40, 250)]
PROMPTS = {"short": [70, 71, 72], "a block": LONG[:32], "long": LONG}
"""With the longest, every answer ends at the length that the model allows."""


def answers(engine: Engine) -> dict[tuple[str, str], Any]:
    asks = {
        (case, length): Ask(prompt, params)
        for case, params in CASES.items()
        for length, prompt in PROMPTS.items()
    }
    outputs = engine.run(list(asks.values()))
    return {
        name: [
            (sample.text, list(sample.token_ids), sample.finish_reason, sample.stop_reason)
            for sample in output.outputs
        ]
        for name, output in zip(asks, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def want(start) -> dict[tuple[str, str], Any]:
    engine = start(async_scheduling=False, max_model_len=MAX_MODEL_LEN)
    with decoding_one_by_one(engine.scheduler):
        return answers(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"plugin": {}},
        {"plugin": {"radix": False}},
        {"plugin": {}, "block_size": 128},
        {"plugin": {}, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 24},
        {"plugin": {"radix": False}, "enable_prefix_caching": False},
    ],
    ids=["tree", "vLLM's cache", "block 128", "prefill in chunks, tiny cache", "no cache"],
)
def test_the_answers_are_those_of_decoding_one_by_one(start, want, settings):
    engine = start(max_model_len=MAX_MODEL_LEN, **settings)
    first, again = answers(engine), answers(engine)
    for got in (first, again):
        assert {name: got[name] for name in want if got[name] != want[name]} == {}
    engine.check_nothing_is_left()
    assert len(engine.scheduler.parts.jump.unsent) == 0


def test_the_first_pass_computes_the_opening_and_counts_it_as_output(start):
    engine: Engine = start(plugin={}, max_model_len=MAX_MODEL_LEN)
    prompt = engine.encode("A card: ")
    for num_cached in (0, len(prompt)):
        engine.reset_counts()
        before = engine.scheduler.sgl_vllm.stats().jump_forward
        output = engine.run([Ask(prompt, constrained(SENTENCE, 60))])[0]
        after = engine.scheduler.sgl_vllm.stats().jump_forward
        num_tokens = len(output.outputs[0].token_ids)
        num_forced = after.forced_tokens - before.forced_tokens
        num_stale = after.stale_tokens - before.stale_tokens
        assert engine.forward_passes in engine.may_take(num_tokens - num_forced, num_stale)
        assert num_forced >= len(engine.encode("The answer to your question is")) - 1
        assert output.prompt_token_ids == prompt
        # The tokens of the prompt only: what is cached of the opening is computed again.
        assert output.num_cached_tokens == num_cached
        # A stale pass computes what is known, and that in flight at the end the last token.
        num_in_flight = engine.forward_passes - (num_tokens - num_forced + num_stale)
        num_computed = len(prompt) + num_tokens - 1 - num_cached
        assert engine.computed_tokens == num_computed + num_in_flight


def start_stepwise(start, **engine_args: Any) -> Engine:
    """An engine whose grammars are ready in the step after they were asked for."""
    engine: Engine = start(plugin={}, max_model_len=MAX_MODEL_LEN, **engine_args)
    engine.core.structured_output_manager._use_async_grammar_compilation = False
    return engine


def test_others_share_the_prompt_of_an_opened_request_that_still_runs(start):
    engine = start_stepwise(start)
    llm = engine.llm.llm_engine
    llm.add_request("opened", {"prompt_token_ids": LONG[:100]}, constrained(SENTENCE))
    llm.step()
    llm.add_request("other", {"prompt_token_ids": LONG[:110]}, SamplingParams(max_tokens=1))
    cached = {}
    while llm.has_unfinished_requests():
        cached.update({out.request_id: out.num_cached_tokens for out in llm.step()})
    assert cached == {"opened": 0, "other": 100}


def test_nothing_is_sent_before_the_first_pass_and_everything_after_it(start):
    engine = start_stepwise(start, max_num_batched_tokens=48)
    llm = engine.llm.llm_engine
    llm.add_request("one", {"prompt_token_ids": LONG[:120]}, constrained(SENTENCE))
    # Three chunks; with asynchronous scheduling, a pass is read in the step after it was sent.
    num_steps = 3 + engine.is_async
    sent = [[len(out.outputs[0].token_ids) for out in llm.step()] for _ in range(num_steps)]
    num_opening = len(engine.encode("The answer to your question is"))
    assert sent[:-1] == [[]] * (num_steps - 1)
    assert sent[-1][0] >= num_opening
