"""Forced text enters in one pass, and stops where stock would stop."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from sgl_vllm.fsm.forced_tokenizer import ForcedTokenizer
from sgl_vllm.jump.jump import JumpForward
from tests.engine.engine import Ask, Engine
from tests.engine.one_by_one import decoding_one_by_one, jumps

CARD = (
    r'\{"city": "[A-Z][a-z]{2,5}", "the people who live there, in millions": [0-9], "seen": true\}'
)
STOPS = list(range(4, 16))


def card(max_tokens: int = 80, **more) -> SamplingParams:
    grammar = StructuredOutputsParams(regex=CARD)
    options = {"temperature": 0, "max_tokens": max_tokens, **more}
    return SamplingParams(structured_outputs=grammar, **options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens in forced text": {"max_tokens": 12},
    "stop string in forced text": {"stop": ["millions"]},
    "stop string kept": {"stop": ["in mil"], "include_stop_str_in_output": True},
    "stop token in forced text": {"stop_token_ids": STOPS},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 70},
    "repetition penalty": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 33, "ignore_eos": True},
    "min_tokens against a stop token": {"min_tokens": 6, "stop_token_ids": STOPS},
    "min_tokens against a stop string": {"min_tokens": 9, "stop": ["i"]},
    "logprobs": {"logprobs": 3},
    "logprobs of sampled tokens only": {"logprobs": 0},
    "logprobs up to a stop string": {"logprobs": 2, "stop": ["millions"]},
    "logprobs of all tokens": {"logprobs": -1},
    "logprobs of given tokens": {"logprob_token_ids": [5, 300, 301]},
    "presence penalty": {"presence_penalty": 1.3},
    "seed": {"seed": 5, "temperature": 1.0},
}


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "logprobs of given tokens": {"logprob_token_ids": [5]},
    "special tokens as text": {"skip_special_tokens": False},
    "the stop token as text": {"include_stop_str_in_output": True},
}


ENDS_IN_ONE_TOKEN = r"""%llguidance {}
start: "{\"city\": \"" /[A-Z][a-z]{2,5}/ "\", \"seen\": true}"
"""
"""A grammar of guidance. Others may end in either of the model's two stop tokens, so that none is
forced."""


def chunks(engine: Engine, **more: Any) -> list[list[int]]:
    """The tokens of each part of a stream."""
    grammar = StructuredOutputsParams(grammar=ENDS_IN_ONE_TOKEN)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=grammar, **more)
    params.output_kind = RequestOutputKind.DELTA
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("a stream", {"prompt_token_ids": engine.encode("A card: ")}, params)
    found = []
    while llm_engine.has_unfinished_requests():
        found += [list(one.outputs[0].token_ids) for one in llm_engine.step()]
    return found


@pytest.fixture(scope="module")
def engines(start):
    """The same requests on the reference first, then on the engine that jumps. With each answer
    come the passes it took, and those it may take without a jump."""

    def answers(engine: Engine) -> dict[str, tuple[CompletionOutput, int, range]]:
        found = {}
        for case, params in CASES.items():
            engine.reset_counts()
            output = engine.run([Ask(engine.encode("A card: "), card(**params))])[0].outputs[0]
            without_jump = engine.may_take(len(output.token_ids))
            found[case] = (output, engine.forward_passes, without_jump)
        return found

    stock = start(async_scheduling=False, max_logprobs=-1)
    with decoding_one_by_one(stock.scheduler):
        one_by_one = answers(stock)
    engine = start(plugin={"radix": False}, max_logprobs=-1)
    on_v2 = engine.scheduler.use_v2_model_runner
    return {"one by one": one_by_one, "jump": answers(engine), "on V2": on_v2}


@pytest.mark.parametrize("case", CASES)
def test_a_jump_ends_where_decoding_one_by_one_ends(engines, case):
    want, passes_want, _ = engines["one by one"][case]
    got, passes_got, without_jump = engines["jump"][case]
    assert (got.token_ids, got.text) == (want.token_ids, want.text)
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
    if jumps(card(**CASES[case]), on_v2=engines["on V2"]):
        assert passes_got < passes_want
    else:
        assert passes_got in without_jump


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("logprobs")])
def test_every_forced_token_has_a_row_of_logprobs(engines, case):
    want, *_ = engines["one by one"][case]
    got, *_ = engines["jump"][case]
    assert len(got.logprobs) == len(got.token_ids)
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
    num_certain = 0
    for token, one, other in zip(got.token_ids, want.logprobs, got.logprobs, strict=True):
        assert other[token].logprob == pytest.approx(one[token].logprob, abs=1e-3)
        assert other[token].rank == one[token].rank
        assert len(other) == len(one)
        assert other[token].decoded_token == one[token].decoded_token
        legal = {t: row.logprob for t, row in one.items() if row.logprob > -math.inf}
        assert {t: row.logprob for t, row in other.items() if t in legal} == pytest.approx(
            legal, abs=1e-3
        )
        num_certain += other[token].logprob == 0.0
    assert num_certain >= 15 or not jumps(card(**CASES[case]), on_v2=engines["on V2"])


@pytest.mark.parametrize("mode", ["canonical", "exact"])
def test_the_end_of_a_stream_is_sent_by_itself_where_it_is_shown(start, mode):
    engine = start(plugin={"radix": False, "jump_mode": mode})
    streams = {case: chunks(engine, **more) for case, more in STREAMS.items()}
    whole = [*itertools.chain(*streams["plain"])]
    for case, (*before, last) in streams.items():
        assert [*itertools.chain(*before), *last] == whole, case
        assert max(map(len, before)) > 1, "text is forced all the same"
        assert (len(last) == 1) == (case != "plain"), case


def test_passes_are_those_of_what_is_undecided(engines):
    output, passes, _ = engines["jump"]["plain"]
    # {" ... the name's letters and its end, a digit, and what a longer token might have absorbed.
    assert passes <= 12
    assert len(output.token_ids) >= 25


def test_errors_in_the_tokenization_end_the_jumps_of_their_requests_only(start, monkeypatch):
    engine: Engine = start(plugin={})
    num_settled = ForcedTokenizer.num_settled
    monkeypatch.setattr(ForcedTokenizer, "num_settled", lambda *_: 1 / 0)
    ask = Ask(engine.encode("A card: "), card())
    for output in engine.run([ask] * 20):
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text.startswith('{"city": "')
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.jump_forward.errors == 20 and stats.jump_forward.forced_tokens == 0
    assert stats.parts["jump_forward"] == "on"
    monkeypatch.setattr(ForcedTokenizer, "num_settled", num_settled)
    engine.run([ask])
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens > 0


def test_an_error_half_way_through_a_jump_ends_its_request_only(start, monkeypatch):
    engine: Engine = start(plugin={}, block_size=32)
    asks = [Ask(engine.encode(f"A card of {name}: "), card()) for name in ("a", "b", "c")]
    want = engine.tokens(asks)
    append, planted = JumpForward._append, [RuntimeError("planted")]

    def fail_once(jump, request, forced, output):
        append(jump, request, forced, output)
        if planted:
            raise planted.pop()

    monkeypatch.setattr(JumpForward, "_append", fail_once)
    found = engine.tokens(asks)
    assert [reason for _, reason in found].count("error") == 1
    assert all(one == two for one, two in zip(found, want, strict=True) if one[1] != "error")
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.jump_forward.errors == 1
    assert stats.parts["jump_forward"] == "on"
    engine.check_nothing_is_left()
