"""Tokens of reused segments that are computed because they deviate most: which these are, against
the values that transformers computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sgl_vllm.approximate import deviation
from sgl_vllm.approximate.chunk_rows import Room
from sgl_vllm.approximate.deviation import SecondLayer, WindowChooser, WindowsToChoose
from sgl_vllm.approximate.plan import MIN_TOKENS, Reuse
from sgl_vllm.approximate.reuse import _move, _Planned
from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.tokens import pack
from tests.effort import examples
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


def num_windows(intervals: Sequence[tuple[int, int]], share: float) -> int:
    """How many windows have the share of all intervals together."""
    return math.ceil(sum(math.ceil(share * (end - start)) for start, end in intervals) / SIZE)


def first_windows(intervals: Sequence[tuple[int, int]], share: float) -> list[int]:
    """Where the first windows of each interval begin that have the share of it and of those before
    it."""
    starts: list[int] = []
    for number, (start, _) in enumerate(intervals, 1):
        num_more = num_windows(intervals[:number], share) - len(starts)
        starts += range(start, start + SIZE * num_more, SIZE)
    return starts


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
    assert len(starts) == num_windows(intervals, share)
    num_prompt = len(prompt.tokens(engine))
    assert num_reused == sum(end - start for start, end in intervals) - SIZE * len(starts)
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
    most = sorted(deviation, key=deviation.__getitem__, reverse=True)[: len(starts)]
    assert starts == sorted(most)
    assert starts != first_windows(intervals, share)


def test_the_first_ones_are_computed_where_no_pass_finds_others(fresh, monkeypatch) -> None:
    """Such as without memory for it. The engine goes on."""

    def fails(self, prompt_token_ids, positions):
        raise torch.OutOfMemoryError("no memory")

    engine, prompt = fresh, Prompt((C, A, D, B))
    monkeypatch.setattr(SecondLayer, "values", fails)
    intervals = reused_intervals(engine, prompt)
    starts, (_, num_segments) = computed_windows(engine, prompt)
    assert num_segments == 4
    assert starts == first_windows(intervals, 0.15)
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
    outputs = ask(engine, asked_about(orders, 5), reuse=True, max_tokens=6)
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


@st.composite
def moves(draw):
    """What a request has yet to reuse, and the room that its passes have."""
    position, left = 1, []
    for _ in range(draw(st.integers(1, 6))):
        start = position + draw(st.integers(0, 20))
        num_tokens = draw(st.integers(64, 300))
        num_chosen = draw(st.integers(0, num_tokens - MIN_TOKENS))
        position = start + num_tokens
        left.append(Reuse(start, position, 7, tuple(range(20)), num_chosen))
    rooms = st.tuples(st.integers(-1, 60), st.integers(2, 2000))
    return left, draw(st.lists(rooms, min_size=40, max_size=40))


@settings(max_examples=examples(300), deadline=None)
@given(moves())
def test_each_token_is_copied_or_computed_whatever_room_there_is(move) -> None:
    left, rooms = move
    chosen_of = {reuse.end: reuse.num_chosen for reuse in left}
    first, last = left[0].start, left[-1].end
    planned = _Planned(None, [*left])
    position, computed, copied = first, set(), set()
    for num_rows, max_tokens in rooms:
        if not planned.left:
            break
        if position < planned.left[0].start:  # the request's own row
            computed |= {*range(position, planned.left[0].start)}
            position = planned.left[0].start
        scheduler = SimpleNamespace(
            running=[None],
            max_num_scheduled_tokens=max_tokens,
            max_num_running_reqs=num_rows + 1,
            kv_holding_waiting=(),
        )
        position = _move(planned, Room(scheduler, ()), 32)
        rows = [*planned.chunks, *planned.windows]
        assert len(rows) <= max(num_rows, 0)
        assert sum(chunk.num_tokens for chunk in rows) <= max_tokens // 2
        again = sum(window.num_tokens for window in planned.windows)
        assert again >= sum(one.num_chosen for one in planned.to_copy)
        assert len({window.num_tokens for window in planned.windows}) <= 1
        assert not (planned.windows and planned.left)
        for reuse in planned.to_copy:
            assert reuse.num_tokens >= MIN_TOKENS
            assert reuse.num_chosen in (0, chosen_of[reuse.end])
            copied |= {*range(reuse.start, reuse.end)}
        computed |= {token for chunk in planned.chunks for token in range(*chunk)}
        planned.chunks, planned.windows, planned.to_copy = [], [], []
    assert not planned.left and position == last
    assert computed.isdisjoint(copied) and computed | copied == {*range(first, last)}


def test_a_layer_that_does_more_than_its_pass_is_not_stopped_in_it(fresh) -> None:
    """vLLM's offloading puts a layer's weights into place before its pass, and takes them away
    after it. A pass that ended within would leave them there."""
    runner = fresh.core.model_executor.driver_worker.worker.model_runner
    layer = runner.get_model().model.layers[0]
    layer.forward = layer.forward
    try:
        with pytest.raises(ValueError, match="offloaded"):
            SecondLayer(runner, fresh.scheduler.kv_cache_manager.block_size)
    finally:
        del layer.forward


def test_after_some_failures_no_pass_is_tried(fresh, monkeypatch) -> None:
    engine, tries = fresh, []

    def fails(self, prompt_token_ids, positions):
        tries.append(len(positions))
        raise torch.OutOfMemoryError("no memory")

    worker = engine.core.model_executor.driver_worker.worker
    monkeypatch.setattr(SecondLayer, "values", fails)
    chooser = WindowChooser(SecondLayer(worker.model_runner, 32))
    row = SimpleNamespace(req_id="row")
    output = SimpleNamespace(scheduled_new_reqs=[row])
    deviation.send(
        output, [WindowsToChoose([1] * 70, [Reuse(1, 65, 0, (0, 0, 0), 9)], ["row"], 16)]
    )
    for _ in range(5):
        chooser.move_rows(output)
    assert len(tries) == 3 and vars(row) == {"req_id": "row"}


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
    outputs = ask(engine, asked_about(orders, 3), reuse=True, max_tokens=6)
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
