"""Jump-forward while the next step is in flight: the real asynchronous scheduler, and no model.

What every request must get is what the synchronous scheduler gives it, one after the other and
without jumps, where forced text may only be spelled canonically.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sgl_vllm.jump.jump import JumpCounters, JumpForward
from sgl_vllm.jump.resumption import JumpedRequests
from tests.engine.late import MAX_MODEL_LEN, Answer, LateCore, Runner, V1Runner, V2Runner
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_pressure import PATTERNS
from tools.engine_harness.kv_memory import WrongKvError

RUNNERS = (V1Runner, V2Runner)
CARD = PATTERNS[0]
WHOLE = "Nothing is left to decide here"


@dataclass(frozen=True)
class Job:
    name: str
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


def params(pattern: str | None = None, max_tokens: int = 60, **more: Any) -> SamplingParams:
    if pattern is not None:
        more["structured_outputs"] = StructuredOutputsParams(regex=pattern)
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def mixed_jobs(count: int, seed: int) -> list[Job]:
    """Prompts share beginnings cut at any token; of each five requests one has no grammar."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(10, 2000) for _ in range(150)] for _ in range(3)]
    jobs = []
    for number in range(count):
        prompt = rng.choice(trunks)[: rng.randrange(1, 150)]
        prompt = prompt + [rng.randrange(10, 2000) for _ in range(rng.randrange(8))]
        pattern = rng.choice([*PATTERNS, WHOLE]) if number % 5 else None
        length = rng.choice([1, 7, 17, 60, 200])
        more: dict[str, Any] = rng.choice(
            [
                {},
                {},
                {"ignore_eos": True},
                {"stop_token_ids": rng.sample(range(30, 2000), 100)},
                {"min_tokens": min(length, 12)},
                {"presence_penalty": 0.5},  # does not jump
                {"extra_args": {"sgl_report": 1}},
            ]
        )
        options = {"priority": rng.randrange(3), "cache_salt": rng.choice([None, None, "tenant"])}
        jobs.append(Job(f"job {number}", prompt, params(pattern, length, **more), options))
    return jobs


def wanted(jobs: list[Job]) -> dict[str, Answer]:
    """Stock's answers, one job after the other, with forced text spelled canonically."""
    core = LateCore(stock=True, async_scheduling=False, max_num_seqs=1)
    with decoding_one_by_one(core.scheduler):
        for job in jobs:
            core.send(job.name, job.prompt, job.params, **job.options)
        core.finish()
    return core.answers


def without_report(answer: Answer) -> tuple[list[int], str | None, int | str | None]:
    return answer.tokens, answer.finish_reason, answer.stop_reason


def serve(core: LateCore, jobs: list[Job], disturb: random.Random | None = None) -> set[str]:
    """All jobs, a few more every step; with `disturb`, some are aborted on the way, and the cache
    is reset. Returns the names of the aborted ones."""
    waiting, aborted = list(reversed(jobs)), set()
    num_steps = 0
    while waiting or core.is_busy:
        for _ in range(min(len(waiting), random.Random(num_steps).randrange(3))):
            job = waiting.pop()
            core.send(job.name, job.prompt, job.params, **job.options)
        core.advance()
        num_steps += 1
        assert num_steps < 50_000
        alive = [name for name in core.answers if name in core.scheduler.requests]
        if disturb is not None and alive and disturb.random() < 0.05:
            name = disturb.choice(alive)
            aborted.add(name)
            if disturb.random() < 0.5:
                core.aborts_queue.put([name])  # while a step is in flight
            else:
                core.abort_requests([name])
        if disturb is not None and disturb.random() < 0.02:
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.check_nothing_is_left()
    return aborted


def check(
    answers: dict[str, Answer], want: dict[str, Answer], aborted: Collection[str] = frozenset()
):
    for name, answer in answers.items():
        if name in aborted and answer.finish_reason is None:
            assert answer.tokens == want[name].tokens[: len(answer.tokens)]
        else:
            assert without_report(answer) == without_report(want[name]), name


def jump_counts(core: LateCore) -> JumpCounters:
    counts: JumpCounters = core.scheduler.sgl_vllm.stats().jump_forward
    assert counts.errors == 0
    return counts


SHAPES = [
    # block size, blocks, at once, tokens a step, policy
    (16, 400, 16, 512, "fcfs"),
    (16, 17, 16, 48, "fcfs"),
    (128, 3, 16, 512, "fcfs"),
    (128, 6, 4, 64, "priority"),
]


def with_continuations(
    jobs: list[Job], answers: dict[str, Answer]
) -> tuple[list[Job], dict[str, Answer]]:
    """And again as many jobs that go on where another's answer ends, on what it has left."""
    again = [
        dataclasses.replace(
            job, name=f"{job.name} again", prompt=[*job.prompt, *answers[job.name].tokens, 7]
        )
        for job in jobs
        if len(job.prompt) + len(answers[job.name].tokens) < MAX_MODEL_LEN - 60
    ]
    return [*jobs, *again], answers | wanted(again)


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    """Half of the jobs go on where another's answer ends, on what that has left in the cache."""
    jobs = mixed_jobs(50, seed=1)
    return with_continuations(jobs, wanted(jobs))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
    for seed in range(2):
        core = LateCore(**settings)
        aborted = serve(core, jobs, random.Random(seed))
        assert aborted
        check(core.answers, answers, aborted)
        jump_counts(core)


# -- what a jump costs and saves -------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_jump_wastes_one_row_at_most_and_saves_a_pass_for_every_other_token(runner, pattern):
    passes, answers = {}, {}
    for jumps in (True, False):
        core = LateCore({"jump_forward": jumps}, runner=runner)
        core.send("one", [70, 71, 72], params(pattern))
        core.finish()
        passes[jumps], answers[jumps] = core.runner.num_passes, core.answers["one"]
        if jumps:
            counts = jump_counts(core)
    num_tokens = len(answers[True].tokens)
    num_in_flight_at_end = passes[True] + counts.forced_tokens - num_tokens
    assert counts.stale_tokens <= num_in_flight_at_end <= counts.stale_tokens + 1
    assert counts.stale_tokens <= counts.jumps
    assert passes[True] < passes[False] / 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_text_with_nothing_to_decide_takes_one_pass(runner):
    core = LateCore(runner=runner)
    core.send("one", [70, 71, 72], params(WHOLE))
    core.finish()
    assert core.runner.num_passes <= 2  # the second was in flight when the first ended it
    assert core.answers["one"].finish_reason == "stop"
    assert jump_counts(core).jumps == 1


# -- given up, paused, stuck -----------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("reset", [False, True], ids=["abort", "reset"])
def test_a_request_can_be_interrupted_at_any_time(runner, reset):
    job = Job("one", [*range(40, 90)], params(CARD))
    whole = wanted([job])["one"]
    for num_steps in range(24):
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


@pytest.mark.parametrize("runner", RUNNERS)
def test_it_is_the_release_of_a_waiting_request_that_gets_them_on(runner, monkeypatch):
    """Four prompts fill the cache, and all jump over the ends of their blocks in the same step."""
    pattern = "[a-z] is what we asked for, and [a-z] is what we got"
    jobs = [
        Job(f"job {n}", [*range(100 * n + 10, 100 * n + 73)], params(pattern)) for n in range(4)
    ]
    settings: dict[str, Any] = {"runner": runner, "num_blocks": 8, "block_size": 32}

    def standstill() -> LateCore:
        core = LateCore(**settings)
        for job in jobs:
            core.send(job.name, job.prompt, job.params)
        core.finish(max_steps=200)
        return core

    core = standstill()
    check(core.answers, wanted(jobs))
    assert jump_counts(core).released_when_stuck > 0
    monkeypatch.setattr(JumpedRequests, "release_one_if_stuck", lambda *_: None)
    with pytest.raises(AssertionError):
        standstill()


# -- beside others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("shape", [(16, 400), (16, 30), (128, 5)], ids=str)
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


def keep_what_is_sampled_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JumpForward, "_drop_in_flight", lambda *_: None)


def keep_the_slot_of_the_stale_token(patch: pytest.MonkeyPatch) -> None:
    drop = JumpForward._drop_in_flight

    def and_count_it_as_computed(self, request):
        was_in_flight = request.num_output_placeholders
        drop(self, request)
        request.num_computed_tokens += was_in_flight

    patch.setattr(JumpForward, "_drop_in_flight", and_count_it_as_computed)


def keep_the_placeholder(patch: pytest.MonkeyPatch) -> None:
    drop = JumpForward._drop_in_flight

    def and_undo(self, request):
        num_placeholders = request.num_output_placeholders
        drop(self, request)
        request.num_output_placeholders = num_placeholders

    patch.setattr(JumpForward, "_drop_in_flight", and_undo)


def deliver_what_is_stale(patch: pytest.MonkeyPatch) -> None:
    drop = JumpForward._drop_in_flight

    def and_undo(self, request):
        drop(self, request)
        request.drop_stale_output = False

    patch.setattr(JumpForward, "_drop_in_flight", and_undo)


def leave_the_prompt_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JumpedRequests, "rewrite_resumed", lambda *_: None)


def count_the_output_from_the_first_prompt(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict):
        def __setitem__(self, *_):
            pass

    init = JumpedRequests.__init__

    def and_forget(self, *args):
        init(self, *args)
        self._num_as_prompt = Forgetful()

    patch.setattr(JumpedRequests, "__init__", and_forget)


def say_that_it_is_the_v1_runner(patch: pytest.MonkeyPatch) -> None:
    rewrite = JumpedRequests.rewrite_resumed

    def on_v1(self, scheduled):
        self._scheduler.use_v2_model_runner = False
        rewrite(self, scheduled)
        self._scheduler.use_v2_model_runner = True

    patch.setattr(JumpedRequests, "rewrite_resumed", on_v1)


MISTAKES = [
    (keep_what_is_sampled_in_flight, RUNNERS),
    (keep_the_slot_of_the_stale_token, RUNNERS),
    (keep_the_placeholder, RUNNERS),
    (deliver_what_is_stale, RUNNERS),
    (leave_the_prompt_as_it_is, [V1Runner]),
    (count_the_output_from_the_first_prompt, [V1Runner]),
    (say_that_it_is_the_v1_runner, [V2Runner]),
]


@pytest.mark.parametrize(
    ("mistake", "runner"),
    [(mistake, runner) for mistake, runners in MISTAKES for runner in runners],
)
def test_a_mistake_is_noticed(want, mistake, runner: type[Runner], monkeypatch):
    jobs, answers = want
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError, RuntimeError, WrongKvError)):
        core = LateCore(runner=runner, block_size=16, num_blocks=17, max_num_batched_tokens=48)
        aborted = serve(core, jobs, random.Random(0))
        check(core.answers, answers, aborted)
