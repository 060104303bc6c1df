"""Jumps in a cache that is too small for them: requests are preempted between a jump and the pass
that computes it. What a KV connector is told of them is consistent, and what it stores is right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from vllm.config import KVTransferConfig

from tests.effort import requests
from tests.engine import host_tiers, memory_connector
from tests.engine.engine import Ask, Engine, greedy, in_format, tokens_of, words
from tests.engine.memory_connector import STORE, behave
from tests.engine.one_by_one import decoding_one_by_one

pytestmark = pytest.mark.platforms

MAX_MODEL_LEN = 256
PATTERNS = [
    r'\{"the name of the city": "[A-Z][a-z]{2,5}", "the people who live there, in millions": [0-9]'
    r', "seen with my own eyes": (true|false)\}',
    r"[a-z]{3} is what we asked for, and [a-z]{2} is what we got in the end, after all of this",
    r"The answer to your question is [a-z ]{3,9}\. Nothing more can be said about it\.",
]
ENDS_FORCED = r"[a-z]{3} is what we asked for, and [a-z]{2} is what we got in the end, after all"
LONG_RUNS = (
    r"[a-z]{3} is what we asked for, and nobody in the whole city has ever seen anything like it "
    r"before or after, so that [a-z]{2} is what we got in the end, after all that we had been "
    r"through, and this is all that can ever be said about it in so many words as we have here"
)
"""The first forced run fills whole blocks; `max_tokens` ends the request inside the second."""
SHAPES = [
    # block size, blocks, at once, chunked, policy
    (32, 9, 4, True, "fcfs"),
    (32, 12, 16, True, "priority"),
    (32, 20, 16, False, "fcfs"),
]


@pytest.fixture(autouse=True)
def clean():
    behave()
    yield
    behave()
    STORE.clear()


@pytest.fixture(scope="module")
def want(start) -> Run:
    """What the jobs get one after the other, without a connector."""
    stock = start(async_scheduling=False, max_model_len=MAX_MODEL_LEN)
    with decoding_one_by_one(stock.scheduler):
        return run(stock, jobs(32, 24, seed=32), 10_000, None)


def offloading(tmp_path) -> KVTransferConfig:
    """vLLM's connector for host memory, and files below that: prompts and answers."""
    config = host_tiers.config(64 << 20, host_tiers.checked_files(tmp_path))
    config["kv_connector_extra_config"]["offload_prompt_only"] = False
    return KVTransferConfig(**config)


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
        params = in_format(job.max_tokens, {"regex": job.pattern})
        priority = job.priority if by_priority else 0
        llm.add_request(job.name, {"prompt_token_ids": job.prompt}, params, priority=priority)
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
            engine.preempt(disturb.choice(scheduler.running))
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


def test_requests_that_jump_over_the_ends_of_their_blocks_at_once_preempt_each_other(start):
    """Four prompts fill the cache."""
    pattern = "[a-z] is what we asked for, and [a-z] is what we got"
    together = [
        Job(f"job {n}", [*range(100 * n + 10, 100 * n + 73)], pattern, 60, 0) for n in range(4)
    ]
    engine = start_tiny(start, 32, 9, 4, False, "fcfs")
    wanted = run(engine, together, 50, None).answers
    alone = {}
    for job in together:
        alone.update(run(engine, [job], 50, None).answers)
    assert wanted == alone


# -- what a connector is told ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "load_steps"),
    [
        (SHAPES[1], 2),
        pytest.param(SHAPES[0], 0, marks=pytest.mark.slow),
        pytest.param(SHAPES[2], 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_get_the_right_answer_and_a_connector_hears_how_they_run_on(
    start, want, shape, load_steps
):
    """Once undisturbed, then with aborts, preemptions and resets of the cache. In the later rounds
    prompts are loaded."""
    config = KVTransferConfig(**memory_connector.WITNESS_CONFIG)
    engine = start_tiny(start, *shape, plugin={"tier_rule": "always"}, kv_transfer_config=config)
    behave(load_steps=load_steps, send_steps=2)
    todo = jobs(32, 24, seed=32)
    num_tokens = sum(len(tokens) for tokens, _ in want.answers.values())
    # One after the other, a token at a time, they would take more steps than there are tokens.
    assert run(engine, todo, num_tokens, None).answers == want.answers
    num_disturbed = requests(3)
    for seed in range(num_disturbed):
        disturbed = run(engine, todo, 20 * num_tokens, random.Random(seed))
        assert disturbed.answers == {name: want.answers[name] for name in disturbed.answers}
        assert len(disturbed.answers) + len(disturbed.partial) == len(todo)
        for name, tokens in disturbed.partial.items():
            assert tokens == want.answers[name][0][: len(tokens)]
    stats = engine.scheduler.sgl_vllm.stats().jump_forward
    assert stats.forced_tokens > 100 * (1 + num_disturbed)
    assert stats.errors == 0
    assert engine.scheduler.connector.num_several > 12 * (1 + num_disturbed)


def test_what_a_connector_answers_goes_with_an_output_that_ends_in_forced_text(start):
    config = KVTransferConfig(**memory_connector.WITNESS_CONFIG)
    engine = start({}, kv_transfer_config=config, num_gpu_blocks_override=24, max_model_len=256)
    params = in_format(120, {"regex": ENDS_FORCED}, extra_args={"sgl_report": 1})
    (result,) = engine.run([Ask(words(40), params)])
    assert result.outputs[0].text.endswith("after all")
    assert result.kv_transfer_params == {"witness": len(tokens_of(result))}
    engine.settle()
    engine.check_nothing_is_left()


# -- what it stores -------------------------------------------------------------------------------


def test_what_was_stored_of_a_jumped_request_is_what_it_had_computed(start, tmp_path):
    """Of conversations that go on in or after an answer which ended inside forced text, each once
    loaded and once computed."""
    engine = start(
        {"tier_rule": "always"},
        kv_transfer_config=offloading(tmp_path),
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=40,
    )
    params = in_format(72, {"regex": LONG_RUNS})
    prompts = [words(20 + 3 * number, seed=number) for number in range(24)]
    turns = []
    for prompt in prompts:
        (result,) = engine.run([Ask(prompt, params)])
        engine.settle()
        assert result.outputs[0].finish_reason == "length"
        answer = tokens_of(result)
        # Near what the first jump has filled, and after what the second has left uncomputed.
        turns += [[*prompt, *answer[:40], 5, 6], [*prompt, *answer, *words(40, seed=99)]]
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens > 1000
    assert engine.llm.reset_prefix_cache()
    beyond, found = [], []
    for number, turn in enumerate(turns):
        (loaded,) = engine.run([Ask(turn, greedy(1, logprobs=0))])
        engine.settle()
        beyond.append(loaded.num_cached_tokens - len(prompts[number // 2]))
        found.append(loaded)
    afresh = greedy(1, logprobs=0, skip_reading_prefix_cache=True)
    computed = engine.run([Ask(turn, afresh) for turn in turns])
    engine.settle()
    engine.check_nothing_is_left()
    assert sum(num_tokens > 0 for num_tokens in beyond) >= 6
    likelihoods = [
        [one.outputs[0].cumulative_logprob for one in results] for results in (found, computed)
    ]
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-4)
