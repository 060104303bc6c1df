"""Jumped requests hold blocks while they wait, and vLLM preempts only running requests: the engine
must go on even if they fill the cache."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState

from tests.effort import requests
from tests.engine.engine import Engine
from tests.engine.one_by_one import decoding_one_by_one

pytestmark = pytest.mark.platforms

MAX_MODEL_LEN = 256
PATTERNS = [
    r'\{"the name of the city": "[A-Z][a-z]{2,5}", "the people who live there, in millions": [0-9]'
    r', "seen with my own eyes": (true|false)\}',
    r"[a-z]{3} is what we asked for, and [a-z]{2} is what we got in the end, after all of this",
    r"The answer to your question is [a-z ]{3,9}\. Nothing more can be said about it\.",
]


@dataclass(frozen=True)
class Job:
    name: str
    prompt: list[int]
    pattern: str
    max_tokens: int
    priority: int


def jobs(block_size: int, count: int, seed: int) -> list[Job]:
    """Prompts that end just before a block does, so that what is forced needs the next one."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        num_blocks = rng.randint(1, 160 // block_size)
        length = num_blocks * block_size - rng.randrange(6)
        prompt = [rng.randrange(10, 2000) for _ in range(length)]
        made.append(
            Job(
                f"job {number}",
                prompt,
                rng.choice(PATTERNS),
                rng.choice([17, 60, 80]),
                rng.randrange(3),
            )
        )
    return made


@dataclass
class Run:
    num_steps: int = 0
    answers: dict[str, tuple[list[int], str | None]] = field(default_factory=dict)
    partial: dict[str, list[int]] = field(default_factory=dict)
    """The output of aborted requests up to then."""


def run(engine: Engine, todo: list[Job], max_steps: int, disturb: random.Random | None) -> Run:
    """All jobs at once, each step; with `disturb`, some are aborted and preempted on the way."""
    llm, scheduler = engine.llm.llm_engine, engine.scheduler
    by_priority = scheduler.policy.value == "priority"
    done = Run()
    for job in todo:
        grammar = StructuredOutputsParams(regex=job.pattern)
        params = SamplingParams(
            temperature=0, max_tokens=job.max_tokens, structured_outputs=grammar
        )
        llm.add_request(
            job.name,
            {"prompt_token_ids": job.prompt},
            params,
            priority=job.priority if by_priority else 0,
        )
    so_far: dict[str, list[int]] = {job.name: [] for job in todo}
    while llm.has_unfinished_requests():
        done.num_steps += 1
        assert done.num_steps <= max_steps, describe(engine)
        for output in llm.step():
            sample = output.outputs[0]
            so_far[output.request_id] = list(sample.token_ids)
            if output.finished:
                done.answers[output.request_id] = so_far.pop(output.request_id), sample.text
        if disturb is None:
            continue
        if so_far and disturb.random() < 0.05:
            name = disturb.choice(list(so_far))
            llm.abort_request([name])
            done.partial[name] = so_far.pop(name)
        if scheduler.running and disturb.random() < 0.1:
            victim = disturb.choice(scheduler.running)
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
        if disturb.random() < 0.02:
            try:
                assert engine.core.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError:  # blocks are loaded or sent
                assert engine.scheduler.connector is not None
    llm.step()  # lets the runner forget what was given up last
    if engine.scheduler.connector is not None:
        engine.settle()
    engine.check_nothing_is_left()
    return done


def describe(engine: Engine) -> str:
    scheduler = engine.scheduler
    lines = [
        f"{request.request_id} {request.status.name}, {request.num_computed_tokens} of "
        f"{request.num_tokens} tokens computed"
        for request in scheduler.requests.values()
    ]
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return "\n".join([f"{free} free blocks", *lines])


SHAPES = [
    # block size, blocks, at once, chunked, policy
    (32, 9, 4, True, "fcfs"),
    (32, 12, 16, True, "priority"),
    (128, 3, 4, False, "fcfs"),
    pytest.param((32, 9, 16, False, "fcfs"), marks=pytest.mark.slow),
    pytest.param((128, 3, 16, True, "priority"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def want(start) -> dict[int, Run]:
    """By block size: what the jobs get one after the other."""
    engine = start(async_scheduling=False, max_model_len=MAX_MODEL_LEN)
    with decoding_one_by_one(engine.scheduler):
        return {size: run(engine, jobs(size, 24, seed=size), 10_000, None) for size in (32, 128)}


def start_tiny(
    start, block_size, num_blocks, at_once, chunked, policy, *, plugin=None, **engine_args
) -> Engine:
    engine: Engine = start(
        plugin=plugin or {},
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=at_once,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=64 if chunked else 512,
        scheduling_policy=policy,
        **engine_args,
    )
    engine.core.structured_output_manager._use_async_grammar_compilation = False
    return engine


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_end_with_the_right_answer_in_bounded_time(start, want, shape):
    block_size = shape[0]
    todo = jobs(block_size, 24, seed=block_size)
    wanted = want[block_size].answers
    num_tokens = sum(len(tokens) for tokens, _ in wanted.values())
    engine = start_tiny(start, *shape)
    # One after the other, a token at a time, they would take more steps than there are tokens.
    assert run(engine, todo, num_tokens // 3, None).answers == wanted
    num_disturbed = requests(4)
    for seed in range(num_disturbed):
        disturbed = run(engine, todo, num_tokens, random.Random(seed))
        assert disturbed.answers == {name: wanted[name] for name in disturbed.answers}
        assert len(disturbed.answers) + len(disturbed.partial) == len(todo)
        for name, tokens in disturbed.partial.items():
            assert tokens == wanted[name][0][: len(tokens)]
    stats = engine.scheduler.sgl_vllm.stats().jump_forward
    assert stats.forced_tokens > 160 * (1 + num_disturbed)
    assert stats.errors == 0


def test_it_is_the_release_of_a_waiting_request_that_gets_them_on(start, monkeypatch):
    """Four prompts fill the cache, and all jump over the ends of their blocks in the same step."""
    pattern = "[a-z] is what we asked for, and [a-z] is what we got"
    standstill = [
        Job(f"job {n}", [*range(100 * n + 10, 100 * n + 73)], pattern, 60, 0) for n in range(4)
    ]
    shape = (32, 9, 4, False, "fcfs")
    engine = start_tiny(start, *shape)
    wanted = run(engine, standstill, 50, None).answers
    alone = {}
    for job in standstill:
        alone.update(run(engine, [job], 50, None).answers)
    assert wanted == alone
    assert engine.scheduler.sgl_vllm.stats().jump_forward.released_when_stuck > 0
    engine = start_tiny(start, *shape)
    monkeypatch.setattr(engine.scheduler.parts.jump.jumped, "release_one_if_stuck", lambda _: None)
    with pytest.raises(AssertionError, match="0 free blocks"):
        run(engine, standstill, 50, None)


def test_a_paused_engine_releases_nobody(start):
    engine = start_tiny(start, *SHAPES[0])
    llm, scheduler = engine.llm.llm_engine, engine.scheduler
    grammar = StructuredOutputsParams(regex=PATTERNS[1])
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar)
    llm.add_request("one", {"prompt_token_ids": [70, 71]}, params)
    while not scheduler.kv_holding_waiting:
        llm.step()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.schedule()
    assert len(scheduler.kv_holding_waiting) == 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    while llm.has_unfinished_requests():
        llm.step()
    engine.check_nothing_is_left()
