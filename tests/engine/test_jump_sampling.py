"""Sampling parameters that a jump must leave as they are: which requests jump, and what they get.

`jump_mode=exact` is compared with stock vLLM, and canonical jumps with decoding one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.jump import part
from tests.engine.engine import Ask, Engine, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_forward import CARD

CHOICES = "".join(f"[abc]{digit}" for digit in "1234567890") + " and [xyz] is the end"
"""Letters are the model's choice, and digits the only legal token."""

READS_OUTPUT: dict[str, dict[str, Any]] = {
    "presence penalty": {"presence_penalty": 1.3},
    "frequency penalty": {"frequency_penalty": 0.7},
    "bad words of several tokens": {"bad_words": ["1b", "2a", "3c", "4a", "5b", "6b", "7a", "8c"]},
    "seed": {"seed": 5, "temperature": 1.0},
    "seed and top-p": {"seed": 6, "temperature": 1.5, "top_p": 0.9},
}
"""The V1 runner takes the output of a resumed request for prompt, so there they do not jump."""

ANY_RUNNER: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"a": -3.0, "c": 4.0, "4": -90.0}},
    "bad word of one token": {"bad_words": ["b"]},
    "allowed tokens": {"allowed_token_ids": "abc0123456789xyzandistheend "},
}

PROMPTS = [words(length, seed=length) for length in (3, 40, 90)]


def asks_for(engine: Engine, pattern: str, options: dict[str, Any]) -> list[Ask]:
    options = dict(options)
    if bias := options.get("logit_bias"):
        options["logit_bias"] = {engine.encode(text)[0]: value for text, value in bias.items()}
    if allowed := options.get("allowed_token_ids"):
        pieces = [*allowed, " and", " is", " the", " end"]
        tokens = {token for piece in pieces for token in engine.encode(piece)}
        options["allowed_token_ids"] = sorted({*tokens, engine.tokenizer.eos_token_id})
    return [
        Ask(
            prompt,
            SamplingParams(
                structured_outputs=StructuredOutputsParams(regex=pattern),
                **{"temperature": 0, "max_tokens": 90, **options},
            ),
        )
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def stock(start) -> dict[str, list[Any]]:
    engine = start()
    return {
        name: engine.tokens(asks_for(engine, CHOICES, options))
        for name, options in (READS_OUTPUT | ANY_RUNNER).items()
    }


@pytest.fixture(scope="module")
def exact(start, stock) -> Engine:
    engine: Engine = start({"jump_mode": "exact"})
    return engine


def num_forced(engine: Engine) -> int:
    return int(engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens)


@pytest.mark.parametrize("name", [*READS_OUTPUT, *ANY_RUNNER])
def test_exact_jumps_give_what_stock_gives(exact, stock, name):
    options = (READS_OUTPUT | ANY_RUNNER)[name]
    before = num_forced(exact)
    assert exact.tokens(asks_for(exact, CHOICES, options)) == stock[name]
    if exact.is_async:
        return  # with a step in flight, exact mode does not jump over the one token forced here
    on_v2 = exact.scheduler.use_v2_model_runner
    assert (num_forced(exact) > before) == (on_v2 or name in ANY_RUNNER)


# -- canonical jumps -------------------------------------------------------------------------------

PEOPLE, THE_PEOPLE = " people", "the people"
BESIDE: dict[str, tuple[dict[str, Any], str | None]] = {
    "presence and frequency penalty": ({"presence_penalty": 0.9, "frequency_penalty": 0.4}, None),
    "bias beside the forced text": ({"logit_bias": {"Z": 9.0, "%": -50.0}}, None),
    "bias on a word of the forced text": ({"logit_bias": {PEOPLE: -100.0}}, PEOPLE),
    "bad word beside the forced text": ({"bad_words": ["q"]}, None),
    "bad words in the forced text": ({"bad_words": [THE_PEOPLE]}, THE_PEOPLE),
    "seed": ({"seed": 7, "temperature": 0.8}, None),
    "scores of the prompt": ({"prompt_logprobs": 1}, None),
}
"""With the text that must not be written in the tokenizer's own tokens."""


@pytest.fixture(scope="module")
def canonical(start) -> dict[str, Any]:
    def answers(engine: Engine) -> dict[str, Any]:
        found = {}
        for name, (options, _) in BESIDE.items():
            engine.reset_counts()
            outputs = engine.run(asks_for(engine, CARD, options))
            found[name] = outputs, engine.forward_passes
        return found

    stock = start(async_scheduling=False)
    with decoding_one_by_one(stock.scheduler):
        want = answers(stock)
    engine = start({})
    got = answers(engine)
    assert engine.scheduler.sgl_vllm.stats().jump_forward.errors == 0
    engine.check_nothing_is_left()
    return {
        "want": want,
        "got": got,
        "on V2": engine.scheduler.use_v2_model_runner,
        "tokens": {text: engine.encode(text) for text in (PEOPLE, THE_PEOPLE)},
    }


def has_run(tokens: Sequence[int], run: Sequence[int]) -> bool:
    starts = range(len(tokens) - len(run) + 1)
    return any(list(tokens[start : start + len(run)]) == list(run) for start in starts)


@pytest.mark.parametrize("name", BESIDE)
def test_canonical_jumps_give_what_decoding_one_by_one_gives(canonical, name):
    (want, passes_want), (got, passes_got) = canonical["want"][name], canonical["got"][name]
    _, refused = BESIDE[name]
    for one, other in zip(want, got, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        assert other.outputs[0].finish_reason == one.outputs[0].finish_reason
        assert refused is None or refused in other.outputs[0].text
        assert refused is None or not has_run(
            other.outputs[0].token_ids, canonical["tokens"][refused]
        )
    only_on_v2 = ("presence and frequency penalty", "bad words in the forced text", "seed")
    if canonical["on V2"] or name not in only_on_v2:
        assert passes_got < passes_want
    else:
        assert passes_got >= max(len(one.outputs[0].token_ids) for one in got)


def test_a_request_that_asks_for_scores_of_its_prompt_jumps_after_them(canonical):
    name = "scores of the prompt"
    (want, _), (got, _) = canonical["want"][name], canonical["got"][name]
    for one, other in zip(want, got, strict=True):
        tokens, rows, wanted_rows = one.prompt_token_ids, other.prompt_logprobs, one.prompt_logprobs
        assert len(rows) == len(wanted_rows) == len(tokens)
        for token, row, wanted in list(zip(tokens, rows, wanted_rows, strict=True))[1:]:
            assert row[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


# -- rules that no engine is needed for ------------------------------------------------------------


def test_a_stop_string_ends_jumping_where_the_frontend_keeps_what_comes_after_it(request_with):
    request = request_with(stop=["x"])
    assert part.may_jump(request, part.Limits())
    assert not part.may_jump(request, part.Limits(drops_after_stop=False))


def test_logits_of_forced_tokens_are_not_made_up(request_with):
    request = request_with(logprobs=1)
    assert part.may_jump(request, part.Limits())
    assert not part.may_jump(request, part.Limits(has_logprobs=False))


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"repetition_detection": object()}])
def test_some_requests_jump_but_not_at_the_start(request_with, options):
    request = request_with()
    for name, value in options.items():
        setattr(request.sampling_params, name, value)
    assert part.may_jump(request, part.Limits())
    assert not part.may_open(request, part.Limits())


@pytest.fixture
def request_with() -> Callable[..., Any]:
    from vllm.v1.request import Request

    def make(**options: Any) -> Request:
        grammar = StructuredOutputsParams(regex="a+")
        return Request("one", [1, 2], SamplingParams(structured_outputs=grammar, **options), None)

    return make
