"""Jumps on a real engine: forced text enters in one pass, and stops where stock would stop.

Canonical jumps are compared with decoding one by one, and exact ones with stock vLLM, to the token.
The cache is small, and prompts are computed in chunks.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from sgl_vllm.fsm.forced_tokenizer import ForcedRun
from sgl_vllm.jump.jump import JumpForward
from sgl_vllm.jump.unique import UniqueTokens
from tests.effort import requests
from tests.engine.engine import Ask, Engine, in_format, tokens_of, words
from tests.engine.one_by_one import decoding_one_by_one, jumps
from tests.engine.programs import PERSON

SETTINGS = {
    "block_size": 32,
    "num_gpu_blocks_override": 50,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "max_logprobs": -1,
}
CARD = (
    r'\{"city": "[A-Z][a-z]{2,5}", "the people who live there, in millions": [0-9], "seen": true\}'
)
SENTENCE = r"The answer to your question is [a-z ]{3,9}\."
WHOLE = "Nothing is left to decide here"
STOPS = list(range(4, 16))
PEOPLE, THE_PEOPLE = " people", "the people"

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing to decide": {"regex": WHOLE},
    "nothing to decide, and on it goes": {"regex": WHOLE, "max_tokens": 30, "ignore_eos": True},
    "stop string in the opening": {"regex": SENTENCE, "stop": ["question"]},
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
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    "bias beside the forced text": {"logit_bias": {"Z": 9.0, "%": -50.0}},
    "bias on a word of the forced text": {"logit_bias": {PEOPLE: -100.0}},
    "bad word beside the forced text": {"bad_words": ["q"]},
    "bad words in the forced text": {"bad_words": [THE_PEOPLE]},
    "seed": {"seed": 5, "temperature": 1.0},
    "scores of the prompt": {"prompt_logprobs": 1},
}
"""Canonical jumps of a request that runs alone."""
REFUSED = {"bias on a word of the forced text": PEOPLE, "bad words in the forced text": THE_PEOPLE}
"""The text that must not be written in the tokenizer's own tokens."""

LONG = [*range(40, 250)]

CHOICES = "".join(f"[abc]{digit}" for digit in "1234567890") + " and [xyz] is the end"
"""Letters are the model's choice, and digits the only legal token."""
EXACT: dict[str, dict[str, Any]] = {
    "presence penalty": {"presence_penalty": 1.3},
    "frequency penalty": {"frequency_penalty": 0.7},
    "bad words of several tokens": {"bad_words": ["1b", "2a", "3c", "4a", "5b", "6b", "7a", "8c"]},
    "seed and top-p": {"seed": 6, "temperature": 1.5, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"a": -3.0, "c": 4.0, "4": -90.0}},
    "bad word of one token": {"bad_words": ["b"]},
    "allowed tokens": {"allowed_token_ids": [*"abc0123456789xyz", " and", " is", " the", " end"]},
}
UNIQUE = r"[A-Z]1[a-z]2[a-z]3x4y5z6[a-f]"  # tokens hardly ever span two of them
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": UNIQUE},
    {"regex": r"7q8w9e1r2t[0-9]y"},
    {"regex": WHOLE},
    {"regex": r"東京は[0-9]度です"},
    {"json": PERSON},
    {"choice": ["Paris in France", "Parma", "Oslo"]},
    {"json": json.dumps({"enum": ["1a2b3c", "1a2b9z"]})},
]


def ask(engine: Engine, prompt: list[int] | None = None, **options: Any) -> Ask:
    """A request with a format, by default a card, and with texts for ids of tokens."""
    formats = {key: options.pop(key) for key in ("regex", "choice") if key in options}
    options = {"temperature": 0, "max_tokens": 90, **options}
    if bias := options.get("logit_bias"):
        options["logit_bias"] = {engine.encode(text)[0]: value for text, value in bias.items()}
    if allowed := options.get("allowed_token_ids"):
        tokens = {token for text in allowed for token in engine.encode(text)}
        options["allowed_token_ids"] = sorted({*tokens, engine.tokenizer.eos_token_id})
    structured = StructuredOutputsParams(**(formats or {"regex": CARD}))
    params = SamplingParams(structured_outputs=structured, **options)
    return Ask(engine.encode("A card: ") if prompt is None else prompt, params)


def one_at_a_time(engine: Engine) -> dict[str, tuple[RequestOutput, int, range]]:
    """The answers to `CASES`, with the passes that each took, and those it may take without a
    jump."""
    found = {}
    for case, options in CASES.items():
        engine.reset_counts()
        (output,) = engine.run([ask(engine, **options)])
        without_jump = engine.may_take(len(output.outputs[0].token_ids))
        found[case] = output, engine.forward_passes, without_jump
    return found


def seen(output: RequestOutput) -> list[Any]:
    """What a client sees of each sample, and which of its tokens had no alternative."""
    return [
        (list(one.token_ids), one.text, one.finish_reason, one.stop_reason, certain(one))
        for one in output.outputs
    ]


def certain(sample: Any) -> list[bool] | None:
    if sample.logprobs is None:
        return None
    rows = zip(sample.token_ids, sample.logprobs, strict=True)
    return [row[token].logprob == 0.0 for token, row in rows]


def mixed(engine: Engine) -> list[Any]:
    """The answers to structured requests of many kinds that run together."""
    rng = random.Random(3)
    asks = [
        ask(engine, words(length, seed=length), regex=CHOICES, **options)
        for options in EXACT.values()
        for length in (3, 40, 90)
    ]
    for number in range(requests(96)):
        grammar = StructuredOutputsParams(**rng.choice(CONSTRAINTS))  # vLLM notes things in it
        variants: list[dict[str, Any]] = [
            {},
            {"logprobs": 2},
            {"min_tokens": 6},
            {"repetition_penalty": 1.2},
            {"stop": ["2"]},
            {"n": 2, "temperature": 1, "top_k": 1},
            {"presence_penalty": 0.5},
            {"stop_token_ids": rng.sample(range(30, 300), 40)},
        ]
        prompt = [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 150))]
        options = {"temperature": 0, "max_tokens": rng.choice([6, 11, 40])} | variants[number % 8]
        asks.append(Ask(prompt, SamplingParams(structured_outputs=grammar, **options)))
    return [seen(output) for output in engine.run(asks)]


@pytest.fixture(scope="module")
def want(start) -> dict[str, Any]:
    stock = start(async_scheduling=False, **SETTINGS)
    exact = mixed(stock)
    with decoding_one_by_one(stock.scheduler):
        return {"exact": exact, "alone": one_at_a_time(stock)}


@pytest.fixture(scope="module", params=["canonical", "exact"])
def engine(start, want, request) -> Engine:
    started: Engine = start({"jump_mode": request.param}, **SETTINGS)
    return started


canonical = pytest.mark.parametrize("engine", ["canonical"], indirect=True)
exact = pytest.mark.parametrize("engine", ["exact"], indirect=True)


def counters(engine: Engine) -> Any:
    return engine.scheduler.sgl_vllm.stats().jump_forward


@canonical
def test_jumps_end_where_decoding_one_by_one_ends_and_take_fewer_passes(engine, want):
    on_v2 = engine.scheduler.use_v2_model_runner
    for case, (output, passes, without_jump) in one_at_a_time(engine).items():
        wanted, wanted_passes, _ = want["alone"][case]
        assert seen(output) == seen(wanted), case
        if jumps(ask(engine, **CASES[case]).params, on_v2=on_v2):
            assert passes < wanted_passes, case
        else:
            assert passes in without_jump, case
        if refused := REFUSED.get(case):
            text, spelled = output.outputs[0].text, engine.encode(refused)
            tokens = tokens_of(output)
            assert refused in text
            assert spelled not in [tokens[n : n + len(spelled)] for n in range(len(tokens))]
        if case.startswith("logprobs"):
            check_logprobs(wanted.outputs[0], output.outputs[0])
    rows, wanted_rows = output.prompt_logprobs, wanted.prompt_logprobs  # the last case's
    for token, row, other in list(zip(output.prompt_token_ids, rows, wanted_rows, strict=True))[1:]:
        assert row[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
    assert counters(engine).errors == 0 and len(engine.scheduler.parts.jump.openings) == 0
    engine.check_nothing_is_left()


def check_logprobs(want: Any, got: Any) -> None:
    """Every forced token has a row."""
    assert len(got.logprobs) == len(got.token_ids)
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
    for token, one, other in zip(got.token_ids, want.logprobs, got.logprobs, strict=True):
        assert other[token].rank == one[token].rank
        assert len(other) == len(one)
        assert other[token].decoded_token == one[token].decoded_token
        legal = {t: row.logprob for t, row in one.items() if row.logprob > -math.inf}
        assert {t: row.logprob for t, row in other.items() if t in legal} == pytest.approx(
            legal, abs=1e-3
        )


@exact
def test_exact_jumps_give_what_stock_gives(engine, want):
    got = mixed(engine)
    assert [pair for pair in zip(want["exact"], got, strict=True) if pair[0] != pair[1]] == []
    assert counters(engine).forced_tokens > requests(200)
    assert counters(engine).errors == 0
    engine.check_nothing_is_left()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plugin", "settings"),
    [
        ({"jump_mode": "exact"}, {"structured_outputs_config": {"backend": "guidance"}}),
        ({"radix": False, "jump_mode": "exact"}, {}),
        ({"radix": False, "jump_mode": "exact"}, {"enable_prefix_caching": False}),
    ],
    ids=["guidance", "vLLM's cache", "no cache"],
)
def test_so_do_they_on_other_engines(start, plugin, settings):
    want = mixed(start(**SETTINGS, **settings))
    engine = start(plugin, **SETTINGS, **settings)
    assert mixed(engine) == want
    assert counters(engine).forced_tokens > requests(200)


def test_passes_are_those_of_what_is_undecided(engine):
    before = counters(engine)
    engine.reset_counts()
    (output,) = engine.run([ask(engine, [70, 71], regex=UNIQUE + " and then the end")])
    after = counters(engine)
    num_decoded = len(tokens_of(output)) - (after.forced_tokens - before.forced_tokens)
    num_stale = after.stale_tokens - before.stale_tokens
    assert engine.forward_passes in engine.may_take(num_decoded, num_stale)


# -- openings --------------------------------------------------------------------------------------


@canonical
def test_the_first_pass_computes_the_opening_and_counts_it_as_output(engine):
    prompt = engine.encode("A sentence: ")
    assert engine.llm.reset_prefix_cache()
    for num_cached in (0, len(prompt)):
        engine.reset_counts()
        before = counters(engine)
        (output,) = engine.run([ask(engine, prompt, regex=SENTENCE)])
        after = counters(engine)
        num_tokens = len(tokens_of(output))
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


@pytest.fixture
def ready(engine, monkeypatch) -> None:
    """Grammars are ready in the step after they were asked for."""
    manager = engine.core.structured_output_manager
    monkeypatch.setattr(manager, "_use_async_grammar_compilation", False)


@canonical
def test_others_share_the_prompt_of_an_opened_request_that_still_runs(engine, ready):
    assert engine.llm.reset_prefix_cache()
    opened = ask(engine, LONG[:100], regex=SENTENCE)
    engine.begin("opened", opened.prompt, opened.params, num_steps=1)
    engine.begin("other", LONG[:110], SamplingParams(max_tokens=1))
    cached = {name: output.num_cached_tokens for name, output in engine.finish().items()}
    assert cached == {"opened": 0, "other": 100}


@canonical
def test_nothing_is_sent_before_the_first_pass_and_everything_after_it(engine, ready):
    llm, one = engine.llm.llm_engine, ask(engine, LONG[::-1], regex=SENTENCE)
    engine.begin("one", one.prompt, one.params)
    # Two chunks; with asynchronous scheduling, a pass is read in the step after it was sent.
    num_steps = 2 + engine.is_async
    sent = [[len(out.outputs[0].token_ids) for out in llm.step()] for _ in range(num_steps)]
    assert sent[:-1] == [[]] * (num_steps - 1)
    assert sent[-1][0] >= len(engine.encode("The answer to your question is"))
    engine.finish()


# -- streams ---------------------------------------------------------------------------------------

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
    params = in_format(80, {"grammar": ENDS_IN_ONE_TOKEN}, **more)
    params.output_kind = RequestOutputKind.DELTA
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("a stream", {"prompt_token_ids": engine.encode("A card: ")}, params)
    found = []
    while llm_engine.has_unfinished_requests():
        found += [list(one.outputs[0].token_ids) for one in llm_engine.step()]
    return found


def test_the_end_of_a_stream_is_sent_by_itself_where_it_is_shown(engine):
    streams = {case: chunks(engine, **more) for case, more in STREAMS.items()}
    whole = [*itertools.chain(*streams["plain"])]
    for case, (*before, last) in streams.items():
        assert [*itertools.chain(*before), *last] == whole, case
        assert max(map(len, before)) > 1, "text is forced all the same"
        assert (len(last) == 1) == (case != "plain"), case


# -- errors ----------------------------------------------------------------------------------------


@canonical
def test_errors_in_the_tokenization_end_the_jumps_of_their_requests_only(engine, monkeypatch):
    before = counters(engine)
    with monkeypatch.context() as patch:
        patch.setattr(ForcedRun, "settled", lambda *_: 1 / 0)
        for output in engine.run([ask(engine)] * 20):
            assert output.outputs[0].finish_reason == "stop"
            assert output.outputs[0].text.startswith('{"city": "')
    failed = counters(engine)
    assert failed.errors == before.errors + 20 and failed.forced_tokens == before.forced_tokens
    assert engine.scheduler.sgl_vllm.stats().parts["jump_forward"] == "on"
    engine.run([ask(engine)])
    assert counters(engine).forced_tokens > failed.forced_tokens


@canonical
def test_an_error_half_way_through_a_jump_ends_its_request_only(engine, monkeypatch):
    asks = [ask(engine, engine.encode(f"A card of {name}: ")) for name in ("a", "b", "c")]
    want = engine.tokens(asks)
    num_errors = counters(engine).errors
    append, planted = JumpForward._append, [RuntimeError("planted")]

    def fail_once(jump, request, forced, output):
        append(jump, request, forced, output)
        if planted:
            raise planted.pop()

    monkeypatch.setattr(JumpForward, "_append", fail_once)
    found = engine.tokens(asks)
    assert [reason for _, reason in found].count("error") == 1
    assert all(one == two for one, two in zip(found, want, strict=True) if one[1] != "error")
    assert counters(engine).errors == num_errors + 1
    assert engine.scheduler.sgl_vllm.stats().parts["jump_forward"] == "on"
    engine.check_nothing_is_left()


@exact
def test_a_backend_that_fails_ends_jumping_only(engine, monkeypatch):
    one = ask(engine, [70, 71], regex=UNIQUE)
    want = engine.tokens([one])
    num_errors = counters(engine).errors
    find, calls = UniqueTokens._only_legal_token, itertools.count()

    def fail_at_second(self, grammar):
        if next(calls) % 2:
            raise RuntimeError("no mask")
        return find(self, grammar)

    monkeypatch.setattr(UniqueTokens, "_only_legal_token", fail_at_second)
    assert engine.tokens([one] * 8) == want * 8
    assert counters(engine).errors == num_errors + 8
