"""Random requests for an engine without a model, and what each must get from it.

They share beginnings cut at any token, some of them jump over forced text, and some go on where
another's answer ends.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager

from sgl_vllm.jump.counters import JumpCounters
from tests.engine.late import MAX_MODEL_LEN, Answer, LateCore
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_pressure import PATTERNS

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
                {"presence_penalty": 0.5},
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


def serve_without_checks(core: LateCore, jobs: list[Job]) -> None:
    for job in jobs:
        core.send(job.name, job.prompt, job.params, **job.options)
    for _ in range(20_000):
        if not core.is_busy:
            break
        core.advance()


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


def cached_tokens(core: LateCore, prompt: list[int], length: int = 1) -> int:
    """How many tokens a request finds that runs alone."""
    name, counters = f"{len(core.answers)}", core.scheduler.sgl_vllm.stats().radix
    core.send(name, prompt, params(max_tokens=length, ignore_eos=True))
    core.finish()
    return core.scheduler.sgl_vllm.stats().radix.hit_tokens - counters.hit_tokens


def common_prefix(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def leave_copies_out(patch: pytest.MonkeyPatch) -> None:
    """Of blocks, before a pass: what vLLM copies for hits that end inside a block."""
    patch.setattr(
        KVCacheManager, "take_kv_cache_block_copies", lambda manager: ([], _endpoints(manager))
    )


def _endpoints(manager: KVCacheManager) -> list[Any]:
    groups = manager.coordinator.single_type_managers
    return [block for one in groups for pair in one.take_pending_cow_copies() for block in pair]
