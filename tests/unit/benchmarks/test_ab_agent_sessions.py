"""The workload `agent_sessions`: its items are sessions, and the program sends them as told."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("tokenizers")

import sgl_vllm as sgl
from benchmarks.ab.workloads.agent_sessions import (
    CACHE_TOKENS,
    MAX_STEPS,
    WORKLOAD,
    Context,
    Step,
    items,
    server_args,
    session,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Texts, Vocabulary
from sgl_vllm.lang.backends.base import GenAnswer, Generated, GenRequest, Usage
from tests.unit.lang.scripted import ScriptedBackend, text_of


class Agent(ScriptedBackend):
    """Answers with as many words as it is asked for, and fails at a prompt that ends in `fails`."""

    def __init__(self, word: str, growth: float = 1.0, fails: str = "?") -> None:
        super().__init__()
        self._word, self._growth, self._fails = word, growth, fails

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.asked.append(request)
        if text_of(request.prompt).endswith(self._fails):
            raise sgl.BackendError("out of order")
        num_words = round(self._growth * (request.sampling.max_new_tokens or 0))
        return GenAnswer((Generated(self._word * num_words, "length"),), Usage(calls=1))


def without_pauses(contexts: tuple[Context, ...]) -> tuple[Context, ...]:
    return tuple(tuple(replace(step, pause_s=0.0) for step in context) for context in contexts)


def test_every_step_is_asked_once_and_fits_whatever_the_model_writes(
    vocabulary: Vocabulary,
) -> None:
    for item in items(Texts(vocabulary, 0), WORKLOAD.num_requests):
        contexts = without_pauses(item["contexts"])
        steps = [step for context in contexts for step in context]
        assert sorted(step.number for step in steps) == list(range(len(steps)))
        assert len(steps) <= MAX_STEPS
        agent = Agent(str(vocabulary.words[0]), growth=1.3)
        session.run(contexts=contexts, temperature=0, backend=agent)
        asked = [
            (one.sampling.min_new_tokens, one.sampling.max_new_tokens) for one in agent.requests
        ]
        assert sorted(asked) == sorted((step.num_tokens, step.num_tokens) for step in steps)
        longest = max(map(vocabulary.num_tokens, agent.prompts)) + max(s.num_tokens for s in steps)
        assert longest <= MAX_MODEL_LEN


def test_sessions_under_way_have_their_context_and_go_on_from_it(vocabulary: Vocabulary) -> None:
    firsts = []
    for item in items(Texts(vocabulary, 0), WORKLOAD.num_requests):
        for first, *rest in item["contexts"]:
            firsts.append(vocabulary.num_tokens(first.text))
            assert all(vocabulary.num_tokens(step.text) < firsts[-1] + 800 for step in rest)
            assert all(step.after for step in rest)
    assert max(firsts) > 2000
    assert sum(firsts) > CACHE_TOKENS > max(firsts)  # all together do not fit, any one does


# A session that starts a subagent, and reads what it found in its third step.
BY_HAND = (
    (
        Step(0, (), 0.0, " ask", 1),
        Step(1, (0,), 0.0, " tool", 2),
        Step(3, (1, 2), 0.0, " found", 1),
    ),
    (Step(2, (0,), 0.05, " task", 3),),
)


def test_steps_wait_for_the_answers_that_they_build_on() -> None:
    agent = Agent(" x")
    state = session.run(contexts=BY_HAND, temperature=0, backend=agent)
    assert agent.prompts == [
        " ask",
        " ask x tool",
        " task",
        " ask x tool x x found",
    ]
    assert state.text() == " ask x tool x x found x task x x x"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fails", ["ask", "task", "tool"])
def test_a_session_ends_if_one_of_its_steps_fails(fails: str) -> None:
    with pytest.raises(sgl.ProgramError, match="out of order"):
        session.run(contexts=BY_HAND, temperature=0, backend=Agent(" x", fails=fails))


@pytest.mark.parametrize("block_size_tokens", [16, 128])
def test_the_cache_is_small_and_holds_any_one_request(block_size_tokens: int) -> None:
    arguments = server_args(block_size_tokens)
    num_blocks = int(arguments[arguments.index("--num-gpu-blocks-override") + 1])
    assert MAX_MODEL_LEN < num_blocks * block_size_tokens <= CACHE_TOKENS
