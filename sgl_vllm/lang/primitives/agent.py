"""`agent`: the model calls tools until it can answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from sgl_vllm.lang.api import gen, tool, var
from sgl_vllm.lang.ir import Block, Expr, ExprList, parts_of
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import Conversation, answer_of, at_least, block, variables_of
from sgl_vllm.lang.primitives.tools import CallsError, Function, OnError, ToolCall, Tools, shown
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.text import filled
from sgl_vllm.lang.tracing.standin import deferrable
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
    its_tools, asked = Tools(tools, max_parallel), ExprList(parts_of(task))
    told = filled(instructions, tools=its_tools.description())

    async def body(s: AsyncProgramState) -> Mapping[str, Variable]:
        now_s = asyncio.get_running_loop().time()
        turns = _Turns(
            its_tools,
            raises=on_error == "raise",
            max_turns=max_turns,
            max_calls=math.inf if max_calls is None else max_calls,
            max_tokens=math.inf if max_tokens is None else max_tokens,
            max_tokens_per_turn=max_tokens_per_turn,
            deadline_s=None if max_s is None else now_s + max_s,
        )
        transcript = await s._read()
        if transcript.role is not None:
            raise ValueError(f"it writes turns of its own: close the {transcript.role} turn first")
        conversation = Conversation(s, transcript)
        conversation.tell(asked if told in transcript.text else told + asked)
        ended_by = turns.used_up()
        if ended_by is not None:
            conversation.tell(NO_MORE_CALLS)
        while ended_by is None:
            ended_by = await turns.take(s, conversation)
        conversation.ask("Answer: ", expr)
        report = {"tool_calls": turns.calls, "turns": turns.num_turns, "ended_by": ended_by}
        return await variables_of(s, names, **report)

    return block("agent", names, body)


@dataclass(frozen=True)
class _Results:
    """What the model is shown after a turn. `ended_by` says why there is no further one."""

    text: str
    ended_by: EndedBy | None

    def __str__(self) -> str:
        return self.text


@dataclass(kw_only=True)
class _Turns:
    """The turns of one agent, its budgets, and what it has used of them. `deadline_s` is on the
    loop's clock."""

    tools: Tools = field(kw_only=False)
    raises: bool
    max_turns: int
    max_calls: float
    max_tokens: float
    max_tokens_per_turn: int
    deadline_s: float | None
    num_turns: int = 0
    num_tokens: int = 0
    calls: list[ToolCall] = field(default_factory=list)

    def used_up(self) -> EndedBy | None:
        """The budget that allows no further turn."""
        if self.num_turns >= self.max_turns:
            return "turns"
        if len(self.calls) >= self.max_calls:
            return "calls"
        if self.num_tokens >= self.max_tokens:
            return "tokens"
        if self.deadline_s is not None and asyncio.get_running_loop().time() >= self.deadline_s:
            return "time"
        return None

    async def take(self, s: AsyncProgramState, conversation: Conversation) -> EndedBy | None:
        """One generation and its calls. The calls are queued behind the generation, whose request
        thereby says which tool runs next."""

        async def run_calls(text: str) -> _Results:
            self.num_turns += 1
            self.num_tokens += (await s.get_meta_info("calls"))["completion_tokens"]
            return await self._results(text)

        run_calls.__name__ = "|".join(self.tools.names)[:MAX_HINT_LENGTH]
        calls = gen(
            "calls",
            int(min(self.max_tokens_per_turn, self.max_tokens - self.num_tokens)),
            json_schema=self.tools.schema,  # which ends by itself, so nothing of the run's ends it
            stop=(),
            stop_regex=(),
        )
        conversation.ask("Calls: ", calls)
        conversation.tell(tool("results", run_calls, var("calls")))
        results: _Results = await s["results"]
        return results.ended_by

    async def _results(self, text: str) -> _Results:
        """Run the calls in a text."""
        try:
            asked = self.tools.read(text)
        except CallsError as error:
            if self.raises:
                raise
            return self._shown(json.dumps([{"error": str(error)}]))
        if not asked:
            return _Results(ANSWER_NOW, "model")
        num_allowed = int(min(len(asked), self.max_calls - len(self.calls)))
        done = await self.tools.run(asked[:num_allowed], self.deadline_s)
        self.calls += done
        if self.raises:
            for call in done:
                if call.error is not None:
                    raise call.exception or ValueError(f"{call.tool}: {call.error}")
        left_out = asked[num_allowed:]
        refused = [replace(one, error="not called, because no calls are left") for one in left_out]
        return self._shown(shown([*done, *refused]))

    def _shown(self, results: str) -> _Results:
        ended_by = self.used_up()
        return _Results(f"{results}\n{NO_MORE_CALLS}" if ended_by else results, ended_by)
