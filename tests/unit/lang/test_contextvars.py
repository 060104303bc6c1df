"""Contextvars: a program's function and its tools have those of the call that runs the program."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

import sgl_vllm as sgl
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.timeout(20)

user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


@sgl.function
def plain(s):
    seen = user.get()
    user.set("the function's own")
    s += sgl.tool("t", user.get)
    return seen, s["t"]


@sgl.function
async def native(s):
    seen = user.get()
    s += sgl.tool("t", user.get)
    return seen, await s["t"]


def streamed(program, backend):
    state = program.run(stream=True, backend=backend)
    state.text()
    return [state]


def streamed_async(program, backend):
    async def main():
        return await program.run_async(stream=True, backend=backend)

    state = asyncio.run(main())
    state.text()
    return [state]


RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda program, backend: [program.run(backend=backend)],
    "run_async": lambda program, backend: [asyncio.run(program.run_async(backend=backend))],
    "stream": streamed,
    "stream_async": streamed_async,
    "run_batch": lambda program, backend: program.run_batch([{}] * 3, backend=backend),
    "generator": lambda program, backend: [
        *program.run_batch([{}] * 3, backend=backend, generator_style=True)
    ],
    "run_batch_async": lambda program, backend: asyncio.run(
        program.run_batch_async([{}] * 3, backend=backend)
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("program", [plain, native], ids=["sync", "async"])
def test_the_function_and_its_tools_have_those_of_the_caller(run, program):
    def call():
        user.set("me")
        return run(program, ScriptedBackend())

    states = contextvars.copy_context().run(call)
    assert {state.ret_value for state in states} == {("me", "me")}


def test_what_a_function_in_a_thread_sets_is_seen_by_no_other_item():
    def call():
        user.set("me")
        states = plain.run_batch([{}] * 20, backend=ScriptedBackend(), num_threads=1)
        assert user.get() == "me"
        return states

    states = contextvars.copy_context().run(call)
    assert {state.ret_value for state in states} == {("me", "me")}
