"""Several KV-cache groups in the real schedulers, and no model: what every pass reads is checked.

A request reads in each group exactly the tokens of its window, from blocks of that group, and its
answer depends on every token that was fed. Each pass must find a recurrent state exactly where
vLLM's worker looks for it, after exactly the tokens that the request has computed, and overwrites
it. With speculation, a draft that is rejected moves a request back, so the window of what follows
begins earlier, too.
"""

from __future__ import annotations

import dataclasses
import random
from itertools import cycle
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from benchmarks.engine_settings import HEADS, MLA
from sgl_vllm.radix.checkpoints import MIN_GAIN, Checkpoints
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.lookup import Lookup
from sgl_vllm.radix.retention import Retention
from sgl_vllm.radix.tree import RadixTree
from tests.effort import by_turns, examples, some_nightly
from tests.engine.drafters import MASKS_AFTER_DRAFTS
from tests.engine.event_subscriber import watch
from tests.engine.jobs import (
    Job,
    cached_tokens,
    check,
    common_prefix,
    jump_counts,
    leave_copies_out,
    mixed_jobs,
    params,
    serve,
    serve_without_checks,
    wanted,
    with_continuations,
)
from tests.engine.kv_memory import WrongKvError
from tests.engine.late import MAX_MODEL_LEN, Answer, LateCore
from tests.engine.late_runners import Drafter, Runner, V1Runner, V2Runner

WINDOWS: dict[str, dict[str, Any]] = {
    "one group": {},
    "gemma 3": {"sliding_windows": (40, 40, 40)},
    "gpt-oss": {"sliding_windows": (24,)},
    "llama 4": {"attention_chunks": (32, 32)},
    "windows and chunks": {"sliding_windows": (9, 70), "attention_chunks": (24,)},
    "wide windows": {"sliding_windows": (200,)},
    "gemma 4": {"sliding_windows": (40, 40), "full_block_scale": 2},
    "blocks a fourth as long": {"sliding_windows": (9, 70), "full_block_scale": 4},
    "phi-4-mini": {"sliding_windows": (MAX_MODEL_LEN,), "full_attention": None},
    "a window beside one that never ends": {
        "sliding_windows": (24, MAX_MODEL_LEN),
        "full_attention": None,
    },
    "mla": {"sliding_windows": (24,), "full_attention": MLA},
    "mistral 7b v0.1": {"sliding_windows": (40,), "full_attention": None},
    "windows of two lengths": {"sliding_windows": (9, 70), "full_attention": None},
    "chunks alone": {"attention_chunks": (24,), "full_attention": None},
}
STATES: dict[str, dict[str, Any]] = {
    "states": {"num_recurrent_groups": 1},
    "qwen3-next": {"num_recurrent_groups": 3},
    "kimi linear": {"num_recurrent_groups": 3, "full_attention": MLA},
    "states and a window": {"num_recurrent_groups": 1, "sliding_windows": (40,)},
    "states, windows and chunks": {
        "num_recurrent_groups": 2,
        "sliding_windows": (9, 70),
        "attention_chunks": (24,),
    },
    "states and a window that never ends": {
        "num_recurrent_groups": 1,
        "sliding_windows": (MAX_MODEL_LEN,),
        "full_attention": None,
    },
}
LAYOUTS = WINDOWS | STATES
QUICK = ("windows and chunks", "gemma 4", "phi-4-mini", "kimi linear", "states and a window")
SOME_NIGHTLY = some_nightly([*LAYOUTS][1:], QUICK)
STATES_NIGHTLY = some_nightly(STATES, ("kimi linear", "states and a window"))
RUNNERS = [(V1Runner, False), (V1Runner, True), (V2Runner, True)]
SHAPES = [
    # block size, tokens a step, policy, room: how many of the longest requests it holds
    pytest.param((16, 48, "fcfs", 1.3)),
    pytest.param((4, 100, "priority", 1.3), marks=pytest.mark.slow),
    pytest.param((16, 512, "fcfs", 20), marks=pytest.mark.slow),
]
METHODS: list[tuple[str, type[Runner], bool]] = [
    ("ngram", V1Runner, False),
    ("ngram", V2Runner, False),
    ("ngram_gpu", V2Runner, True),
    ("eagle", V2Runner, True),
    ("eagle", V1Runner, False),
]
WITH_DRAFTS = (
    *("one group", "gpt-oss", "windows and chunks", "gemma 4", "mistral 7b v0.1", "qwen3-next"),
)
LOOKAHEAD = {None: 0, "ngram": 0, "ngram_gpu": 0, "eagle": 1}
NO_METHOD = (None, V1Runner, False)
NUM_DRAFTS = 4
Want = tuple[list[Job], dict[str, Answer]]


def make_core(
    layout: str,
    runner: type[Runner] = V1Runner,
    is_async: bool = False,
    *,
    method: str | None = None,
    drafter: Drafter | None = None,
    room: float | None = None,
    **more: Any,
) -> LateCore:
    """`room` is the size of the cache in the longest requests that it holds."""
    if room is not None:
        groups = LateCore(**LAYOUTS[layout], **more).scheduler.kv_cache_manager.groups
        more["num_blocks"] = round(room * groups.max_blocks(MAX_MODEL_LEN + 10))  # with drafts
    if method is not None:
        more |= {"speculation": method, "drafter": drafter or Drafter({}, NUM_DRAFTS)}
    core = LateCore(runner=runner, async_scheduling=is_async, **{**LAYOUTS[layout], **more})
    assert core.scheduler.sgl_vllm.stats().parts["radix"] == "on"
    return core


def make_tiny(layout: str, runner: type[Runner] = V1Runner, is_async: bool = False) -> LateCore:
    return make_core(layout, runner, is_async, room=1.3, block_size=16, max_num_batched_tokens=48)


def drafter_of(want: Want, num_drafts: int = NUM_DRAFTS, seed: int = 0) -> Drafter:
    """Drafts what the requests get, with mistakes."""
    jobs, answers = want
    whole = {job.name: [*job.prompt, *answers[job.name].tokens] for job in jobs}
    return Drafter(whole, num_drafts, seed)


@pytest.fixture(scope="module")
def want() -> Want:
    """Half of the jobs go on where another's answer ends. Some are sent several times at once."""
    jobs = mixed_jobs(30, seed=5)
    jobs, answers = with_continuations(jobs, wanted(jobs))
    with_twins = []
    for number, job in enumerate(jobs):
        twins = [dataclasses.replace(job, name=f"{job.name} twin {n}") for n in range(number % 3)]
        with_twins += [job, *twins]
        answers |= {twin.name: answers[job.name] for twin in twins}
    return with_twins, answers


@pytest.mark.parametrize(
    ("layout", "shape", "runner", "is_async"), by_turns(SOME_NIGHTLY, SHAPES, RUNNERS)
)
def test_every_request_gets_the_same_tokens(want, layout, shape, runner, is_async):
    """Jumps, preemptions, and with a seed also KV events, aborts and resets, some with a step in
    flight."""
    jobs, answers = want
    block_size, max_tokens, policy, room = shape
    settings = {"block_size": block_size, "max_num_batched_tokens": max_tokens, "policy": policy}
    for seed in (None, 1):
        has_events = seed is not None and LAYOUTS[layout].get("full_attention", HEADS) is not None
        core = make_core(layout, runner, is_async, room=room, kv_events=has_events, **settings)
        if has_events:
            watch(core)
        disturb = random.Random(seed) if seed is not None else None
        aborted = serve(core, jobs, disturb)
        assert bool(aborted) == (disturb is not None)
        check(core.answers, answers, aborted)
        assert jump_counts(core).forced_tokens > 300
        counters = core.scheduler.sgl_vllm.stats().radix
        # In a small cache, there often is no room for the source of a copy.
        assert counters.partial_block_hits > (10 if room > 10 else 0)
        assert counters.hit_tokens > 1000
        assert counters.checkpoints > 20 or layout in WINDOWS


@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
@pytest.mark.parametrize("layout", some_nightly(WITH_DRAFTS, ("gpt-oss",)))
def test_so_it_does_with_drafts(want, layout, method, runner, is_async):
    jobs, answers = want
    settings: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 100, "num_blocks": 150}
    for seed in (None, 1):
        drafts = {"method": method, "drafter": drafter_of(want)}
        core = make_core(layout, runner, is_async, **drafts, **settings)
        aborted = serve(core, jobs, random.Random(seed) if seed is not None else None)
        check(core.answers, answers, aborted)
        assert core.runner.num_accepted > 100 and core.runner.num_rejected > 100
        assert jump_counts(core).forced_tokens > 300
        assert core.scheduler.sgl_vllm.stats().radix.hit_tokens > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(examples(16)))
def test_random_requests_with_drafts_in_a_cache_of_random_size(seed):
    rng = random.Random(seed)
    jobs = mixed_jobs(24, seed=100 + seed)
    want = jobs, answers = with_continuations(jobs, wanted(jobs))
    layout = WITH_DRAFTS[seed % len(WITH_DRAFTS)]
    num_accepted = num_rejected = 0
    methods = [one for one in METHODS if MASKS_AFTER_DRAFTS or not one[2]]
    for method, runner, is_async in methods:
        drafter = drafter_of(want, rng.choice([1, 2, 5]), seed)
        settings: dict[str, Any] = {
            "room": rng.choice([1.2, 2, 5]),
            "block_size": rng.choice([4, 8, 16]),
            "max_num_batched_tokens": rng.choice([40, 100, 400]),
            "policy": rng.choice(["fcfs", "priority"]),
        }
        if (
            layout == "qwen3-next"
        ):  # vLLM keeps one state of a pass, so a pass must fit into a block
            settings["block_size"] = max(8, settings["block_size"])
        core = make_core(layout, runner, is_async, method=method, drafter=drafter, **settings)
        aborted = serve(core, jobs, rng)
        check(core.answers, answers, aborted)
        num_accepted += core.runner.num_accepted
        num_rejected += core.runner.num_rejected
    assert num_accepted > (100 if len(methods) == len(METHODS) else 50) and num_rejected > 10


# -- where hits end --------------------------------------------------------------------------------

HITS = [
    *((layout, *NO_METHOD, 16) for layout in WINDOWS),
    *(
        (layout, *method, 8)
        for layout, method in zip(cycle(WITH_DRAFTS[:-1]), METHODS, strict=False)
    ),
]


@pytest.mark.parametrize(("layout", "method", "runner", "is_async", "block_size"), HITS)
def test_with_room_for_all_a_hit_loses_only_what_a_drafter_has_read_ahead(
    layout, method, runner, is_async, block_size
):
    """Of the longest common prefix. There are chats, and forks at any token of a prompt or an
    answer."""
    rng = random.Random(block_size)
    settings = {"block_size": block_size, "num_blocks": 4000, "max_num_batched_tokens": 64}
    core = make_core(layout, runner, is_async, method=method, **settings)
    known: list[list[int]] = []
    for _ in range(50):
        earlier = rng.choice(known)[: rng.randrange(1, 150)] if known else []
        prompt = earlier + [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 60))]
        longest = max((common_prefix(prompt, one) for one in known), default=0)
        got = cached_tokens(core, prompt, length := rng.choice([1, 8, 45]))
        assert got == max(0, min(longest - LOOKAHEAD[method], len(prompt) - 1))
        answer = core.answers[str(len(core.answers) - 1)].tokens
        assert len(answer) == length
        known.append(prompt + answer[:-1])  # the last token was never fed


@pytest.mark.parametrize(("method", "runner", "is_async"), METHODS)
def test_with_drafts_hits_reach_the_end_of_a_prompt_and_nearly_the_end_of_an_answer(
    method, runner, is_async
):
    length = 1 + 8 * (NUM_DRAFTS + 1)  # no pass goes past the end
    prompt = [10 + place % 900 for place in range(50)]
    alone = make_core("qwen3-next", block_size=64)
    cached_tokens(alone, prompt, length)
    answer = alone.answers["0"].tokens
    drafter = Drafter({"0": [*prompt, *answer]}, NUM_DRAFTS, wrong_share=0.0)
    core = make_core("qwen3-next", runner, is_async, method=method, drafter=drafter, block_size=64)
    cached_tokens(core, prompt, length)
    assert cached_tokens(core, [*prompt, 7]) == 50
    whole = [*prompt, *answer]
    assert 0 <= len(whole) - cached_tokens(core, [*whole, 7]) <= NUM_DRAFTS + 1
    assert core.runner.num_accepted > 20


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
@pytest.mark.parametrize("layout", STATES_NIGHTLY)
def test_with_room_for_all_every_hit_ends_at_the_last_state_left_behind(layout, block_size):
    """By a pass that ended with a block, at a branch or with the prompt, and by the last one."""
    rng = random.Random(block_size)
    settings = {"block_size": block_size, "num_blocks": 8000, "max_num_batched_tokens": 64}
    core: Any = make_core(layout, NotingRunner, **settings)
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
def test_the_longest_request_keeps_all_tokens_of_a_window_as_long(runner, is_async):
    for block_size in (1, 16):
        core = make_core("phi-4-mini", runner, is_async, block_size=block_size, num_blocks=600)
        prompt = [10 + place % 900 for place in range(200)]
        assert cached_tokens(core, prompt, MAX_MODEL_LEN) == 0
        computed = [*prompt, *core.answers["0"].tokens[:-1]]
        assert len(computed) == MAX_MODEL_LEN - 1
        assert cached_tokens(core, computed) == MAX_MODEL_LEN - 2


@pytest.mark.parametrize(
    ("window", "block_size", "num_blocks", "method", "runner", "is_async"),
    [(24, 16, 140, *NO_METHOD), *((9, 8, 195, *method) for method in METHODS)],
)
def test_the_window_of_a_prompts_end_outlives_what_is_before_it(
    window, block_size, num_blocks, method, runner, is_async
):
    """In a full cache, the middle of old prompts goes first, and their ends are still found. With
    drafts, the window of what follows begins with a block, and that of a hit one token shorter does
    not."""
    sizes = {"sliding_windows": (window,), "block_size": block_size, "num_blocks": num_blocks}
    core = make_core("one group", runner, is_async, method=method, **sizes)
    prompts = [[100 * number + 10 + place % 90 for place in range(200)] for number in range(6)]
    for prompt in prompts:  # as many blocks of full attention as of the windows
        cached_tokens(core, prompt)
    assert [cached_tokens(core, prompt) for prompt in prompts] == [199] * 6
    more = 200 - LOOKAHEAD[method]
    assert [cached_tokens(core, [*prompt, 7]) for prompt in prompts] == [more] * 6
    assert cached_tokens(core, [*prompts[0][:100], 7]) < 100 - LOOKAHEAD[method]


def test_a_score_is_found_behind_a_prefix_in_windows():
    core = make_core("gemma 3", block_size=16)
    prompt = [10 + place % 900 for place in range(180)]
    whole: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 1}
    late: dict[str, Any] = {"extra_args": {"sgl_score_from": 150}}
    for name, more in (("whole", {}), ("late", late)):
        core.send(name, prompt, params(**whole, **more))
        core.finish()
    scores = core.answers["whole"].scores
    assert scores is not None and core.answers["late"].scores == scores[149:]
    assert core.scheduler.sgl_vllm.stats().radix.hit_tokens == 149


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "num_calls", "layout", "runner", "is_async"),
    [
        ((RadixTree, "insert"), 60, "kimi linear", V1Runner, True),
        ((Checkpoints, "finish"), 5, "states and a window", V2Runner, True),
        ((Groups, "states_of"), 90, "states and a window", V1Runner, False),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
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
    core = make_tiny(layout, runner, is_async)
    pool = core.scheduler.kv_cache_manager.block_pool
    num_blocks = pool.get_num_free_blocks()
    serve_without_checks(core, jobs)
    check(core.answers, answers)
    assert core.scheduler.parts.radix.tree is None
    assert pool.get_num_free_blocks() == num_blocks
    assert len(pool.cached_block_hash_to_block) > 0


# -- the test itself -------------------------------------------------------------------------------


def keep_a_state_a_token_too_early(patch: pytest.MonkeyPatch) -> None:
    states_of = Groups.states_of

    def one_less(*args: Any) -> dict[int, list[int]]:
        return {position - 1: ids for position, ids in states_of(*args).items()}

    patch.setattr(Groups, "states_of", one_less)


def copy_a_checkpoint_before_it_is_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookup, "_may_be_copied", lambda *_: True)


def forget_the_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A request that ends has a state that a step in flight is going to change."""

    def states_left(self: Any, request: Any, state: Any, num_tokens: int) -> Any:
        return num_tokens, self._groups.states_of(request, state.num_with_states, num_tokens)

    patch.setattr(Retention, "_states_left", states_left)


MISTAKES = [
    leave_copies_out,
    keep_a_state_a_token_too_early,
    copy_a_checkpoint_before_it_is_made,
    forget_the_tokens_in_flight,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(want, monkeypatch, mistake):
    jobs, _ = want
    mistake(monkeypatch)
    with pytest.raises(WrongKvError):
        for seed in range(3):
            core = make_core("qwen3-next", V2Runner, True, block_size=16, num_blocks=1500)
            serve(core, jobs, random.Random(seed))
