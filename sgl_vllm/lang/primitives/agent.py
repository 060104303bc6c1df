"""`agent`: the model calls tools until it can answer."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from sgl_vllm.lang.api import gen, tool, var
from sgl_vllm.lang.ir import Block, Expr, ExprList, parts_of
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import (
    Conversation,
    answer_of,
    at_least,
    block,
    filled,
    transcript_of,
    variables_of,
)
from sgl_vllm.lang.primitives.tools import (
    CallsError,
    Function,
    OnError,
    ToolCall,
    Tools,
    shown,
)
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.makers import deferrable
from sgl_vllm.lang.transcript import Variable
from sgl_vllm.protocol.hints import MAX_HINT_LENGTH

INSTRUCTIONS = """\
You can call these tools:
{tools}
To call some, write JSON: {{"calls": [{{"tool": "...", "arguments": {{...}}}}]}}. You are then shown
their results. The calls of one turn run at the same time. If you need no more calls, write
{{"calls": []}}, and you are asked for the answer.
"""
ANSWER_NOW = "Answer now."
NO_MORE_CALLS = "No more calls are possible. Answer now."

EndedBy: TypeAlias = Literal["model", "turns", "calls", "tokens", "time"]
"""Why an agent made no more calls: the model asked for none, or a budget was used up."""


@deferrable
@suggests
def agent(
    answer: str | Expr,
    task: str | Expr,
    tools: Sequence[Function],
    *,
    max_turns: int = 8,
    max_calls: int | None = None,
    max_tokens: int | None = None,
    max_s: float | None = None,
    max_parallel: int = 8,
    max_tokens_per_turn: int = 512,
    on_error: OnError = "show",
    instructions: str = INSTRUCTIONS,
) -> Block:
    """Let the model call `tools` until it can answer `task`.

    A turn is one generation, JSON that names tools and their arguments and is held to their
    schemas, and then the calls, all at the same time. In a chat, the model's turns are assistant
    turns and the results are user turns, so this does not belong into a turn; in a prompt without
    roles they are lines of text. An empty prompt becomes a chat.

    - `answer`: the expression that writes the answer in the end, such as
      ``gen("city", json_schema=City)``. Its last variable is the answer. A name stands for
      ``gen(name)``.
    - `task`: a text or an expression, which follows the description of the tools.
    - `tools`: functions, plain or async. Their parameters have annotations, from which pydantic
      makes the schemas, and arguments are converted to these types. The docstring is shown to the
      model. Plain functions run in threads.
    - `max_turns`, `max_calls`, `max_tokens` (generated in turns) and `max_s` (seconds): budgets.
      When one is used up, the model is asked for the answer with what it has. Calls that still run
      then are ended; a generation is not.
    - `max_parallel`: how many calls a turn may have. `max_tokens_per_turn`: how long it may be.
    - `on_error`: "show" tells the model about errors of tools and wrong arguments; "raise" lets
      the agent fail with them.
    - `instructions`: a template with the field ``{tools}``. Written once per prompt.

    `get_meta_info` has also `tool_calls`, a list of `ToolCall`; `turns`; and `ended_by`: "model",
    "turns", "calls", "tokens" or "time". Cost: a `gen` per turn, one more in which the model asks
    for no calls (not if a budget ends the turns), and the calls of `answer`. Each prompt begins
    with the one before. Schemas take 0.6 ms per tool. While tools run, a server with the plugin
    knows which, and keeps the prompt.

    Raises TypeError for a tool whose parameters have no annotations, ValueError for an `answer`
    that makes no variable, no tools, two of the same name, or a template with other fields.
    """
    at_least(
        1, max_turns=max_turns, max_parallel=max_parallel, max_tokens_per_turn=max_tokens_per_turn
    )
    at_least(0, max_calls=max_calls, max_tokens=max_tokens)
    filled(instructions, tools="")
    expr, names = answer_of("agent", answer)
    budget = _Budget(max_turns, max_calls, max_tokens, max_s, max_tokens_per_turn)
    agent = _Agent(Tools(tools, max_parallel), budget, on_error, instructions)
    return block(
        "agent", names, functools.partial(agent.run, ExprList(parts_of(task)), expr, names)
    )


@dataclass(frozen=True)
class _Budget:
    max_turns: int
    max_calls: int | None
    max_tokens: int | None
    max_s: float | None
    max_tokens_per_turn: int


@dataclass
class _Spent:
    """What one run of an agent has used of its budget, and the calls it has made."""

    budget: _Budget
    deadline_s: float | None
    turns: int = 0
    tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def calls_left(self) -> int | None:
        most = self.budget.max_calls
        return None if most is None else max(0, most - len(self.calls))

    @property
    def tokens_left(self) -> int:
        """How long the next turn may be."""
        most = self.budget.max_tokens
        per_turn = self.budget.max_tokens_per_turn
        return per_turn if most is None else min(per_turn, most - self.tokens)

    def used_up(self) -> EndedBy | None:
        """The budget that allows no further turn."""
        if self.turns >= self.budget.max_turns:
            return "turns"
        if self.calls_left == 0:
            return "calls"
        if self.tokens_left <= 0:
            return "tokens"
        if self.deadline_s is not None and asyncio.get_running_loop().time() >= self.deadline_s:
            return "time"
        return None


@dataclass(frozen=True)
class _Results:
    """What the model is shown after a turn. `ended_by` says why there is no further one."""

    text: str
    ended_by: EndedBy | None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Agent:
    tools: Tools
    budget: _Budget
    on_error: OnError
    instructions: str

    async def run(
        self, task: ExprList, answer: ExprList, names: tuple[str, ...], s: AsyncProgramState
    ) -> Mapping[str, Variable]:
        transcript = await transcript_of(s)
        if transcript.role is not None:
            raise ValueError(f"it writes turns of its own: close the {transcript.role} turn first")
        conversation = Conversation(s, transcript)
        instructions = filled(self.instructions, tools=self.tools.description())
        is_told = instructions in transcript.text
        conversation.tell(task if is_told else instructions + task)
        now_s, max_s = asyncio.get_running_loop().time(), self.budget.max_s
        spent = _Spent(self.budget, None if max_s is None else now_s + max_s)
        ended_by = spent.used_up()
        if ended_by is not None:
            conversation.tell(NO_MORE_CALLS)
        while ended_by is None:
            ended_by = await self._turn(s, conversation, spent)
        conversation.ask("Answer: ", answer)
        report = {"tool_calls": spent.calls, "turns": spent.turns, "ended_by": ended_by}
        return await variables_of(s, names, **report)

    async def _turn(
        self, s: AsyncProgramState, conversation: Conversation, spent: _Spent
    ) -> EndedBy | None:
        """One generation and its calls. The calls are queued behind the generation, whose request
        thereby says which tool runs next."""

        async def run_calls(text: str) -> _Results:
            spent.turns += 1
            spent.tokens += (await s.get_meta_info("calls"))["completion_tokens"]
            return await self._results(text, spent)

        run_calls.__name__ = "|".join(self.tools.names)[:MAX_HINT_LENGTH]
        calls = gen(
            "calls",
            spent.tokens_left,
            json_schema=self.tools.schema,  # which ends by itself, so nothing of the run's ends it
            stop=(),
            stop_regex=(),
        )
        conversation.ask("Calls: ", calls)
        conversation.tell(tool("results", run_calls, var("calls")))
        results: _Results = await s["results"]
        return results.ended_by

    async def _results(self, text: str, spent: _Spent) -> _Results:
        """Run the calls in a text."""
        try:
            asked = self.tools.read(text)
        except CallsError as error:
            if self.on_error == "raise":
                raise
            return self._shown(json.dumps([{"error": str(error)}]), spent)
        if not asked:
            return _Results(ANSWER_NOW, "model")
        allowed = asked[: spent.calls_left]
        done = await self.tools.run(allowed, spent.deadline_s)
        spent.calls += done
        if self.on_error == "raise":
            for call in done:
                if call.error is not None:
                    raise call.exception or ValueError(f"{call.tool}: {call.error}")
        left_out = asked[len(allowed) :]
        refused = [replace(one, error="not called, because no calls are left") for one in left_out]
        return self._shown(shown([*done, *refused]), spent)

    def _shown(self, results: str, spent: _Spent) -> _Results:
        ended_by = spent.used_up()
        return _Results(f"{results}\n{NO_MORE_CALLS}" if ended_by else results, ended_by)
