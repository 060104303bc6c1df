"""Radix, jumps and select beside multi-token prediction: the answers are stock vLLM's without
speculation; hits lose at most the token that the MTP layer reads ahead. The models are GLM-4.5,
DeepSeek V3 (MLA) and K-EXAONE (sliding windows, in the MTP layer too), small and random, with a
layer that is often right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm

from sgl_vllm.speculation import NO_DRAFTING
from sgl_vllm.vllm_api.versions import release_of
from tests.effort import requests, some_slow
from tests.engine.drafters import NUM_DRAFTS, for_speculation
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.mla_model import BLOCK_SIZE, allow_prefix_caching
from tests.engine.mtp_models import CONFIGS, NUM_LAYERS, engine_args, write_model
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.play import REFERENCE, References, Setting, play
from tests.engine.programs import random_program
from tests.engine.test_self_check import with_every_request
from tests.engine.test_speculation import counting_drafts, kv_cold_and_warm, num_cached
from tests.engine.ties import check_answers

PROGRAM = for_speculation(random_program(seed=30, num_calls=requests(45)))
slow = (pytest.mark.slow, pytest.mark.timeout(600))
TINY = {"glm4_moe": (32, 27), "deepseek_v3": (BLOCK_SIZE, 54), "exaone_moe": (32, 45)}
"""Tokens of a block, and blocks of a cache that holds hardly more than the longest request, if its
prompt is computed in chunks."""
PREFILL_IN_ONE = {"exaone_moe": 80}
"""Blocks that the longest request takes otherwise, where window layers keep its whole prompt."""
SETTINGS = {
    "tiny cache, prefill in chunks": Setting({}, max_num_batched_tokens=96),
    "exact jumps": Setting({"jump_mode": "exact"}),
    "stock": Setting(None),
}
QUICK = "tiny cache, prefill in chunks"


@dataclass(frozen=True)
class Model:
    """A model, and an engine for it: `start(plugin, **engine_args)`."""

    kind: str
    start: Callable[..., Engine]

    def start_for(self, setting: Setting, num_drafts: int = 0) -> Engine:
        engine = self.start(setting.plugin, num_drafts, **setting.engine_args)
        setting.prepare(engine)
        return engine


@pytest.fixture(scope="module", params=some_slow(CONFIGS, ["glm4_moe"], slow))
def model(request, start, tmp_path_factory) -> Iterator[Model]:
    if request.param == "exaone_moe" and release_of(vllm.__version__) < (0, 32):
        pytest.skip("vLLM 0.31 cannot read the windows of the configuration that is written here")
    folder: Path = tmp_path_factory.mktemp("models") / request.param
    arguments = engine_args(request.param, write_model(request.param, folder))

    def start_engine(
        plugin: dict[str, Any] | None = None, num_drafts: int = 0, **more: Any
    ) -> Engine:
        # A drafter does not take over the model's backend.
        backend = {name: arguments[name] for name in {"attention_backend"} & arguments.keys()}
        drafts = {"method": "mtp", "num_speculative_tokens": num_drafts, **backend}
        speculation = {"speculative_config": drafts} if num_drafts else {}
        return start(plugin, **{**arguments, **speculation, **more})

    with pytest.MonkeyPatch.context() as patch:
        allow_prefix_caching(patch)
        yield Model(request.param, start_engine)


# -- the same answers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(model) -> References:
    """Without speculation and without a cache."""
    engine = model.start_for(replace(REFERENCE, block_size=TINY[model.kind][0]))
    with decoding_one_by_one(engine.scheduler):
        narrowed = play(engine, PROGRAM, None, give_up=False)
    return References(narrowed, play(engine, PROGRAM, narrowed.prompts, give_up=False))


@with_every_request
@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [
        (QUICK, 1),
        (QUICK, NUM_DRAFTS),
        pytest.param("exact jumps", NUM_DRAFTS, marks=slow),
        pytest.param("stock", 1, marks=slow),
    ],
)
def test_every_request_gets_the_answer_it_gets_without_speculation(
    model, references, name, num_drafts
):
    block_size, num_blocks = TINY[model.kind]
    if name != QUICK:
        num_blocks = PREFILL_IN_ONE.get(model.kind, num_blocks)
    setting = replace(SETTINGS[name], block_size=block_size, num_blocks=num_blocks)
    engine = model.start_for(setting, num_drafts)
    with counting_drafts(engine) as drafts:
        got = play(engine, PROGRAM, references.narrowed.prompts)
    assert drafts["accepted"] > requests(20)
    assert drafts["drafts"] - drafts["accepted"] > requests(20)
    if setting.plugin is not None:
        assert set(engine.scheduler.parts.states().values()) == {"on"}
        assert got.counts["partial hits"] > requests(10)
        assert got.counts["select scores"] > 0 and got.counts["aborts"] > 0
        assert got.counts["forced tokens"] > requests(50) or not setting.is_canonical
    check_answers(model.start, PROGRAM, references.expected_by(setting, PROGRAM), got)


# -- hits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(model) -> Engine:
    """An engine with all parts, with room for all that a test computes."""
    return model.start({}, NUM_DRAFTS, num_gpu_blocks_override=400)


@pytest.mark.parametrize("num_shared", [1, 33, 64, 227])
def test_a_hit_loses_only_what_the_layer_has_read_ahead(drafting, num_shared):
    assert drafting.llm.reset_prefix_cache()
    shared = words(num_shared, seed=num_shared)
    drafting.run([Ask([*shared, *words(40, seed=1)], greedy())])
    assert num_cached(drafting, [*shared, *words(40, seed=2)]) == num_shared - 1


def test_a_reply_is_found_to_its_last_accepted_token(drafting):
    assert drafting.llm.reset_prefix_cache()
    prompt = words(50, seed=4)
    with counting_drafts(drafting) as drafts:
        reply = list(drafting.run([Ask(prompt, greedy(40))])[0].outputs[0].token_ids)
    assert drafts["drafts"] > drafts["accepted"] > 0
    # The last token of a reply is computed only if it was a draft.
    cached = num_cached(drafting, [*prompt, *reply, *words(20, seed=3)])
    assert len(prompt) + len(reply) - 2 <= cached <= len(prompt) + len(reply) - 1


@pytest.mark.parametrize("num_shared", [47, 64])
def test_the_kv_after_a_hit_is_that_of_the_whole_prompt(drafting, num_shared):
    """In the layers of the model and in that of MTP, to the last token."""
    cold, warm = kv_cold_and_warm(drafting, num_shared)
    assert len(cold) == NUM_LAYERS + 1
    torch.testing.assert_close(warm, cold, rtol=1e-3, atol=1e-3)


def test_the_layer_has_read_one_token_further_than_the_match(drafting, monkeypatch):
    """Why a hit ends one token before it."""
    monkeypatch.setattr(drafting.scheduler.parts.radix, "drafting", NO_DRAFTING)
    cold, warm = kv_cold_and_warm(drafting, 47)
    torch.testing.assert_close(warm[:NUM_LAYERS], cold[:NUM_LAYERS], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(warm[NUM_LAYERS], cold[NUM_LAYERS], rtol=1e-3, atol=1e-3)


# -- the self-check -------------------------------------------------------------------------------


@with_every_request
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_self_check_runs_with_drafts_and_finds_no_difference(model, tmp_path, monkeypatch):
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    engine = model.start({"self_check": "on"}, NUM_DRAFTS, num_gpu_blocks_override=400)
    assert engine.scheduler.parts.plan.runs
    assert set(engine.scheduler.parts.states().values()) == {"on"}
