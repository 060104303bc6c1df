"""Rule 4 beside speculative decoding on models with windows or chunks: the answers are stock's
without speculation and without a cache. The models are small and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.effort import requests, some_slow
from tests.engine.drafters import NUM_DRAFTS, for_speculation
from tests.engine.engine import Ask, greedy, tokens_of, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import REFERENCE, References, Setting, play
from tests.engine.programs import random_program
from tests.engine.test_speculation import counting_drafts
from tests.engine.ties import check_answers
from tests.engine.window_models import CONFIGS, TINY, Model, write_eagle_drafter

METHODS = ("ngram", "eagle", "eagle3")
LOOKAHEAD = {"ngram": 0, "eagle": 1, "eagle3": 1}
HAVE_EAGLE3 = ("gemma4", "gpt_oss", "llama4")
"""The models here whose hidden states vLLM gives to EAGLE 3."""
PROGRAM = for_speculation(random_program(seed=30, num_calls=requests(45)))
NEVER_REPEATS = "gemma4"
"""Its replies repeat nothing, so no draft of n-grams is accepted."""
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.fixture(scope="module", params=some_slow(CONFIGS, ["gemma3"], SLOW))
def model(request, start, tmp_path_factory) -> Model:
    return Model.written(request.param, tmp_path_factory.mktemp(request.param), start)


def speculation(model: Model, method: str) -> dict[str, Any]:
    """N-grams of the text draft, or a random layer, which is hardly ever right.

    No draft model: stock vLLM's own answers are wrong beside windows, as its V1 runner gives the
    draft model blocks that the first group's layers use.
    """
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        return drafts | {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if method == "eagle3" and model.name not in HAVE_EAGLE3:
        pytest.skip("vLLM has no EAGLE 3 for this model")
    folder = Path(f"{model.path}-{method}")
    return drafts | {"model": write_eagle_drafter(folder, is_eagle3=method == "eagle3")}


def has_good_drafts(model: Model, method: str) -> bool:
    return method == "ngram" and model.name != NEVER_REPEATS


@pytest.fixture(scope="module")
def references(model) -> References:
    engine = model.start_for(REFERENCE)
    with decoding_one_by_one(engine.scheduler):
        narrowed = play(engine, PROGRAM, None, give_up=False)
    return References(narrowed, play(engine, PROGRAM, narrowed.prompts, give_up=False))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
def test_every_request_of_a_random_program_gets_stocks_answer(model, references, method):
    """In a small cache, with n-grams hardly larger than the longest request, so preempting."""
    num_blocks = TINY[model.name] * (1 if method == "ngram" else 2)  # its drafter has a layer, too
    tiny = Setting({}, max_num_batched_tokens=96, num_blocks=num_blocks)
    setting = model.adapted(tiny)
    engine = model.start(
        setting.plugin, speculative_config=speculation(model, method), **setting.engine_args
    )
    setting.prepare(engine)
    assert engine.scheduler.parts.states()["radix"] == "on"
    with counting_drafts(engine) as drafts:
        played = play(engine, PROGRAM, references.narrowed.prompts)
    assert engine.scheduler.parts.states()["radix"] == "on"
    assert drafts["drafts"] > drafts["accepted"]
    assert drafts["accepted"] > requests(10) or not has_good_drafts(model, method)
    assert played.counts["partial hits"] > requests(10)
    assert played.counts["select scores"] > 0 and played.counts["aborts"] > 0
    assert played.counts["preemptions"] > 0 or method != "ngram" or requests(4) != 4
    check_answers(model.start, PROGRAM, references.expected_by(setting, PROGRAM), played)


@pytest.mark.parametrize("method", METHODS)
def test_a_fork_inside_a_reply_is_found_to_the_token_and_changes_no_answer(model, method):
    stock = model.start(enable_prefix_caching=False)
    prompts, replies = [words(150, seed=1)], []
    for number in range(4):
        replies.append(tokens_of(stock.run([Ask(prompts[-1], greedy(90))])[0]))
        prompts.append([*prompts[-1], *replies[-1][:70], *words(9, seed=2 + number)])
    engine = model.start(
        {}, speculative_config=speculation(model, method), num_gpu_blocks_override=800
    )
    num_known = 0
    with counting_drafts(engine) as drafts:
        for prompt, reply in zip(prompts, replies, strict=False):
            (result,) = engine.run([Ask(prompt, greedy(90))])
            assert (result.num_cached_tokens, tokens_of(result)) == (num_known, reply)
            num_known = len(prompt) + 70 - LOOKAHEAD[method]
    assert drafts["drafts"] > 0
    assert drafts["accepted"] > 0 or not has_good_drafts(model, method)
    engine.check_nothing_is_left()
