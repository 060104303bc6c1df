"""Tokens of reused segments that are computed because they deviate most: which these are, against
the values that transformers computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vllm.approximate.deviation import SecondLayer
from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.tokens import pack
from tests.engine.approximate_prompts import Prompt, ask, document, finish, reused, whole_blocks
from tests.engine.engine import Engine, greedy
from tests.engine.window_models import random_model, save

A, B, C, D = (document(number, num_sentences=20) for number in range(4))
PLUGIN = {"approximate_reuse": True, "approximate_choice": "deviating"}
SIZE, SAMPLE_EVERY = 16, 4


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start(plugin=PLUGIN, max_num_seqs=64)


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    """The engine with an empty cache, which has computed the segments in one order."""
    assert engine.scheduler.reset_prefix_cache()
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    engine.scheduler.parts.approximate.recompute = 0.15
    engine.reset_counts()
    return engine


def reused_intervals(engine: Engine, prompt: Prompt) -> list[tuple[int, int]]:
    """The whole segments, but for what the cache has of the first one and a token after that."""
    (num_hit,) = engine.scheduler.parts.radix.hit_lengths(
        CacheNamespace(None, None), [pack(prompt.tokens(engine))]
    )
    head, *segments, _ = map(len, prompt.pieces(engine))
    intervals, position = [], head
    for length in segments:
        intervals.append((max(position, num_hit + 1), position + length))
        position += length
    return intervals


def asked_about(orders: Sequence[tuple[str, ...]], num_questions: int) -> list[Prompt]:
    """All orders with the first question, then all with the next one."""
    questions = [f"Is it {number}?" for number in range(num_questions)]
    return [Prompt(order, question=question) for question in questions for order in orders]


def computed_windows(engine: Engine, prompt: Prompt) -> tuple[list[int], tuple[int, int]]:
    """Where the windows begin that are computed for a prompt, and what its flag tells."""
    starts: list[int] = []
    execute = engine.core.model_executor.execute_model

    def noting(scheduler_output, **kwargs):
        result = execute(scheduler_output, **kwargs)
        for row in scheduler_output.scheduled_new_reqs:
            if " chunk " in row.req_id:
                assert scheduler_output.num_scheduled_tokens[row.req_id] == SIZE
                starts.append(row.num_computed_tokens)
        return result

    engine.core.model_executor.execute_model = noting
    (output,) = ask(engine, [prompt], reuse=True, max_tokens=1)
    engine.core.model_executor.execute_model = execute
    return sorted(starts), reused(output)


def second_values(token_ids: Sequence[int]) -> torch.Tensor:
    """The second layer's values as transformers computes them, shape (tokens, numbers)."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    found = []
    model.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, args, output: found.append(output[0])
    )
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    return found[0]


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
def test_those_are_computed_that_deviate_most(fresh, share) -> None:
    engine = fresh
    engine.scheduler.parts.approximate.recompute = share
    before, prompt = Prompt((A, B, C, D)), Prompt((C, A, D, B))
    intervals = reused_intervals(engine, prompt)
    num_hit = intervals[0][0] - 1
    engine.reset_counts()
    starts, (num_reused, num_segments) = computed_windows(engine, prompt)
    assert num_segments == 4 and engine.forward_passes == 2
    num_windows = sum(
        math.ceil(math.ceil(share * (end - start)) / SIZE) for start, end in intervals
    )
    assert len(starts) == num_windows
    num_prompt = len(prompt.tokens(engine))
    assert num_reused == sum(end - start for start, end in intervals) - SIZE * num_windows
    assert engine.computed_tokens == num_prompt - num_hit - num_reused

    values = second_values(prompt.tokens(engine))
    donor_values = second_values(before.tokens(engine))
    head, a, b, c, d, _ = map(len, before.pieces(engine))
    ends_before = [head + a + b + c, head + a, head + a + b + c + d, head + a + b]
    deviation = {}
    for (start, end), end_before in zip(intervals, ends_before, strict=True):
        shift = end_before - end
        for window in [*range(start, end - SIZE, SIZE), end - SIZE]:
            first = start + -(-(window - start) // SAMPLE_EVERY) * SAMPLE_EVERY
            deviation[window] = sum(
                float((values[at] - donor_values[at + shift]).square().sum())
                for at in range(first, window + SIZE, SAMPLE_EVERY)
            )
    most = sorted(deviation, key=deviation.__getitem__, reverse=True)[:num_windows]
    assert starts == sorted(most)
    first_ones = [
        window for start, _ in intervals for window in range(start, start + SIZE * 9, SIZE)
    ]
    assert share < 0.15 or {*starts} - {*first_ones}


def test_the_first_ones_are_computed_where_no_pass_finds_others(fresh, monkeypatch) -> None:
    """Such as without memory for it. The engine goes on."""

    def fails(self, prompt_token_ids, positions):
        raise torch.OutOfMemoryError("no memory")

    engine, prompt = fresh, Prompt((C, A, D, B))
    monkeypatch.setattr(SecondLayer, "values", fails)
    intervals = reused_intervals(engine, prompt)
    starts, (_, num_segments) = computed_windows(engine, prompt)
    assert num_segments == 4
    assert starts == sorted(
        start + SIZE * number
        for start, end in intervals
        for number in range(math.ceil(math.ceil(0.15 * (end - start)) / SIZE))
    )
    engine.check_nothing_is_left()


def test_a_share_of_all_is_exact(fresh) -> None:
    engine = fresh
    engine.scheduler.parts.approximate.recompute = 1.0
    (output,) = ask(engine, [Prompt((C, A, D, B))], reuse=True)
    assert reused(output) == (0, 0)


def test_the_first_layers_kv_is_exact_and_others_come_closer(fresh) -> None:
    """Windows write the KV of their tokens over the copied one."""
    engine, prompt = fresh, Prompt((C, A, D, B))

    def contents(share: float) -> list[torch.Tensor]:
        assert engine.scheduler.reset_prefix_cache()
        engine.scheduler.parts.approximate.recompute = share
        ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
        return whole_blocks(engine, prompt, reuse=True)[1]

    exact, half, none = contents(1.0), contents(0.5), contents(0.0)
    torch.testing.assert_close(half[0], exact[0], atol=2e-4, rtol=2e-4)
    for of_half, of_none, of_exact in zip(half[1:], none[1:], exact[1:], strict=True):
        assert (of_half - of_exact).norm() < 0.8 * (of_none - of_exact).norm()


def test_many_at_once_leave_nothing(fresh) -> None:
    engine = fresh
    orders = [(C, A, D, B), (D, C, B, A), (B, A, D), (C, B)]
    prompts = [
        Prompt(order, question=f"Is it {number}?") for number in range(5) for order in orders
    ]
    outputs = ask(engine, prompts, reuse=True, max_tokens=6)
    assert [reused(output)[1] for output in outputs] == [4, 4, 3, 2] * 5
    engine.check_nothing_is_left()


def test_a_request_that_is_aborted_leaves_nothing(fresh) -> None:
    engine, prompt = fresh, Prompt((C, A, D, B))
    for num_steps in range(4):
        params = greedy(4, extra_args=prompt.extra_args(reuse=True))
        engine.llm.llm_engine.add_request("one", prompt.as_prompt(engine), params)
        for _ in range(num_steps):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(["one"])
        finish(engine)
        engine.check_nothing_is_left()


# -- engines of their own


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 9])
def test_where_rows_are_scarce_first_tokens_are_computed(start, max_num_seqs) -> None:
    engine = start(plugin=PLUGIN, max_num_seqs=max_num_seqs)
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    orders = [(C, A, D, B), (D, C, B, A), (B, A, D, C)]
    for order in orders:
        (output,) = ask(engine, [Prompt(order)], reuse=True, max_tokens=1)
        num_reused, num_segments = reused(output)
        assert num_segments == 4
        num_tokens = sum(len(engine.encode(text)) for text in order)
        # A window may have more tokens than are to be computed.
        assert 0.85 * num_tokens - 4 * 32 <= num_reused < 0.87 * num_tokens
    prompts = [
        Prompt(order, question=f"Is it {number}?") for number in range(3) for order in orders
    ]
    outputs = ask(engine, prompts, reuse=True, max_tokens=6)
    assert [reused(output)[1] for output in outputs] == [4] * 9
    engine.check_nothing_is_left()


def test_a_prompt_may_be_longer_than_a_pass(start) -> None:
    engine = start(plugin=PLUGIN, max_num_seqs=64, max_num_batched_tokens=128)
    before, prompt = Prompt((A, B, C, D)), Prompt((C, A, D, B))
    ask(engine, [before], reuse=False, max_tokens=1)
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    token_ids = prompt.tokens(engine)
    positions = torch.arange(0, len(token_ids), 3)
    values = SecondLayer(runner, engine.scheduler.kv_cache_manager.block_size).values(
        token_ids, positions
    )
    torch.testing.assert_close(
        values.flatten(1), second_values(token_ids)[positions], atol=1e-4, rtol=1e-4
    )
    (output,) = ask(engine, [prompt], reuse=True)
    assert reused(output)[1] == 4


def test_a_model_of_one_layer_computes_first_tokens(start, tmp_path) -> None:
    model = random_model("llama", {"num_hidden_layers": 1, "head_dim": 32}).to(torch.float32)
    engine = start(plugin=PLUGIN, model=save(model, tmp_path / "model"))
    assert not engine.scheduler.parts.approximate.deviating
    ask(engine, [Prompt((A, B))], reuse=False)
    (output,) = ask(engine, [Prompt((B, A))], reuse=True)
    assert reused(output)[1] == 2
