"""One run of a graph: its nodes as operations of streams, in the order that the program asks for.

Every stream of a graph is a stream of the interpreter, and all operations are submitted at once.
Owns what each of them waits for:

    function          its actions (`Graph.actions`), one after the other; the first that fails ends
                      the run
    generations       the prompt before them and their variables
    tools, blocks     the same, and the function's actions before them: if the function would have
                      stopped there, they are not called
    read-only tools   their arguments, the effects before them in their prompt, and if there are
                      effects in other prompts, the function's actions before them
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future

from sgl_vllm.lang.environment import Environment
from sgl_vllm.lang.errors import reading
from sgl_vllm.lang.execution import with_values_awaited
from sgl_vllm.lang.ir import Computed, Expr, ExprList, Tool, Value, parts_of
from sgl_vllm.lang.loop import new_future, result_of
from sgl_vllm.lang.operations import Await, has_effect, needed_by
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.tracing.nodes import (
    Evaluate,
    Node,
    ReadPrompt,
    SetVariable,
    TracedFork,
    TracedJoin,
    Write,
)
from sgl_vllm.lang.tracing.standin import Definition, Leaf, StandIn, concatenation, definitions_in
from sgl_vllm.lang.tracing.trace import Graph
from sgl_vllm.lang.transcript import Variable, meta_info


class GraphRun:
    """One run of a graph: its arguments, its prompts, and the futures of its variables."""

    def __init__(
        self,
        graph: Graph,
        state: ProgramState,
        arguments: Mapping[str, Value],
    ) -> None:
        self._environment = Environment(self._leaf)
        self._graph = graph
        self._arguments = arguments
        self._background = state._stream.run.background
        self._states: dict[int, ProgramState] = {0: state}
        self._futures: dict[Definition, Future[Variable]] = {}
        self._with_effects: set[int] = set()  # streams
        self._submitted: Future[None] = new_future()

    def _leaf(self, leaf: Leaf) -> Value:
        if leaf.aspect == "argument":
            return self._arguments[str(leaf.name)]
        if leaf.definition is None:
            return self._states[leaf.stream or 0]
        variable = self._futures[leaf.definition].result()
        match leaf.aspect:
            case "meta":
                return meta_info(variable)
            case "text":
                return variable.value.text
            case "messages":
                return [message.as_dict() for message in variable.value.all_messages()]
        return variable.value

    def submit(self) -> None:
        """Submit every operation. Waits for nothing."""
        try:
            for node in self._graph.nodes:
                self._submit(node)
        except BaseException as error:  # such as an argument that names a missing variable
            self._submitted.set_exception(error)
            raise
        self._submitted.set_result(None)

    async def result(self) -> Value:
        """Do what the function does. Returns the program's result, or raises the error of the
        first action that failed."""
        actions = self._actions_done(len(self._graph.actions))
        is_on_loop = asyncio.get_running_loop() is self._background.loop
        with reading():
            await (actions if is_on_loop else result_of(self._background.start(actions)))
            return await self._once_known(self._graph.returned)

    async def _actions_done(self, num_actions: int) -> None:
        await result_of(self._submitted)
        for action in self._graph.actions[:num_actions]:
            await self._once_known(action)

    async def _once_known(self, wanted: Value) -> Value:
        """`value`, once the variables that it depends on are there."""
        for read in definitions_in([wanted]):
            await result_of(self._futures[read])
        return self._environment.value(wanted)

    # --- submitting ----------------------------------------------------------------------------

    def _submit(self, node: Node) -> None:
        state = self._states[node.stream]
        stream = state._stream
        match node.operation:
            case Write(pieces):
                self._append(stream, pieces[0] if len(pieces) == 1 else concatenation(pieces), node)
            case Evaluate(expr):
                self._append(stream, expr, node)
            case SetVariable(name, value) if isinstance(value, StandIn):
                stream.bind(name, self._background.start(self._assigned(value)))
            case SetVariable(name, value):
                state.set_var(name, value)
            case ReadPrompt():
                transcript = stream.read()

                async def read_prompt() -> Variable:
                    return Variable(await result_of(transcript), text="")

                self._futures[node.writes[0]] = self._background.start(read_prompt())
            case TracedFork(children):
                self._states.update(zip(children, state.fork(len(children)), strict=True))
            case TracedJoin(branches, name):
                joined = [self._states[index]._stream for index in branches]
                if name is None:
                    stream.append_texts(joined)
                else:
                    stream.gather(name, joined)
        for definition in node.writes:
            if definition.name is not None:
                self._futures[definition] = stream.variables[definition.name]

    async def _assigned(self, value: StandIn) -> Variable:
        return Variable.of(await self._once_known(value))

    def _append(self, stream: Stream, value: Expr | str, node: Node) -> None:
        """Append a value: now if it depends on arguments alone, else once its variables exist."""
        is_write = isinstance(node.operation, Write)
        may_change = node.calls == "anything"
        if node.calls != "nothing" and node.num_actions and self._with_effects - {node.stream}:
            before = self._background.start(self._actions_done(node.num_actions))
            stream.waits_for_effects = (before,)
        if may_change:
            self._with_effects.add(node.stream)
        if not definitions_in([value]):
            try:
                known = self._in_turn(self._environment.value(value), node)
            except Exception:  # the function may have to stop before it gets there
                pass
            else:
                stream.append(known)
                return
        variables = {} if is_write and not may_change else dict(stream.variables)
        name = next((made.name for made in node.writes), None)
        if isinstance(value, StandIn) and value._operation == "read_only_tool":

            async def with_values() -> Tool:
                tool: Tool = await self._once_known(value)
                return await with_values_awaited(tool, needed_by(tool, variables))

            tool = Tool(name, value._args[1])
            waits_for = [self._futures[read] for read in node.reads]
            future = stream.submit_read_only(tool, with_values, waits_for)
        else:

            async def computed() -> Expr | str:
                return self._in_turn(await self._once_known(value), node)

            future = stream.submit(
                Computed(computed, name), variables, has_effect=may_change and not is_write
            )
        if name is not None:
            stream.bind(name, future)

    def _in_turn(self, value: Expr | str, node: Node) -> Expr | str:
        """`value`, where whatever has an effect waits for the function's actions before `node`.
        TypeError for what a program cannot append."""
        parts = parts_of(value)
        if not node.num_actions or not any(map(has_effect, parts)):
            return value
        wait = Await(self._background.start(self._actions_done(node.num_actions)))
        return ExprList(tuple(q for p in parts for q in ((wait, p) if has_effect(p) else (p,))))
