"""The radix tree on MLA (DeepSeek V2 and V3, Kimi K2): hits to the token, and stock's answers.

vLLM computes a prompt and a decoded token by different formulas for MLA, so log-probabilities move
by up to 3e-5 with how a request is cut into passes, in stock vLLM too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import gpu_model_runner

from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.radix.layouts import layer_specs
from tests.effort import requests
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.mla_model import BLOCK_SIZE, allow_prefix_caching, engine_args, write_model
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import (
    LOGPROB_TOLERANCE,
    NEAR_TIE,
    Played,
    References,
    Setting,
    differences,
    play,
)
from tests.engine.programs import Program, random_program
from tests.engine.sessions import Reply, again, in_order, num_shared, session, wrong
from tests.engine.ties import JUDGE, gap

slow = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def start_mla(start, tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    """`start`, with a DeepSeek V2 whose prefixes are cached unless asked not to."""
    arguments = engine_args(write_model(tmp_path_factory.mktemp("models") / "deepseek_v2"))

    def start_engine(plugin: dict[str, Any] | None = None, **more: Any) -> Engine:
        return start(plugin, **{**arguments, **more})

    with pytest.MonkeyPatch.context() as patch:
        allow_prefix_caching(patch)
        yield start_engine


# -- hits to the token ----------------------------------------------------------------------------


def longest_hits(batches: Sequence[Sequence[Reply]]) -> list[int]:
    """For each request, how much of its prompt a request before it has computed. The last token of
    a prompt always runs. Requests of a batch share nothing that none before them has."""
    found: list[int] = []
    before: list[list[int]] = []
    for batch in batches:
        for reply in batch:
            shared = max((num_shared(reply.prompt, tokens) for tokens in before), default=0)
            found.append(min(shared, len(reply.prompt) - 1))
        before += [reply.computed for reply in batch]
    return found


@pytest.fixture(scope="module")
def cold(start_mla) -> list[list[Reply]]:
    """The session on stock vLLM without a cache."""
    return session(start_mla(enable_prefix_caching=False))


@pytest.fixture(scope="module")
def engine(cold, start_mla) -> Engine:
    return start_mla({}, num_gpu_blocks_override=500)


def test_every_part_is_on(engine):
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    specs = {
        type(spec) for specs in layer_specs(engine.scheduler.kv_cache_config) for spec in specs
    }
    assert specs == {MLAAttentionSpec}


def test_hits_are_the_longest_shared_prefix_and_answers_are_stocks(cold, engine):
    assert engine.llm.reset_prefix_cache()
    warm = again(engine, cold)
    assert [reply.num_cached for reply in in_order(warm)] == longest_hits(warm)
    assert sum(longest_hits(warm)) > 5000
    assert not wrong(in_order(cold), in_order(warm))
    engine.check_nothing_is_left()


def test_without_the_copies_of_blocks_the_answers_differ(cold, engine, monkeypatch):
    """So the comparison above sees a latent vector that is not the prefix's."""
    assert engine.llm.reset_prefix_cache()
    monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    broken = again(engine, cold)
    in_blocks = [hit % BLOCK_SIZE != 0 for hit in longest_hits(broken)]
    assert sum(in_blocks) > 15
    assert len(wrong(in_order(cold), in_order(broken))) > 15


def test_scores_are_stocks_and_the_prefix_is_not_computed_again(engine):
    """`select` on a cached prefix that ends inside a block."""
    prefix, choices = words(333, seed=5), [words(5, seed=seed) for seed in range(4)]
    assert engine.llm.reset_prefix_cache()

    def scores(**more: Any) -> list[list[float]]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **more)
        outputs = engine.run([Ask(prefix + choice, params) for choice in choices])
        return [
            [
                row[token].logprob
                for row, token in zip(out.prompt_logprobs[-5:], choice, strict=True)
            ]
            for out, choice in zip(outputs, choices, strict=True)
        ]

    want = scores()
    engine.run([Ask(prefix, greedy())])
    engine.reset_counts()
    got = scores(extra_args={SCORE_FROM: len(prefix)})
    assert engine.computed_tokens == len(choices) * 6  # a choice, after the last token before it
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, abs=LOGPROB_TOLERANCE)
    engine.check_nothing_is_left()


# -- random programs ------------------------------------------------------------------------------

QUICK = "tiny cache, prefill in chunks"
SETTINGS = {
    QUICK: Setting({}, block_size=BLOCK_SIZE, num_blocks=54, max_num_batched_tokens=128),
    "stock": Setting(None, block_size=BLOCK_SIZE, num_blocks=80),
    "prefill in one": Setting({}, block_size=BLOCK_SIZE, num_blocks=60, chunked=False),
    "exact jumps": Setting(
        {"jump_mode": "exact"},
        block_size=BLOCK_SIZE,
        num_blocks=52,
    ),
}
SHORT, LONG = random_program(4, requests(24)), random_program(5, requests(150))


@pytest.fixture(scope="module")
def references(start_mla) -> Callable[[Program], References]:
    """What stock answers without a cache, each program played once."""
    known: dict[int, References] = {}

    def reference(program: Program) -> References:
        if id(program) not in known:
            setting = Setting(None, caching=False, async_scheduling=False, block_size=BLOCK_SIZE)
            engine = start_for(start_mla, setting)
            with decoding_one_by_one(engine.scheduler):
                narrowed = play(engine, program, None, give_up=False)
            stock = play(engine, program, narrowed.prompts, give_up=False)
            known[id(program)] = References(narrowed, stock)
        return known[id(program)]

    return reference


def start_for(start_mla, setting: Setting) -> Engine:
    engine = start_mla(setting.plugin, **setting.engine_args)
    setting.prepare(engine)
    return engine


def check_answers(start_mla, program: Program, want: Played, got: Played) -> None:
    """Fail on any difference but a near tie of two tokens."""
    found = list(differences(program, want, got))
    if found:
        judge = start_mla(**JUDGE)
        gaps = [gap(judge, one) for one in found]
        real = [
            f"{far} apart\n{one}" for one, far in zip(found, gaps, strict=True) if far > NEAR_TIE
        ]
        assert not real, f"{len(real)} requests got another answer:\n" + "\n\n".join(real[:3])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else slow) for name in SETTINGS]
)
def test_every_request_gets_the_answer_it_gets_without_a_cache(start_mla, references, name):
    setting, program = SETTINGS[name], SHORT if name == QUICK else LONG
    known = references(program)
    engine = start_for(start_mla, setting)
    got = play(engine, program, known.narrowed.prompts)
    check_answers(start_mla, program, known.expected_by(setting, program), got)
    if setting.plugin is not None:
        assert got.counts["aborts"] > 0 and got.counts["partial hits"] > requests(8)
        assert got.counts["preemptions"] > 0
        assert got.counts["forced tokens"] > 20 or not setting.is_canonical
