"""Jump-forward while the next step is in flight: the real asynchronous scheduler, and no model.

What every request must get is what the synchronous scheduler gives it, one after the other and
without jumps, where forced text may only be spelled canonically.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sgl_vllm.jump import jump
from sgl_vllm.jump.jump import JumpForward
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.vllm_api.runners.runner import ForcedRow
from tests.effort import by_turns
from tests.engine.event_subscriber import watch
from tests.engine.jobs import (
    WHOLE,
    Job,
    check,
    jump_counts,
    mixed_jobs,
    params,
    serve,
    wanted,
    with_continuations,
)
from tests.engine.kv_memory import WrongKvError
from tests.engine.late import Answer, LateCore
from tests.engine.late_runners import Runner, V1Runner, V2Runner
from tests.engine.test_jump_pressure import PATTERNS

RUNNERS = (V2Runner, V1Runner)
CARD = PATTERNS[0]

SHAPES = [
    # block size, blocks, at once, tokens a step, policy
    pytest.param((16, 400, 16, 512, "fcfs")),
    pytest.param((16, 17, 16, 48, "fcfs")),
    pytest.param((128, 6, 4, 64, "priority")),
    pytest.param((128, 3, 16, 512, "fcfs")),
]


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    """Half of the jobs go on where another's answer ends, on what that has left in the cache."""
    jobs = mixed_jobs(50, seed=1)
    return with_continuations(jobs, wanted(jobs))


@pytest.mark.parametrize(("shape", "runner"), by_turns(SHAPES, [()], RUNNERS))
def test_every_request_gets_the_same_tokens(want, shape, runner):
    jobs, answers = want
    block_size, num_blocks, at_once, max_tokens, policy = shape
    settings = {
        "runner": runner,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": at_once,
        "max_num_batched_tokens": max_tokens,
        "policy": policy,
    }
    core = LateCore(**settings)
    assert isinstance(core.scheduler, AsyncScheduler)
    assert core.scheduler.sgl_vllm.stats().parts == dict.fromkeys(
        ("radix", "schedule", "fsm", "jump_forward", "select"), "on"
    )
    serve(core, jobs)
    check(core.answers, answers)
    counts = jump_counts(core)
    assert 0 < counts.stale_tokens <= counts.jumps
    assert counts.forced_tokens > 500
    core = LateCore(kv_events=True, **settings)
    watch(core)
    aborted = serve(core, jobs, random.Random(0))
    assert aborted
    check(core.answers, answers, aborted)
    jump_counts(core)


# -- what a jump costs and saves -------------------------------------------------------------------


ONE_AT_A_TIME = r"([0-9]x){12}"
MIXED = r"([0-9]x){4}: [a-z]{2}, [0-9] of 9\. This is where it ends, with [0-9] left over\."
"""Runs of one token, of two, and of more. A run too short for a jump is decoded, canonically."""


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pattern", [*PATTERNS, WHOLE, ONE_AT_A_TIME, MIXED])
def test_a_jump_wastes_one_row_at_most_and_saves_a_pass_for_every_other_token(runner, pattern):
    job = Job("one", [70, 71, 72], params(pattern))
    passes = {}
    for jumps in (True, False):
        core = LateCore({"jump_forward": jumps}, runner=runner)
        core.send(job.name, job.prompt, job.params)
        core.finish()
        passes[jumps] = core.runner.num_passes
        if jumps:
            counts, answer = jump_counts(core), core.answers["one"]
    assert answer == wanted([job])["one"]
    num_in_flight_at_end = passes[True] + counts.forced_tokens - len(answer.tokens)
    assert counts.stale_tokens <= num_in_flight_at_end <= counts.stale_tokens + 1
    assert counts.stale_tokens <= counts.jumps
    if pattern == ONE_AT_A_TIME:
        assert counts.stale_tokens == 0 and passes[True] <= passes[False]
    elif pattern == MIXED:
        assert counts.forced_tokens >= 3 * counts.jumps > 0 and passes[True] < passes[False]
    else:
        assert passes[True] < passes[False] / 2
    if pattern == WHOLE:
        assert passes[True] <= 2  # the second was in flight when the first ended it


# -- given up, paused, stuck -----------------------------------------------------------------------


@pytest.mark.parametrize(("runner", "first"), [(V1Runner, 0), (V2Runner, 1)])
@pytest.mark.parametrize("reset", [False, True], ids=["abort", "reset"])
def test_a_request_can_be_interrupted_at_any_time(runner, first, reset):
    job = Job("one", [*range(40, 90)], params(CARD))
    whole = wanted([job])["one"]
    for num_steps in range(first, 24, 2):
        core = LateCore(runner=runner, max_num_batched_tokens=32)
        core.send(job.name, job.prompt, job.params)
        core.send("other", [*range(30)], params(max_tokens=12))
        for _ in range(num_steps):
            core.advance()
        if reset:
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
            core.finish()
            assert core.answers["one"] == whole
        else:
            core.abort_requests(["one"])
            core.finish()
            assert core.answers["one"].tokens == whole.tokens[: len(core.answers["one"].tokens)]


# -- beside others ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "runner"), [((16, 400), V1Runner), ((16, 30), V2Runner), ((128, 5), V1Runner)]
)
def test_scores_are_those_of_the_whole_prompt_computed(runner, shape):
    """Beside requests that jump, in chunks and with a cache that does not hold them all."""
    block_size, num_blocks = shape
    rng = random.Random(5)
    prefix = [rng.randrange(10, 2000) for _ in range(120)]
    endings = [[rng.randrange(10, 2000) for _ in range(1 + n % 6)] for n in range(24)]

    def scoring(**more: Any) -> list[Job]:
        return [
            Job(f"score {n}", prefix + ending, params(max_tokens=1, prompt_logprobs=0, **more))
            for n, ending in enumerate(endings)
        ]

    plain = LateCore({"select": False}, async_scheduling=False)
    serve(plain, scoring())
    core = LateCore(
        runner=runner, block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=64
    )
    jobs = [*mixed_jobs(40, seed=9), *scoring(extra_args={"sgl_score_from": len(prefix)})]
    random.Random(1).shuffle(jobs)
    serve(core, jobs)
    for name, answer in plain.answers.items():
        num_scored = len(endings[int(name.split()[1])])
        assert answer.scores is not None
        assert core.answers[name].scores == answer.scores[-num_scored:]
        assert core.answers[name].tokens == answer.tokens
    assert core.scheduler.sgl_vllm.stats().select.scored_requests == len(endings)


@pytest.mark.parametrize("runner", RUNNERS)
def test_streaming_input_goes_on_as_it_does_without_them(runner):
    """It is resumed the same way, also while a step is in flight."""

    def with_sessions(core: LateCore, jobs: list[Job]) -> list[list[int]]:
        names = [f"session {n}" for n in range(4)]
        for number, name in enumerate(names):
            for part in range(3):
                prompt = [*range(10 + 30 * number, 20 + 30 * number + part)]
                core.send(name, prompt, params(max_tokens=3 + number), resumable=True)
            core.send(name, [1], params())
        serve(core, jobs)
        return [core.answers[name].tokens for name in names]

    alone = with_sessions(LateCore({"jump_forward": False}, async_scheduling=False), [])
    core = LateCore(runner=runner, block_size=16)
    assert with_sessions(core, mixed_jobs(30, seed=4)) == alone
    assert [len(tokens) for tokens in alone] == [9, 12, 15, 18]
    assert jump_counts(core).stale_tokens > 0


# -- the test itself -------------------------------------------------------------------------------


def count_the_stale_token(self, request, drop=JumpForward._drop_in_flight):
    """As computed: its slot is kept."""
    was_in_flight = request.num_output_placeholders
    drop(self, request)
    request.num_computed_tokens += was_in_flight


def send_all_but_the_last(output, rows, send=jump.send_forced):
    send(output, {name: ForcedRow(start, tokens[:-1]) for name, (start, tokens) in rows.items()})


MISTAKES = [
    # Blocks that the pass computes are copied; what is sampled in flight is kept.
    (RadixBlockPool, "may_be_copied", lambda *_: True, [V1Runner]),
    (JumpForward, "_drop_in_flight", lambda *_: None, RUNNERS),
    (JumpForward, "_drop_in_flight", count_the_stale_token, RUNNERS),
    (jump, "send_forced", lambda *_: None, RUNNERS),
    (jump, "send_forced", send_all_but_the_last, RUNNERS),
]


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "runner"),
    [(*mistake, runner) for *mistake, runners in MISTAKES for runner in runners],
)
def test_a_mistake_is_noticed(want, owner, name, mistake, runner: type[Runner], monkeypatch):
    jobs, answers = want
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises((AssertionError, KeyError, RuntimeError, WrongKvError)):
        core = LateCore(runner=runner, block_size=16, num_blocks=17, max_num_batched_tokens=48)
        aborted = serve(core, jobs, random.Random(0))
        check(core.answers, answers, aborted)
