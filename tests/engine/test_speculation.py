"""Radix, jumps and select beside speculative decoding: hits lose at most the token that a drafter
reads ahead, and scores and jumps are as without. The drafters are those of the demo model, and
layers for multi-token prediction: of GLM-4.5, DeepSeek V3 (MLA) and K-EXAONE (windows).

`test_programs.py` compares the answers to random programs.

On another platform (`tests/platforms`) the drafters are those of its model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.models import write_shape_model
from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.radix.part import layer_specs
from sgl_vllm.speculation import NO_DRAFTING
from sgl_vllm.vllm_api.versions import release_of
from tests.effort import requests, some_nightly
from tests.engine import mtp_models
from tests.engine.drafters import NUM_DRAFTS, counting_drafts, speculation, why_it_cannot_run
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.programs import CARD, LETTER
from tests.engine.soak_models import MODELS, SINCE_0_32
from tests.engine.test_self_check import with_every_request
from tests.platforms.platform import chosen

METHODS = ("ngram", "draft_model", "eagle", "eagle3")
READ_AHEAD = ("eagle", "eagle3", "mtp")
"""Methods whose drafters have read one token further than a match."""

nightly = (pytest.mark.nightly, pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def start_drafting(request, start, tmp_path_factory) -> Callable[..., Engine]:
    """`start_drafting(method, plugin={...})` starts an engine like `start`, with speculation.

    Skips the test if vLLM cannot run the method on this platform.
    """
    platform = chosen(request.config)
    folder = tmp_path_factory.mktemp("drafters")

    def start_engine(
        method: str, plugin: dict[str, Any] | None, of: str = "demo", **engine_args: Any
    ) -> Engine:
        if reason := why_it_cannot_run(method, platform):
            pytest.skip(reason)
        config = speculation(method, folder, model=of, is_async=platform.is_async)
        engine: Engine = start(plugin=plugin, speculative_config=config, **engine_args)
        assert engine.is_async == platform.is_async
        return engine

    return start_engine


# -- hits -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """An engine with all parts beside a method, for a model of so many layers."""

    method: str
    engine: Engine
    num_layers: int = 4

    @property
    def lookahead(self) -> int:
        return int(self.method in READ_AHEAD)


@pytest.fixture(
    scope="module", params=[*METHODS, *some_nightly(mtp_models.CONFIGS, ["glm4_moe"], nightly)]
)
def drafting(request, start_drafting, tmp_path_factory) -> Iterator[Drafting]:
    if request.param in METHODS:
        yield Drafting(
            request.param, start_drafting(request.param, {}, num_gpu_blocks_override=200)
        )
        return
    if request.param in SINCE_0_32 and release_of(vllm.__version__) < (0, 32):
        pytest.skip("vLLM 0.31 cannot run it")
    with pytest.MonkeyPatch.context() as patch:
        model = MODELS[request.param](tmp_path_factory.mktemp("models") / request.param, patch)
        arguments = {**model.engine_args, "num_gpu_blocks_override": 400}
        engine = start_drafting("mtp", {}, request.param, **arguments)
        yield Drafting("mtp", engine, mtp_models.NUM_LAYERS)


def num_cached(engine: Engine, prompt: list[int], max_tokens: int = 1) -> int:
    cached = engine.run([Ask(prompt, greedy(max_tokens))])[0].num_cached_tokens
    assert cached is not None
    return cached


@pytest.mark.parametrize("num_shared", [1, 31, 32, 33, 64, 227])
def test_a_hit_loses_only_what_the_drafter_has_read_ahead(drafting, num_shared):
    engine = drafting.engine
    assert engine.llm.reset_prefix_cache()
    shared = words(num_shared, seed=num_shared)
    engine.run([Ask([*shared, *words(40, seed=1)], greedy())])
    cached = num_cached(engine, [*shared, *words(40, seed=2)])
    assert cached == num_shared - drafting.lookahead


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_token(drafting):
    engine = drafting.engine
    prompt = words(100, seed=5)
    for max_tokens in (1, 8):
        engine.run([Ask([*prompt, 7], greedy(max_tokens))])
    assert num_cached(engine, prompt) == 99


def test_a_reply_is_found_to_its_last_accepted_token(drafting):
    engine = drafting.engine
    assert engine.llm.reset_prefix_cache()
    prompt = engine.encode("Tell me a story, and then tell me the same story again: ")
    with counting_drafts(engine) as drafts:
        reply = list(engine.run([Ask(prompt, greedy(40))])[0].outputs[0].token_ids)
    assert drafts["drafts"] > drafts["accepted"] > 0 or drafting.method == "draft_model"
    cached = num_cached(engine, [*prompt, *reply, *words(20, seed=3)])
    # The last token of a reply is computed only if it was a draft.
    num_final = len(prompt) + len(reply) - drafting.lookahead
    assert cached in (num_final - 1, num_final)


@pytest.mark.parametrize("num_shared", [40, 47, 64, 65])
def test_the_kv_after_a_hit_is_that_of_the_whole_prompt(drafting, num_shared):
    """In the layers of the model and of its drafter, to the last token."""
    engine = drafting.engine
    cold, warm = kv_cold_and_warm(engine, num_shared)
    torch.testing.assert_close(warm, cold, rtol=1e-3, atol=1e-3)


def test_the_drafter_has_read_one_token_further_than_the_match(drafting, monkeypatch):
    """Why a hit ends one token before it."""
    if drafting.method not in READ_AHEAD:
        pytest.skip("it has not")
    monkeypatch.setattr(drafting.engine.scheduler.parts.radix.lookup, "drafting", NO_DRAFTING)
    cold, warm = kv_cold_and_warm(drafting.engine, 47)
    of_model = slice(drafting.num_layers)
    torch.testing.assert_close(warm[of_model], cold[of_model], rtol=1e-3, atol=1e-3)
    assert len(warm) > drafting.num_layers
    assert not any(
        torch.allclose(one, other, rtol=1e-3, atol=1e-3)
        for one, other in zip(warm[of_model.stop :], cold[of_model.stop :], strict=True)
    )


def test_a_drafter_with_smaller_keys_shares_the_models_blocks(start, tmp_path):
    """vLLM's scheduler sees a group of layers like the model's first. The drafter's differ."""
    stock = start()
    vocab_size = stock.scheduler.vllm_config.model_config.get_vocab_size()
    asks = [Ask([*words(100), *words(9, seed=seed)], greedy(12)) for seed in range(1, 5)]
    want = [stock.tokens([ask]) for ask in asks]
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
    }
    write_shape_model(shape, tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": NUM_DRAFTS}
    engine = start({}, num_gpu_blocks_override=200, speculative_config=drafts)
    [specs] = layer_specs(engine.scheduler.kv_cache_config)
    assert len({spec.page_size_bytes for spec in specs}) == 2
    [group] = engine.scheduler.kv_cache_config.kv_cache_groups
    assert group.kv_cache_spec.page_size_bytes == max(spec.page_size_bytes for spec in specs)
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    assert num_cached(engine, [*words(100), 7]) == 0
    assert num_cached(engine, [*words(100), 8]) == 100
    assert [engine.tokens([ask]) for ask in asks] == want
    engine.check_nothing_is_left()


def kv_cold_and_warm(
    engine: Engine, num_shared: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The KV of a prompt that begins like an earlier one, without and with a cache."""
    assert engine.llm.reset_prefix_cache()
    shared = words(num_shared, seed=1)
    prompt = [*shared, *words(100 - num_shared, seed=2)]
    cold = kv_of(engine, prompt)
    assert engine.llm.reset_prefix_cache()
    engine.run([Ask([*shared, *words(30, seed=3)], greedy(5))])
    hits = engine.scheduler.parts.radix.counters.hit_tokens
    warm = kv_of(engine, prompt)
    assert engine.scheduler.parts.radix.counters.hit_tokens - hits >= num_shared - 1
    return cold, warm


def kv_of(engine: Engine, prompt: list[int]) -> list[torch.Tensor]:
    """What the cache holds of the full blocks of a prompt, layer by layer. Of layers with windows,
    the blocks that these still reach."""
    llm, scheduler = engine.llm.llm_engine, engine.scheduler
    llm.add_request("seen", {"prompt_token_ids": prompt}, greedy(9))
    llm.step()
    (request_id,) = scheduler.requests
    layers = scheduler.vllm_config.compilation_config.static_forward_context
    groups = scheduler.kv_cache_config.kv_cache_groups
    blocks = scheduler.kv_cache_manager.get_blocks(request_id).blocks
    kv = []
    for group, of_group in zip(groups, blocks, strict=True):
        full = of_group[: len(prompt) // group.kv_cache_spec.block_size]
        block_ids = [block.block_id for block in full if not block.is_null]
        kv += [layers[name].kv_cache[block_ids].clone() for name in group.layer_names]
    llm.abort_request(["seen"])
    engine.settle()
    return kv


# -- select ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_scored", [1, 5])
def test_scores_on_a_cached_prefix_are_stocks(drafting, num_scored):
    engine = drafting.engine
    assert engine.llm.reset_prefix_cache()
    prefix = words(150, seed=9)
    prompts = [[*prefix, *words(num_scored, seed=20 + n)] for n in range(requests(4))]
    whole = {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 0}
    want = engine.run([Ask(prompt, SamplingParams(**whole)) for prompt in prompts])
    engine.run([Ask(prefix, greedy())])
    engine.reset_counts()
    scored = SamplingParams(**whole, extra_args={SCORE_FROM: len(prefix)})
    got = [engine.run([Ask(prompt, scored)])[0] for prompt in prompts]
    assert [one.num_cached_tokens for one in got] == [len(prefix) - 1] * len(prompts)
    for prompt, one, other in zip(prompts, got, want, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for place in range(1, num_scored + 1):
            row, wanted = one.prompt_logprobs[-place], other.prompt_logprobs[-place]
            token = prompt[-place]
            assert row[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


# -- jumps ----------------------------------------------------------------------------------------


def passes_of(engine: Engine, asks: list[Ask]) -> tuple[int, list[list[int]]]:
    engine.reset_counts()
    replies = [list(engine.run([ask])[0].outputs[0].token_ids) for ask in asks]
    return engine.forward_passes, replies


EXAMPLES = {
    CARD: '{"city": "Berlin", "continent": "Europe", "people": 36}',
    LETTER: "Dear Anna, thank you for your letter of March the 3th.",
}


def constrained(engine: Engine) -> list[Ask]:
    """Each prompt has an example of its format, in which n-grams find drafts."""
    return [
        Ask(
            engine.encode(f"{EXAMPLES[regex]} Number {number}: "),
            SamplingParams(
                temperature=0,
                max_tokens=80,
                structured_outputs=StructuredOutputsParams(regex=regex),
            ),
        )
        for number in range(4)
        for regex in (CARD, LETTER)
    ]


@pytest.fixture(scope="module")
def without_drafts(start) -> tuple[int, list[list[int]]]:
    engine = start(plugin={})
    return passes_of(engine, constrained(engine))


@pytest.mark.parametrize(
    "method", ["ngram", "eagle", "eagle3", pytest.param("draft_model", marks=nightly)]
)
def test_drafts_beside_jumps_change_nothing_and_never_cost_a_pass(
    start_drafting, without_drafts, method
):
    """A request that jumps drops its drafts, and gets new ones after the forced tokens."""
    engine = start_drafting(method, plugin={})
    with counting_drafts(engine) as drafts:
        passes, replies = passes_of(engine, constrained(engine))
    jumps = engine.scheduler.sgl_vllm.stats().jump_forward
    assert jumps.jumps >= len(replies) and not jumps.errors
    assert drafts["drafts"] > 0
    assert (passes <= without_drafts[0], replies) == (True, without_drafts[1])
    engine.check_nothing_is_left()


@pytest.mark.parametrize("method", ["ngram", pytest.param("eagle", marks=nightly)])
def test_exact_jumps_take_no_more_passes_than_drafts_alone(start_drafting, method):
    """Drafts that are as long as a forced run are verified instead."""
    stock = start_drafting(method, plugin=None)
    if stock.is_async:
        pytest.skip("the drafts of the pass in flight are not known when a request jumps")
    most_passes, want = passes_of(stock, constrained(stock))
    engine = start_drafting(method, plugin={"jump_mode": "exact"})
    passes, replies = passes_of(engine, constrained(engine))
    assert engine.scheduler.sgl_vllm.stats().jump_forward.jumps > 0
    assert (passes <= most_passes, replies) == (True, want)
    engine.check_nothing_is_left()


def test_a_pass_that_waited_verifies_no_drafts(start_drafting):
    """vLLM would not mask what follows them."""
    engine = start_drafting("eagle", plugin={})
    if not engine.is_async:
        pytest.skip("no pass waits for one in flight")
    scheduler = engine.scheduler
    schedule, counters = scheduler.schedule, scheduler.parts.jump.counters
    after_waiting: list[dict[str, list[int]]] = []
    num_held = 0

    def recording(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_held
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens and counters.held_passes > num_held:
            num_held = counters.held_passes
            after_waiting.append(output.scheduled_spec_decode_tokens)
        return output

    scheduler.schedule = recording
    passes_of(engine, constrained(engine))
    assert after_waiting and not any(after_waiting)


# -- the self-check -------------------------------------------------------------------------------


@with_every_request
@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(method, marks=nightly) for method in METHODS[1:])]
)
def test_the_self_check_runs_with_drafts_and_finds_no_difference(
    start_drafting, method, tmp_path, monkeypatch
):
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    engine = start_drafting(method, plugin={"self_check": "on"}, num_gpu_blocks_override=200)
    assert engine.scheduler.parts.plan.runs
    assert set(engine.scheduler.parts.states().values()) == {"on"}
