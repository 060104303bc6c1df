"""Same answers over random programs: chats, forks, joins, bursts, aborts, every kind of request, in
caches that hold hardly more than the longest of them. On each layout of KV caches, with each kind
of drafts, and with vLLM's offloading below the tree.

`make soak` plays many more of them, in random settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.effort import requests
from tests.engine import host_tiers
from tests.engine.drafters import counting_drafts, for_speculation, speculation, why_it_cannot_run
from tests.engine.engine import Engine
from tests.engine.models import MODELS
from tests.engine.play import REFERENCE, Hang, References, Setting, play, references_on
from tests.engine.programs import Abort, Program, random_program
from tests.engine.ties import check_answers
from tests.platforms.platform import chosen

WHAT_HAPPENS = ("aborts", "partial hits", "select scores")


@dataclass(frozen=True)
class Case:
    """A program on one engine of a model.

    Attributes:
        program: its seed, and how many calls it has.
        happens: what is counted at least once.
        method: of speculation; None for none.
        has_good_drafts: whether the model accepts many of its drafts.
        offloads: whether vLLM's tiers are below the tree.
    """

    setting: Setting
    program: tuple[int, int] = (30, 45)
    happens: tuple[str, ...] = WHAT_HAPPENS
    method: str | None = None
    has_good_drafts: bool = True
    offloads: bool = False


def tiny(num_blocks: int, block_size: int = 32, chunk: int = 96, **more: Any) -> Setting:
    """A cache of hardly more than the longest request, and prefill in chunks."""
    more |= {"num_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": chunk}
    return Setting(more.pop("plugin", {}), **more)


EXACT = {"jump_mode": "exact"}
FAIR = {"schedule_max_overtakes": 1, "schedule_fair_quantum": 300}
ONE, DRAFTS, RECURRENT, MLA = (151, 60), (3, 60), (42, 100), (4, 24)


def drafting(method: str, setting: Setting, program: tuple[int, int] = (30, 45), **more) -> Case:
    return Case(setting, program, method=method, **more)


NIGHTLY = (pytest.mark.nightly, pytest.mark.timeout(600))
CASES = {
    ("demo", "tiny cache, prefill in chunks"): Case(tiny(30, chunk=64), ONE),
    ("demo", "ngram"): drafting("ngram", tiny(28, chunk=1024), DRAFTS),
    ("gemma3", "windows, offloading"): Case(
        tiny(52, plugin={"tier_rule": "always"}), offloads=True, happens=WHAT_HAPPENS[1:]
    ),
}
SLOW_CASES = {
    ("demo", "by priority, fair, prefill in one"): Case(
        Setting(FAIR, block_size=64, num_blocks=16, chunked=False, policy="priority"), ONE
    ),
    ("demo", "exact jumps"): Case(
        tiny(30, chunk=64, plugin=EXACT, grammars_in_background=True), ONE
    ),
    ("demo", "eagle"): drafting("eagle", tiny(28, chunk=1024), DRAFTS),
    ("gemma3", "windows"): Case(tiny(52)),
    ("mistral", "windows in all layers"): Case(tiny(12)),
    ("glm4_moe", "mtp"): drafting("mtp", tiny(27)),
    ("deepseek_v2", "mla"): Case(tiny(54, 16, 128), MLA, ("aborts", "partial hits", "preemptions")),
}
NIGHTLY_CASES = {
    ("demo", "draft model"): drafting("draft_model", tiny(28, chunk=1024), DRAFTS),
    ("demo", "eagle, exact jumps"): drafting("eagle", tiny(30, chunk=128, plugin=EXACT), DRAFTS),
    ("gemma3", "ngram"): drafting("ngram", tiny(52)),
    ("qwen3_next_mtp", "ngram"): drafting("ngram", tiny(20, chunk=560), RECURRENT),
    ("qwen3_next_mtp", "mtp"): drafting("mtp", tiny(20, chunk=560), RECURRENT),
    ("gemma3", "eagle"): drafting("eagle", tiny(104), has_good_drafts=False),
    ("mistral", "ngram"): drafting("ngram", tiny(12)),
    ("gemma4", "windows, blocks of two sizes"): Case(tiny(36)),
    ("gemma4", "eagle3"): drafting("eagle3", tiny(72), has_good_drafts=False),
    ("gpt_oss", "windows, by priority"): Case(tiny(31, policy="priority")),
    ("gpt_oss", "ngram"): drafting("ngram", tiny(31)),
    ("llama4", "chunks"): Case(tiny(48)),
    ("llama4", "chunks, offloading"): Case(
        tiny(48, plugin={"tier_rule": "always"}), offloads=True, happens=WHAT_HAPPENS[1:]
    ),
    ("llama4", "eagle"): drafting("eagle", tiny(96), has_good_drafts=False),
    ("qwen3_next", "linear attention"): Case(tiny(20, chunk=560), RECURRENT),
    ("qwen3_next", "exact jumps, by priority"): Case(
        tiny(24, chunk=1024, plugin=EXACT, policy="priority"), RECURRENT
    ),
    ("granite4", "mamba-2"): Case(tiny(26, chunk=112), RECURRENT),
    ("deepseek_v3", "mla, mtp"): drafting("mtp", tiny(54, 16)),
    ("exaone_moe", "windows, mtp"): drafting("mtp", tiny(45)),
    ("deepseek_v2", "mla, prefill in one"): Case(
        Setting({}, block_size=16, num_blocks=60, chunked=False)
    ),
}


def all_cases() -> Iterator[Any]:
    for cases, marks in ((CASES, ()), (SLOW_CASES, pytest.mark.slow), (NIGHTLY_CASES, NIGHTLY)):
        for (model, name), case in cases.items():
            yield pytest.param(model, case, id=f"{model}, {name}", marks=marks)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Its name, and the arguments of its engines."""
    folder: Path = tmp_path_factory.mktemp("models") / request.param
    with pytest.MonkeyPatch.context() as patch:
        yield request.param, MODELS[request.param].prepare(folder, patch)


@pytest.fixture(scope="module")
def references(model, start) -> Callable[[Program], References]:
    """What stock answers to a program without a cache. Each program is played once."""
    name, engine_args = model
    setting = replace(REFERENCE, block_size=MODELS[name].block_sizes[0])
    known: dict[int, References] = {}

    def of(program: Program) -> References:
        if program.seed not in known:
            known[program.seed] = references_on(start_for(start, setting, engine_args), program)
        return known[program.seed]

    return of


def start_for(start, setting: Setting, arguments: dict[str, Any]) -> Engine:
    engine: Engine = start(plugin=setting.plugin, **{**arguments, **setting.engine_args})
    setting.prepare(engine)
    return engine


@pytest.mark.parametrize(("model", "case"), [*all_cases()], indirect=["model"])
def test_every_request_gets_the_answer_it_gets_without_a_cache(
    start, model, references, case, request, tmp_path
):
    name, engine_args = model
    platform, setting = chosen(request.config), case.setting
    program = random_program(case.program[0], requests(case.program[1]))
    arguments = dict(engine_args)
    if case.method is not None:
        if requests(100) < 100:
            pytest.skip("it takes minutes where a pass is slow")
        if reason := why_it_cannot_run(case.method, platform, name):
            pytest.skip(reason)
        program = for_speculation(program)
        arguments["speculative_config"] = speculation(
            case.method, tmp_path, model=name, is_async=platform.is_async
        )
    if case.offloads:
        tiers = host_tiers.config(4 << 20, host_tiers.checked_files(tmp_path))
        arguments["kv_transfer_config"] = KVTransferConfig(**tiers)
    known = references(program)
    engine = start_for(start, setting, arguments)
    with counting_drafts(engine) as drafts:
        played = play(engine, program, known.narrowed.prompts)
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    # Where fewer requests are sent, not all of it happens.
    assert all(played.counts[what] for what in case.happens if requests(100) == 100)
    assert played.counts["forced tokens"] > requests(20) or not setting.is_canonical
    if case.method is not None:
        assert drafts["drafts"] > drafts["accepted"]
        assert drafts["accepted"] > requests(10) or not case.has_good_drafts
    if case.offloads:
        hits = engine.scheduler.sgl_vllm.stats().radix
        loaded = hits.host_hit_tokens + hits.disk_hit_tokens + hits.other_tier_hit_tokens
        assert loaded > requests(500)
    check_answers(
        lambda **judge: start(**{**engine_args, **judge}),
        program,
        known.expected_by(setting, program),
        played,
        logprob_tolerance=MODELS[name].tolerance,
        near_tie=MODELS[name].near_tie,
    )


def test_the_programs_hold_every_shape_and_way_to_give_up():
    program = random_program(*ONE)
    calls = [*program.calls]
    assert {call.shape for call in calls} >= {
        *("question", "turn", "branch", "join", "burst", "long", "long again", "retry", "storm"),
        *("crowd", "standstill"),
    }
    aborts = {call.abort for call in calls}
    assert Abort(after_steps=0) in aborts and Abort(after_tokens=1) in aborts
    assert any(call.params.n > 1 for call in calls)
    assert random_program(*ONE) == program


def test_an_engine_that_gets_nowhere_is_a_failure_with_its_seed(start, monkeypatch):
    monkeypatch.setattr("tests.engine.play.HANG_S", 0.2)
    engine = start_for(start, Setting(None), {})
    engine.scheduler.max_num_scheduled_tokens = 0
    with pytest.raises(Hang, match=r"seed 151.*waiting"):
        play(engine, random_program(*ONE), None)
