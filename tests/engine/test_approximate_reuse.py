"""Segments reused from another place: how much is computed, what the KV is, and that nothing of it
is ever a hit of an exact request."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.approximate.chunk_rows import Room
from sgl_vllm.approximate.copies import TurnedCopier
from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.radix.tokens import pack
from sgl_vllm.scheduler.fairness import DeficitCounters
from tests.effort import some_nightly
from tests.engine.approximate_prompts import (
    NAMESPACE,
    Prompt,
    ask,
    document,
    has_flag,
    kv_of,
    logprobs,
    num_computed,
    places,
    play,
    reused,
)
from tests.engine.engine import Engine, greedy, tokens_of
from tests.engine.models import random_model, save

A, B, C, D = (document(number) for number in range(4))
PLUGIN = {"approximate_reuse": True, "fsm": False, "jump_forward": False}


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start(plugin=PLUGIN)


# -- on one engine; the tests after these start others, which ends it


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    """The engine with an empty cache."""
    assert engine.scheduler.reset_prefix_cache()
    engine.scheduler.parts.approximate.recompute = 0.15
    engine.reset_counts()
    return engine


def test_each_share_computes_so_many_tokens(fresh) -> None:
    engine = fresh
    approximate = engine.scheduler.parts.approximate
    prompt = Prompt((C, A, B))
    for share in (0.0, 0.15, 0.5):
        assert engine.scheduler.reset_prefix_cache()
        approximate.recompute = share
        ask(engine, [Prompt((A, B, C))], reuse=False, max_tokens=1)
        # The exact hit is the head, and what all segments begin with.
        tokens = prompt.tokens(engine)
        (num_hit,) = engine.scheduler.parts.radix.hit_lengths(NAMESPACE, [pack(tokens)])
        engine.reset_counts()
        (output,) = ask(engine, [prompt], reuse=True, max_tokens=1)
        assert engine.computed_tokens == num_computed(engine, prompt, share, num_hit)
        assert reused(output) == (len(tokens) - num_hit - engine.computed_tokens, 3)
        assert engine.forward_passes == 2
        engine.check_nothing_is_left()


def test_who_asks_for_it_reuses_segments_of_the_same_tenant(fresh) -> None:
    engine = fresh
    ask(engine, [Prompt((A, B), salt="mine")], reuse=False)
    mine, yours = Prompt((B, A), salt="mine"), Prompt((B, A), salt="yours")
    (other,) = ask(engine, [yours], reuse=True)
    (own,) = ask(engine, [Prompt((B, A), question="Or is it?", salt="mine")], reuse=True)
    assert reused(own)[1] == 2
    (needs_all,) = ask(engine, [mine], reuse=True, prompt_logprobs=0)
    assert reused(other) == reused(needs_all) == (0, 0)
    (exact,) = ask(engine, [mine], reuse=False, max_tokens=1)
    assert not has_flag(exact)


def test_what_was_reused_is_never_a_hit(fresh) -> None:
    """The KV from the first reused token on, and the output after it, stays out of the tree: other
    requests with the same tokens compute them, and so does the same request again."""
    engine = fresh
    ask(engine, [Prompt((A, B, C))], reuse=False, max_tokens=1)
    prompt = Prompt((C, A, B))
    length = len(prompt.tokens(engine))
    (output,) = ask(engine, [prompt], reuse=True, max_tokens=40)
    head, c, a, b, _ = map(len, prompt.pieces(engine))
    first_reused = head + math.ceil(0.15 * c)
    again = prompt.tokens(engine) + tokens_of(output) + [7, 8]
    hits = engine.scheduler.parts.radix.hit_lengths(NAMESPACE, [pack(again)])
    assert hits == [first_reused]
    assert places(engine, prompt) == [
        head + a + b,
        head,
        head + a,
    ]  # nor is it a place to copy from
    engine.reset_counts()
    (exact,) = ask(engine, [prompt], reuse=False, max_tokens=40)
    assert engine.computed_tokens == length - first_reused + 39
    engine.check_nothing_is_left()
    assert engine.scheduler.reset_prefix_cache()
    (stock,) = ask(engine, [prompt], reuse=False, max_tokens=40)
    assert tokens_of(exact) == tokens_of(stock)


def test_a_segment_is_reused_in_part_where_its_end_is_evicted(fresh) -> None:
    engine = fresh
    long = document(9, num_sentences=24)
    prompt = Prompt((A, long))
    ask(engine, [prompt], reuse=False, max_tokens=2)  # the second step finds it in the tree
    radix = engine.scheduler.parts.radix
    tree, size = radix.tree, radix.block_size
    match = tree.match_prefix(NAMESPACE, pack(prompt.tokens(engine)))
    head, a, b, _ = map(len, prompt.pieces(engine))
    num_kept = (head + a + b // 2) // size  # whole blocks
    radix.pool._release_evicted(tree.evict_block(tree.block_ids(match, match.num_tokens)[num_kept]))
    (output,) = ask(engine, [Prompt((long, A))], reuse=True)
    kept_of_b = num_kept * size - head - a
    assert reused(output) == (kept_of_b - math.ceil(0.15 * b) + a - math.ceil(0.15 * a), 2)


def test_chunks_that_one_pass_computes_have_the_kv_of_a_pass_for_each(fresh, monkeypatch) -> None:
    """In all layers: each chunk reads those before it in the same pass."""
    engine = fresh
    prompt = Prompt((C, A, D, B))

    def computed() -> tuple[list[torch.Tensor], int]:
        assert engine.scheduler.reset_prefix_cache()
        ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
        engine.reset_counts()
        return kv_of(engine, prompt, reuse=True), engine.forward_passes

    together, num_passes = computed()
    monkeypatch.setattr(Room, "take", lambda self, chunk: False)
    one_by_one, num_single_passes = computed()
    assert num_single_passes == num_passes + 3
    for layer, expected in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(layer, expected, atol=1e-5, rtol=1e-5)


def test_a_request_that_is_aborted_leaves_nothing(fresh) -> None:
    engine = fresh
    ask(engine, [Prompt((A, B, C))], reuse=False)
    prompt = Prompt((C, B, A))
    for num_steps in range(1, 6):
        params = greedy(30, extra_args=prompt.extra_args(reuse=True))
        engine.begin("aborted", prompt.as_prompt(engine), params, num_steps)
        engine.llm.llm_engine.abort_request(["aborted"])
        engine.settle()
        engine.check_nothing_is_left()
        assert not engine.scheduler.parts.radix.pool.inexact
    assert engine.scheduler.reset_prefix_cache()


def test_a_preempted_request_is_computed_when_it_resumes(fresh) -> None:
    engine = fresh
    ask(engine, [Prompt((A, B, C))], reuse=False)
    prompt = Prompt((C, B, A))
    scheduler = engine.scheduler
    params = greedy(8, extra_args=prompt.extra_args(reuse=True))
    engine.begin("preempted", prompt.as_prompt(engine), params, num_steps=3)
    assert scheduler.parts.approximate.counters.tokens > 0
    engine.preempt(scheduler.running[0])
    assert not scheduler.parts.radix.pool.inexact
    output = engine.finish()["preempted"]
    (exact,) = ask(engine, [prompt], reuse=False, max_tokens=8)
    assert tokens_of(output) == tokens_of(exact)  # it had no output before
    engine.check_nothing_is_left()


@pytest.mark.parametrize(("max_num_seqs", "num_passes"), [(1, 5), (3, 3)])
def test_a_pass_has_as_many_chunks_as_rows_are_free(start, max_num_seqs, num_passes) -> None:
    engine = start(plugin=PLUGIN, max_num_seqs=max_num_seqs)
    prompt = Prompt((D, C, A, B))
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    engine.reset_counts()
    (output,) = ask(engine, [prompt], reuse=True, max_tokens=1)
    assert reused(output)[1] == 4 and engine.forward_passes == num_passes
    others = [Prompt((D, C, A, B), question=f"Is it {number}?") for number in range(6)]
    outputs = ask(engine, others, reuse=True, max_tokens=8)
    assert [reused(output)[1] for output in outputs] == [4] * 6
    engine.check_nothing_is_left()


@pytest.mark.parametrize("num_blocks", [40, pytest.param(24, marks=pytest.mark.slow)])
def test_exact_requests_beside_reusing_ones_get_stocks_answers(start, num_blocks) -> None:
    """Random programs of both kinds at once, in caches of which the smallest evict and preempt."""
    rng = random.Random(num_blocks)
    documents = [document(number, num_sentences=rng.randrange(4, 9)) for number in range(6)]

    def some() -> tuple[Prompt, bool]:
        chosen = tuple(rng.sample(documents, rng.randrange(1, 4)))
        return Prompt(chosen, question=f"Is it {rng.randrange(3)}?"), rng.random() < 0.5

    rounds = [
        ([some() for _ in range(rng.randrange(2, 7))], rng.randrange(1, 40)) for _ in range(6)
    ]
    arguments = {"num_gpu_blocks_override": num_blocks, "max_model_len": 640, "max_num_seqs": 6}
    stock = start(**arguments)
    wanted = [play(stock, [(one, False) for one, _ in prompts], n) for prompts, n in rounds]
    engine = start(plugin={**PLUGIN, "approximate_recompute": 0.1}, **arguments)
    num_reused = num_exact = 0
    for (prompts, max_tokens), stocks in zip(rounds, wanted, strict=True):
        outputs = play(engine, prompts, max_tokens)
        for (_, reuses), output, of_stock in zip(prompts, outputs, stocks, strict=True):
            if reuses:
                num_reused += reused(output)[1]
            else:
                assert not has_flag(output)
                assert tokens_of(output) == tokens_of(of_stock)
                num_exact += 1
        engine.check_nothing_is_left()
        assert not engine.scheduler.parts.radix.pool.inexact
    assert num_exact > 3 and num_reused > 3


def test_what_was_reused_is_no_hit_of_vllms_own_cache_either(start) -> None:
    """After an error, vLLM's own prefix cache takes over while a request runs that has reused."""
    engine = start(plugin=PLUGIN)
    prompt = Prompt((C, B, A))
    (exact,) = ask(engine, [prompt], reuse=False, max_tokens=60, logprobs=5)
    assert engine.scheduler.reset_prefix_cache()
    ask(engine, [Prompt((A, B, C))], reuse=False)
    params = greedy(60, extra_args=prompt.extra_args(reuse=True))
    engine.begin("running", prompt.as_prompt(engine), params, num_steps=6)
    assert engine.scheduler.parts.approximate.counters.segments == 3
    engine.scheduler.parts.radix.pool.switch_off("for the test")
    engine.finish()
    engine.reset_counts()
    (output,) = ask(engine, [prompt], reuse=True, max_tokens=60, logprobs=5)
    assert engine.computed_tokens == len(prompt.tokens(engine)) + 59
    assert reused(output) == (0, 0) and logprobs(output) == logprobs(exact)


def test_a_tenant_pays_for_all_that_is_computed(start, monkeypatch) -> None:
    engine = start(plugin={**PLUGIN, "schedule_fair_quantum": 1000})
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    charged: list[int] = []
    monkeypatch.setattr(DeficitCounters, "charge", lambda self, _, number: charged.append(number))
    engine.reset_counts()
    (output,) = ask(engine, [Prompt((D, C, A, B))], reuse=True, max_tokens=5)
    assert reused(output)[1] == 4 and sum(charged) == engine.computed_tokens


def test_chunks_are_computed_in_steps_in_which_others_jump(start) -> None:
    """Jumped requests resume in some of these steps, and the V2 runner keeps their rows."""
    engine = start(plugin={"approximate_reuse": True}, max_num_seqs=4)
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    regex = r'\{"slow": "(hare|owl)", "fast": "(hare|fox)", "old": "(newt|toad)"\}'
    formats = StructuredOutputsParams(regex=regex)
    prompt = Prompt((D, C, A, B))
    for num_before in range(0, 14, 2):
        for number in range(3):
            params = greedy(60, structured_outputs=formats)
            engine.begin(f"{number} of {num_before}", [*range(20, 60), number], params)
        outputs = [one for _ in range(num_before) for one in engine.llm.llm_engine.step()]
        params = greedy(4, extra_args=prompt.extra_args(reuse=True))
        engine.begin("reusing", prompt.as_prompt(engine), params)
        answers = {one.request_id: one for one in outputs if one.finished} | engine.finish()
        assert reused(answers.pop("reusing"))[1] == 4
        for answer in answers.values():
            assert re.match(regex, engine.tokenizer.decode(tokens_of(answer)))
        engine.check_nothing_is_left()
    assert engine.scheduler.parts.jump.counters.jumps > 20


# -- the KV itself


VOCAB_SIZE = AutoConfig.from_pretrained(MODEL_PATH).vocab_size
MODELS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "demo": None,
    "demo, bfloat16": None,
    "gptj, neighbors and a part of the dimensions": (
        "gptj",
        {
            "n_embd": 64,
            "n_layer": 3,
            "num_attention_heads": 2,
            "n_positions": 1024,
            "rotary_dim": 16,
            "vocab_size": VOCAB_SIZE + 64,  # ids that are no tokens
        },
    ),
}


@pytest.fixture(scope="module", params=some_nightly(MODELS, ["demo", [*MODELS][-1]]))
def model_engine(request, start, tmp_path_factory) -> Engine:
    model = MODELS[request.param]
    if model is None:
        is_half = "bfloat16" in request.param  # another layout on CPUs with AMX
        return start(plugin=PLUGIN, dtype="bfloat16" if is_half else "float32")
    path = save(random_model(*model).to(torch.float32), tmp_path_factory.mktemp("model") / "model")
    return start(plugin=PLUGIN, model=path)


def test_the_first_layers_kv_is_that_of_the_new_place(model_engine) -> None:
    """In the first layer, the KV of a token depends on the token and its position only. Raw blocks
    are compared, so the test knows nothing of how a block is laid out."""
    engine = model_engine
    assert engine.scheduler.parts.approximate is not None
    assert engine.scheduler.reset_prefix_cache()
    ask(engine, [Prompt((A, B, C))], reuse=False, max_tokens=1)
    prompt = Prompt((C, A, B), head="Read these now.\n")
    approximate = kv_of(engine, prompt, reuse=True)
    assert engine.scheduler.parts.approximate.counters.tokens > 200
    assert engine.scheduler.reset_prefix_cache()
    exact = kv_of(engine, prompt, reuse=False)
    assert len(approximate[0]) == len(exact[0]) >= 8
    tolerance = 2e-4 if exact[0].dtype == torch.float32 else 0.04
    torch.testing.assert_close(approximate[0], exact[0], atol=tolerance, rtol=tolerance)
    assert (approximate[-1] - exact[-1]).abs().max() > 0.1  # in the last layer it is approximate


def test_layers_without_known_positions_are_refused(start, tmp_path) -> None:
    path = save(
        random_model(
            "opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 2}
        ).to(torch.float32),
        tmp_path / "opt",
    )
    engine = start(plugin=PLUGIN, model=path)
    assert engine.scheduler.parts.approximate is None
    ask(engine, [Prompt((A, B))], reuse=False)
    (output,) = ask(engine, [Prompt((B, A))], reuse=True)
    assert not has_flag(output)


def test_a_device_that_copies_something_else_is_refused(start, monkeypatch) -> None:
    monkeypatch.setattr(TurnedCopier, "copy", lambda self, copies: None)
    assert start(plugin=PLUGIN).scheduler.parts.approximate is None
