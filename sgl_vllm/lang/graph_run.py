"""One run of a graph: its nodes as operations of streams, in the order that the program asks for.

Every stream of a graph is a stream of the interpreter, and all operations are submitted at once.
Owns what each of them waits for:

    function          its steps (`Graph.steps`), one after the other; the first that fails ends the
                      run
    generations       the prompt before them and their variables
    tools, blocks     the same, and the function's steps before them: if the function would have
                      stopped there, they are not called
    read-only tools   their arguments, and the effects before them in their prompt or in those that
                      the function has read
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any  # Any: results of operations, of several types

from sgl_vllm.lang.errors import ProgramCancelled, reading
from sgl_vllm.lang.execution import filled
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Computed, Expr, ExprList, Gen, Tool, Value, parts_of
from sgl_vllm.lang.loop import new_future, result_of
from sgl_vllm.lang.operations import Await, has_effect, needed_by
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.tracing.deferred import (
    Argument,
    Deferred,
    Definition,
    Environment,
    Leaf,
    Prompt,
    Reading,
    Step,
    readings_of,
)
from sgl_vllm.lang.tracing.generations import Generations
from sgl_vllm.lang.tracing.graph import Graph
from sgl_vllm.lang.tracing.nodes import (
    WITH_EFFECTS,
    Evaluate,
    Fork,
    Join,
    Node,
    ReadPrompt,
    SetVariable,
    Write,
)
from sgl_vllm.lang.transcript import Variable, meta_info
from sgl_vllm.protocol.step_graph import StepName


class GraphRun(Environment):
    """One run of a graph: its arguments, its prompts, and the futures of its variables."""

    def __init__(
        self,
        graph: Graph,
        generations: Generations | None,
        state: ProgramState,
        arguments: Mapping[str, Value],
    ) -> None:
        """`generations` are those of `graph`; None if the server is not told of them."""
        super().__init__()
        self._graph = graph
        self._generations = generations
        self._arguments = arguments
        self._background = state._stream.run.background
        self._states: dict[int, ProgramState] = {0: state}
        self._groups: dict[tuple[int, ...], ProgramGroup[ProgramState]] = {}
        self._futures: dict[Definition, Future[Variable]] = {}
        if generations is not None:
            state._stream.run.lookahead.runs(generations.steps)
        self._function = _Function(graph.steps, self._take)
        self._effects = _Effects(graph.steps)

    def leaf(self, leaf: Leaf) -> Value:
        match leaf:
            case Argument(name):
                return self._arguments[name]
            case Prompt(index):
                return self._states[index]
            case Reading(definition, aspect):
                variable = self._futures[definition].result()
                match aspect:
                    case "value":
                        return variable.value
                    case "meta":
                        return meta_info(variable)
                    case "text":
                        return variable.value.text
                    case "messages":
                        return [message.as_dict() for message in variable.value.all_messages()]

    def submit(self) -> None:
        """Submit every operation. Waits for nothing."""
        try:
            for node in self._graph.nodes:
                self._submit(node)
        except BaseException as error:  # such as an argument that names a missing variable
            self._function.fail(error)
            raise

    async def result(self) -> Value:
        """Take the function's steps, once. Returns the program's result, or raises the error of the
        first step that failed."""
        steps = self._function.run()
        is_on_loop = asyncio.get_running_loop() is self._background.loop
        with reading():
            await (steps if is_on_loop else result_of(self._background.start(steps)))
            return await self._once_known(self._graph.returned)

    async def _take(self, step: Step) -> None:
        if isinstance(step, Definition):
            await result_of(self._futures[step])
        else:
            await self._once_known(step)

    async def _once_known(self, wanted: Value) -> Value:
        """`value`, once the variables that it depends on are there."""
        for read in readings_of([wanted]):
            await result_of(self._futures[read])
        return self.value(wanted)

    # --- submitting ----------------------------------------------------------------------------

    def _submit(self, node: Node) -> None:
        state = self._states[node.stream]
        stream = state._stream
        match node.operation:
            case Write(pieces):
                self._append(stream, Deferred("concat", pieces), node)
            case Evaluate(expr):
                self._append(stream, expr, node)
            case SetVariable(name, value) if isinstance(value, Deferred):
                stream.bind(name, self._background.start(self._assigned(value)))
            case SetVariable(name, value):
                state.set_var(name, value)
            case ReadPrompt():
                transcript = stream.read()

                async def read_prompt() -> Variable:
                    return Variable(await result_of(transcript), text="")

                self._futures[node.writes[0]] = self._background.start(read_prompt())
            case Fork(children):
                self._groups[children] = state.fork(len(children))
                self._states.update(zip(children, self._groups[children], strict=True))
            case Join(branches, mode):
                self._groups[branches].join(mode)  # type: ignore[arg-type]
        for definition in node.writes:
            if definition.name is not None:
                self._futures[definition] = stream.variables[definition.name]
        self._effects.submitted(node, stream.last_effect)

    async def _assigned(self, value: Deferred) -> Variable:
        return Variable.of(await self._once_known(value))

    def _append(self, stream: Stream, value: Expr | Deferred, node: Node) -> None:
        """Append a value: now if it depends on arguments alone, else once its variables exist."""
        if node.may_call:
            stream.effects_seen = self._effects.seen(node.num_steps)
        if not readings_of([value]):
            try:
                known = self._in_turn(self._named(self.value(value), node), node)
            except Exception:  # the function may have to stop before it gets there
                pass
            else:
                stream.append(known)
                return
        is_text = isinstance(value, Deferred) and value.is_text
        variables = {} if is_text else dict(stream.variables)
        name = next((made.name for made in node.writes), None)
        match value:
            case Deferred("sgl.read_only_tool", (_, function, *_)) if callable(function):

                async def with_values() -> Tool:
                    tool: Tool = await self._once_known(value)
                    return await filled(tool, needed_by(tool, variables))

                waits_for = [self._futures[read] for read in node.reads]
                future = stream.submit_read_only(Tool(name, function), with_values, waits_for)
            case _:

                async def computed() -> Expr | str:
                    return self._in_turn(self._named(await self._once_known(value), node), node)

                calls = isinstance(value, Deferred) and value.operation in WITH_EFFECTS
                future = stream.submit(Computed(computed, name), variables, has_effect=calls)
        if name is not None:
            stream.bind(name, future)

    def _named(self, value: Expr | str, node: Node) -> Expr | str:
        """`value`, whose generations have the names of the steps that they are."""
        generations = self._generations
        if generations is None or node.index not in generations.of_node:
            return value
        digest, steps = generations.steps.digest, iter(generations.of_node[node.index])

        def named(part: Expr) -> Expr:
            if not isinstance(part, Gen) or (index := next(steps, None)) is None:
                return part
            return replace(part, step=StepName(digest, index))

        return ExprList(tuple(map(named, parts_of(value))))

    def _in_turn(self, value: Expr | str, node: Node) -> Expr | str:
        """`value`, where whatever has an effect waits for the function's steps before `node`.
        TypeError for what a program cannot append."""
        parts = parts_of(value)
        gate = self._function.gate(node.num_steps) if any(map(has_effect, parts)) else None
        if gate is None:
            return value
        wait = Await(gate)
        return ExprList(tuple(q for p in parts for q in ((wait, p) if has_effect(p) else (p,))))


class _Function:
    """The steps of a program's function, and the gates behind them.

    Invariant: when the steps have ended, no gate is open. Gates are asked for before the steps run,
    or on the loop that runs them.
    """

    def __init__(self, steps: Sequence[Step], take: Callable[[Step], Awaitable[None]]) -> None:
        self._steps = steps
        self._take = take
        self._num_taken = 0
        self._error: Exception | None = None
        self._gates: dict[int, Future[None]] = {}

    async def run(self) -> None:
        """Take all steps. Raises the error of the first that fails, also at the gates behind it."""
        try:
            for step in self._steps:
                await self._take(step)
                self._num_taken += 1
                if self._num_taken in self._gates:
                    self._gates.pop(self._num_taken).set_result(None)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """No further step is taken, because of `error`."""
        reason = "the program's function was interrupted"
        self._error = error if isinstance(error, Exception) else ProgramCancelled(reason)
        for gate in tuple(self._gates.values()):
            gate.set_exception(self._error)

    def gate(self, num_steps: int) -> Future[None] | None:
        """Done, or failed, when the first `num_steps` steps are; None if they are taken already."""
        if num_steps <= self._num_taken:
            return None
        gate = self._gates.setdefault(num_steps, new_future())
        if self._error is not None and not gate.done():
            gate.set_exception(self._error)
        return gate


class _Effects:
    """Which effects the function has waited for, by the definitions that it has read."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._num_steps = 0  # of those, in `_newest` already
        self._before: dict[Definition, tuple[int, Future[Any]]] = {}
        self._newest: dict[int, tuple[int, Future[Any]]] = {}

    def submitted(self, node: Node, last_effect: Future[Any] | None) -> None:
        """`node` was submitted; `last_effect` is its stream's, which comes before what it made."""
        if last_effect is not None and not isinstance(node.operation, SetVariable):
            for definition in node.writes:
                self._before[definition] = node.stream, last_effect

    def seen(self, num_steps: int) -> tuple[Future[Any], ...]:
        """Those that have ended after the first `num_steps` steps: the last one of each stream."""
        for step in self._steps[self._num_steps : num_steps]:
            if isinstance(step, Definition) and step in self._before:
                stream, effect = self._before[step]
                if self._newest.get(stream, (-1, effect))[0] < step.node:
                    self._newest[stream] = step.node, effect
        self._num_steps = max(self._num_steps, num_steps)
        return tuple(effect for _, effect in self._newest.values())
