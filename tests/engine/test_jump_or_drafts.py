"""Jumps beside drafts that the scheduler knows before a pass, in the real schedulers, and no model.
A jump replaces the drafts of its request, and every request gets stock vLLM's answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import RepetitionDetectionParams

from tests.engine.jobs import WHOLE, Job, check, jump_counts, mixed_jobs, params, serve, wanted
from tests.engine.late import Answer, LateCore
from tests.engine.late_runners import Drafter, Runner, V1Runner, V2Runner

RUNNERS = (V2Runner, V1Runner)
NUM_DRAFTS = 4
EXACT, CANONICAL, OFF = {"jump_mode": "exact"}, {"jump_mode": "canonical"}, {"jump_forward": False}
ALTERNATING = "[A-Z]1[a-z]2[a-z]3x4y5z6[a-f]7q8w9e1r2t[0-9]y[a-z]1"
"""Where letters and digits alternate, tokens hardly ever span two of them."""

OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": [*range(19, 400, 3)]},
    {"extra_args": {"sgl_report": 1}},
    {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=3)},
]


def right(whole: Mapping[str, list[int]]) -> Drafter:
    return Drafter(whole, NUM_DRAFTS, wrong_share=0.0)


def wrong(whole: Mapping[str, list[int]]) -> Drafter:
    """The grammars here refuse every draft."""
    return Drafter(whole, NUM_DRAFTS, wrong_share=1.0)


def stocks(jobs: list[Job]) -> dict[str, Answer]:
    core = LateCore(stock=True, async_scheduling=False)
    serve_all(core, jobs)
    return core.answers


def serve_all(core: LateCore, jobs: list[Job]) -> None:
    for job in jobs:
        core.send(job.name, job.prompt, job.params, **job.options)
    core.finish()


def whole(jobs: list[Job], answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {job.name: [*job.prompt, *answers[job.name].tokens] for job in jobs}


def make_core(
    runner: type[Runner],
    drafter: Drafter | None,
    plugin: Mapping[str, Any] = EXACT,
    method: str = "ngram",
    **more: Any,
) -> LateCore:
    return LateCore(
        dict(plugin),
        runner=runner,
        async_scheduling=False,
        speculation=method if drafter is not None else None,
        drafter=drafter,
        **more,
    )


@pytest.fixture(scope="module")
def want() -> tuple[list[Job], dict[str, Answer]]:
    jobs = mixed_jobs(24, seed=21)
    rng = random.Random(4)
    jobs += [
        Job(
            f"alternating {number}",
            [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 80))],
            params(ALTERNATING, rng.choice([5, 18, 60]), **rng.choice(OPTIONS)),
        )
        for number in range(24)
    ]
    return jobs, stocks(jobs)


@pytest.mark.parametrize(
    ("runner", "method"), [(V1Runner, "ngram"), (V2Runner, "ngram"), (V1Runner, "eagle")]
)
def test_every_request_gets_stocks_answer(want, runner, method):
    jobs, answers = want
    settings: dict[str, Any] = {"block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 64}
    for seed in (None, 1):
        drafter = Drafter(whole(jobs, answers), NUM_DRAFTS)
        core = make_core(runner, drafter, method=method, **settings)
        aborted = serve(core, jobs, random.Random(seed) if seed is not None else None)
        check(core.answers, answers, aborted)
        assert core.runner.num_accepted > 50 and core.runner.num_rejected > 50
        assert jump_counts(core).forced_tokens > 50


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pattern", [ALTERNATING, WHOLE])
def test_drafts_cost_a_request_that_jumps_no_pass(pattern, runner):
    job = Job("one", [70, 71, 72], params(pattern))
    tokens = whole([job], stocks([job]))

    def passes(drafter: Drafter | None, plugin: Mapping[str, Any] = EXACT) -> int:
        core = make_core(runner, drafter, plugin)
        serve_all(core, [job])
        assert [*job.prompt, *core.answers["one"].tokens] == tokens["one"]
        return core.runner.num_passes

    only_jumps = passes(None)
    assert passes(wrong(tokens)) == only_jumps < passes(None, OFF)
    assert passes(right(tokens)) <= only_jumps


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_canonical_jump_leaves_accepted_drafts_that_are_the_forced_tokens(runner):
    job = Job("one", [70, 71, 72], params("[a-z]{4}1[a-z]{4}2[a-z]{4}3[a-z]{4}4[a-z]{4}"))
    tokens = whole([job], wanted([job]))
    passes, forced = [], []
    for drafter in (None, right(tokens)):
        core = make_core(runner, drafter, CANONICAL)
        serve_all(core, [job])
        assert [*job.prompt, *core.answers["one"].tokens] == tokens["one"]
        passes.append(core.runner.num_passes)
        forced.append(jump_counts(core).forced_tokens)
    assert passes[1] < passes[0]
    assert forced[1] < forced[0]
