"""Recurrent KV-cache groups in the real schedulers, and no model: what every pass reads is checked.

Each pass must find the state of a request exactly where vLLM's worker looks for it, after exactly
the tokens that the request has computed, and overwrites it. Full attention and windows are read
beside it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.engine_settings import HEADS, MLA
from sgl_vllm.radix.checkpoints import MIN_GAIN, Checkpoints
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.hit_copies import HitCopies
from sgl_vllm.radix.retention import Retention
from sgl_vllm.radix.tree import RadixTree
from tests.effort import by_turns, some_nightly
from tests.engine.jobs import (
    Job,
    cached_tokens,
    check,
    common_prefix,
    jump_counts,
    leave_copies_out,
    mixed_jobs,
    serve,
    serve_without_checks,
    wanted,
    with_continuations,
)
from tests.engine.kv_memory import WrongKvError
from tests.engine.late import MAX_MODEL_LEN, Answer, LateCore
from tests.engine.late_runners import Runner, V1Runner, V2Runner

LAYOUTS: dict[str, dict[str, Any]] = {
    "one group": {"num_recurrent_groups": 1},
    "qwen3-next": {"num_recurrent_groups": 3},
    "kimi linear": {"num_recurrent_groups": 3, "full_attention": MLA},
    "with a window": {"num_recurrent_groups": 1, "sliding_windows": (40,)},
    "with windows and chunks": {
        "num_recurrent_groups": 2,
        "sliding_windows": (9, 70),
        "attention_chunks": (24,),
    },
    "with a window that never ends": {
        "num_recurrent_groups": 1,
        "sliding_windows": (MAX_MODEL_LEN,),
        "full_attention": None,
    },
}
QUICK = ("kimi linear", "with a window")
SOME_SLOW = some_nightly(LAYOUTS, QUICK)
RUNNERS = [(V1Runner, False), (V1Runner, True), (V2Runner, True)]
TINY, ROOMY = (16, 60, 48, "fcfs"), (16, 1500, 512, "fcfs")
SHAPES = [
    # block size, blocks for three groups, tokens a step, policy
    pytest.param(TINY),
    pytest.param((4, 240, 100, "priority")),
    pytest.param(ROOMY),
    pytest.param((8, 130, 32, "fcfs"), marks=pytest.mark.slow),
    pytest.param((32, 40, 200, "priority"), marks=pytest.mark.slow),
]


def make_core(
    layout: str,
    shape: tuple[int, int, int, str] = ROOMY,
    runner: type[Runner] = V1Runner,
    is_async: bool = False,
) -> LateCore:
    block_size, num_blocks, max_tokens, policy = shape
    kinds = LAYOUTS[layout]
    num_others = len(kinds.get("sliding_windows", ())) + len(kinds.get("attention_chunks", ()))
    num_others += kinds.get("full_attention", HEADS) is not None
    core = LateCore(
        runner=runner,
        async_scheduling=is_async,
        block_size=block_size,
        num_blocks=num_blocks * (1 + num_others) // 2,
        max_num_batched_tokens=max_tokens,
        policy=policy,
        **kinds,
    )
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    """Half of the jobs go on where another's answer ends. Some are sent several times at once."""
    jobs = mixed_jobs(40, seed=5)
    jobs, answers = with_continuations(jobs, wanted(jobs))
    with_twins = []
    for number, job in enumerate(jobs):
        twins = [dataclasses.replace(job, name=f"{job.name} twin {n}") for n in range(number % 3)]
        with_twins += [job, *twins]
        answers |= {twin.name: answers[job.name] for twin in twins}
    return with_twins, answers


@pytest.fixture
def preempted(monkeypatch) -> list[str]:
    """The requests that were preempted, each time that they were."""
    names: list[str] = []
    preempt = Scheduler._preempt_request

    def and_note(self: Scheduler, request: Any, *args: Any, **more: Any) -> None:
        names.append(request.request_id)
        preempt(self, request, *args, **more)

    monkeypatch.setattr(Scheduler, "_preempt_request", and_note)
    return names


@pytest.mark.parametrize(
    ("layout", "shape", "runner", "is_async"), by_turns(SOME_SLOW, SHAPES, RUNNERS)
)
def test_every_request_gets_the_same_tokens(want, preempted, layout, runner, is_async, shape):
    """Jumps, preemptions, and with a seed also aborts and resets, some with a step in flight."""
    jobs, answers = want
    for seed in (None, 1):
        core = make_core(layout, shape, runner, is_async)
        disturb = random.Random(seed) if seed is not None else None
        aborted = serve(core, jobs, disturb)
        assert bool(aborted) == (disturb is not None)
        check(core.answers, answers, aborted)
        assert jump_counts(core).forced_tokens > 300
        counters = core.scheduler.sgl_vllm.stats().radix
        # In a small cache, there often is no room for the source of a copy.
        assert counters.partial_block_hits > (20 if shape == ROOMY else 0)
        assert counters.hit_tokens > 1000
        assert counters.checkpoints > 20
        if disturb is None:
            assert preempted if shape == TINY else shape != ROOMY or not preempted


# -- where hits end --------------------------------------------------------------------------------


class NotingRunner(V1Runner):
    """Notes after how many tokens of a request its passes end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ends: dict[str, list[int]] = {}

    def update(self, scheduled: SchedulerOutput) -> None:
        super().update(scheduled)
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            end = self.rows[request_id].num_computed + num_tokens
            self.ends.setdefault(request_id, []).append(end)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("layout", SOME_SLOW)
def test_with_room_for_all_every_hit_ends_at_the_last_state_left_behind(layout, block_size):
    """By a pass that ended with a block, at a branch or with the prompt, and by the last one. There
    are chats, and forks at any token of a prompt or an answer."""
    rng = random.Random(block_size)
    core = make_core(layout, (block_size, 8000, 64, "fcfs"), NotingRunner)
    assert isinstance(core.runner, NotingRunner)
    known: list[list[int]] = []
    states: set[tuple[int, ...]] = set()
    num_branches = 0
    for number in range(60):
        earlier = rng.choice(known)[: rng.randrange(1, 150)] if known else []
        prompt = earlier + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 60))]
        most = len(prompt) - 1
        last_state = max((n for n in range(1, most + 1) if tuple(prompt[:n]) in states), default=0)
        assert cached_tokens(core, prompt, rng.randrange(1, 12)) == last_state

        ends = core.runner.ends[str(number)]
        longest = max((common_prefix(prompt, one) for one in known), default=0)
        branch = min(longest, most)
        if branch - last_state >= MIN_GAIN:
            assert branch in ends
            num_branches += 1
        # The last token of an answer was never fed.
        computed = prompt + core.answers[str(number)].tokens[:-1]
        assert ends[-1] == len(computed)
        known.append(computed)
        kept = [end for end in ends if end <= len(prompt) or end % block_size == 0]
        states |= {tuple(computed[:end]) for end in [*kept, len(computed)]}
    assert num_branches > 1


@pytest.mark.parametrize(("runner", "is_async"), RUNNERS)
def test_a_conversation_goes_on_from_the_end_of_its_prompt_or_answer(runner, is_async):
    """Whatever the template makes of the answer."""
    core = make_core("qwen3-next", ROOMY, runner, is_async)
    prompt = [10 + place % 900 for place in range(101)]
    cached_tokens(core, prompt, length=9)
    answer = core.answers["0"].tokens
    assert cached_tokens(core, [*prompt, *answer, 7]) == 101 + 8
    assert cached_tokens(core, [*prompt, 5, 6]) == 101


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runner", "is_async"), RUNNERS)
@pytest.mark.parametrize("layout", SOME_SLOW)
@pytest.mark.parametrize(
    ("where", "num_calls"),
    [((RadixTree, "insert"), 60), ((Checkpoints, "finish"), 5), ((Groups, "states_of"), 90)],
    ids=lambda value: value if isinstance(value, int) else value[1],
)
def test_an_error_leaves_vllms_own_cache_to_serve(
    want, monkeypatch, where, num_calls, layout, runner, is_async
):
    """In the middle of everything."""
    jobs, answers = want
    owner, name = where
    step, calls = getattr(owner, name), 0

    def broken(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise RuntimeError("a bug")
        return step(*args, **more)

    monkeypatch.setattr(owner, name, broken)
    core = make_core(layout, TINY, runner, is_async)
    pool = core.scheduler.kv_cache_manager.block_pool
    num_blocks = pool.get_num_free_blocks()
    serve_without_checks(core, jobs)
    check(core.answers, answers)
    assert core.scheduler.parts.radix.tree is None
    assert pool.get_num_free_blocks() == num_blocks
    assert len(pool.cached_block_hash_to_block) > 0


# -- the test itself -------------------------------------------------------------------------------


def take_the_block_of_the_next_position(patch: pytest.MonkeyPatch) -> None:
    state_at = Groups.state_at
    patch.setattr(Groups, "state_at", lambda self, request, n: state_at(self, request, n + 1))


def keep_a_state_a_token_too_early(patch: pytest.MonkeyPatch) -> None:
    states_of = Groups.states_of

    def one_less(*args: Any) -> dict[int, list[int]]:
        return {position - 1: ids for position, ids in states_of(*args).items()}

    patch.setattr(Groups, "states_of", one_less)


def take_the_running_state_for_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Checkpoints, request: Any) -> None:
        position = request.num_computed_tokens
        blocks = self._groups.full_blocks[request.request_id]
        state = self._groups.state_at(request, position)
        assert state is not None
        self._pool.index(request, blocks, position, states={position: state})

    patch.setattr(Checkpoints, "finish", finish)


def copy_a_checkpoint_before_it_is_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HitCopies, "may_be_made", lambda *_: True)


def forget_the_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A request that ends has a state that a step in flight is going to change."""

    def states_left(self: Any, request: Any, state: Any, num_tokens: int) -> Any:
        return num_tokens, self._groups.states_of(request, state.num_with_states, num_tokens)

    patch.setattr(Retention, "_states_left", states_left)


MISTAKES: list[tuple[Callable[[pytest.MonkeyPatch], None], type[Exception]]] = [
    (leave_copies_out, WrongKvError),
    (keep_a_state_a_token_too_early, WrongKvError),
    (copy_a_checkpoint_before_it_is_made, WrongKvError),
    (forget_the_tokens_in_flight, WrongKvError),
    # The tree notices that it is given a block twice, and is off at the end.
    (take_the_block_of_the_next_position, AssertionError),
    (take_the_running_state_for_a_checkpoint, AssertionError),
]


@pytest.mark.parametrize(("mistake", "error"), MISTAKES)
@pytest.mark.parametrize("runner", [V1Runner, V2Runner])
def test_a_mistake_is_noticed(want, monkeypatch, mistake, error, runner):
    jobs, _ = want
    mistake(monkeypatch)
    with pytest.raises(error):
        for seed in range(3):
            core = make_core("qwen3-next", ROOMY, runner, is_async=True)
            serve(core, jobs, random.Random(seed))
