"""Radix, jumps and select beside speculative decoding: hits lose at most the token that a drafter
reads ahead, and scores and jumps are as without. The drafters are those of the demo model, and
layers for multi-token prediction: of GLM-4.5, DeepSeek V3 (MLA) and K-EXAONE (windows).

`test_programs.py` compares the answers to random programs, `test_jump_or_drafts.py` the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.models import write_shape_model
from sgl_vllm.radix.part import layer_specs
from sgl_vllm.speculation import NO_DRAFTING
from tests.engine.drafters import NUM_DRAFTS, counting_drafts, speculation, why_it_cannot_run
from tests.engine.engine import Ask, Engine, greedy, in_format, words
from tests.engine.models import MTP, MTP_LAYERS, starting
from tests.engine.programs import CARD, LETTER
from tests.platforms.platform import chosen

READ_AHEAD = ("eagle", "mtp")
"""Methods whose drafters have read one token further than a match."""

nightly = (pytest.mark.nightly, pytest.mark.timeout(600))
METHODS = [
    pytest.param("eagle", marks=pytest.mark.slow),
    *(pytest.param(name, marks=nightly) for name in ("ngram", "draft_model")),
]


@pytest.fixture(scope="module")
def start_drafting(request, start, tmp_path_factory) -> Callable[..., Engine]:
    """`start_drafting(method, plugin={...})` starts an engine like `start`, with speculation.

    Skips the test if vLLM cannot run the method on this platform.
    """
    platform = chosen(request.config)
    folder = tmp_path_factory.mktemp("drafters")

    def start_engine(
        method: str,
        plugin: dict[str, Any],
        of: str = "demo",
        start: Callable[..., Engine] = start,
        **engine_args: Any,
    ) -> Engine:
        if reason := why_it_cannot_run(method, platform):
            pytest.skip(reason)
        config = speculation(method, folder, model=of, is_async=platform.is_async)
        engine = start(plugin, speculative_config=config, **engine_args)
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
    scope="module", params=[*METHODS, *(pytest.param(name, marks=nightly) for name in MTP)]
)
def drafting(request, start, start_drafting, tmp_path_factory) -> Iterator[Drafting]:
    name = request.param
    if name not in MTP:
        yield Drafting(name, start_drafting(name, {}, num_gpu_blocks_override=200))
        return
    with starting(name, start, tmp_path_factory.mktemp("models")) as start_model:
        engine = start_drafting("mtp", {}, name, start_model, num_gpu_blocks_override=400)
        yield Drafting("mtp", engine, MTP_LAYERS)


def num_cached(engine: Engine, prompt: list[int], max_tokens: int = 1) -> int:
    cached = engine.run([Ask(prompt, greedy(max_tokens))])[0].num_cached_tokens
    assert cached is not None
    return cached


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


def test_the_kv_after_a_hit_is_that_of_the_whole_prompt(drafting):
    """In the layers of the model and of its drafter, to the last token."""
    for num_shared in (40, 47, 64, 65):
        cold, warm = kv_cold_and_warm(drafting.engine, num_shared)
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


@pytest.mark.slow
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
    cold = engine.kv_of(prompt, greedy(9))
    assert engine.llm.reset_prefix_cache()
    engine.run([Ask([*shared, *words(30, seed=3)], greedy(5))])
    hits = engine.scheduler.parts.radix.counters.hit_tokens
    warm = engine.kv_of(prompt, greedy(9))
    assert engine.scheduler.parts.radix.counters.hit_tokens - hits >= num_shared - 1
    return cold, warm


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
            in_format(80, {"regex": regex}),
        )
        for number in range(4)
        for regex in (CARD, LETTER)
    ]


@pytest.mark.slow
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


@pytest.mark.parametrize("method", METHODS)
def test_the_self_check_runs_with_drafts_and_finds_no_difference(
    start_drafting, method, tmp_path, monkeypatch
):
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    engine = start_drafting(method, plugin={"self_check": "on"}, num_gpu_blocks_override=200)
    assert engine.scheduler.parts.plan.runs
    assert set(engine.scheduler.parts.states().values()) == {"on"}
