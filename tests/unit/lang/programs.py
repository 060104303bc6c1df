"""Random programs, and an endpoint on which each has exactly one right outcome.

A `RandomProgram` is a small syntax tree that writes a prompt, as a plain function or as an ``async
def``. `markov` is an endpoint whose text depends only on the end of the prompt: after its own
text, it continues exactly as it would have without the interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.usage import Usage
from tests.unit.lang.conftest import Completion, FakeServer

ALPHABET = "ab .\n"
MAX_CHARS = 400
MAX_NEW_TOKENS = 12
"""What the programs are to be run with: `run(**RUN)`."""

RUN: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0}


def markov(seed: int, *, memory: int = 2, one_in: int = 12) -> Callable[[str], str]:
    """Writes characters of `ALPHABET` that depend on the last `memory` ones, and ends in some
    states.

    For every prompt p and every prefix t of document(p), document(p + t) begins with the rest.
    """

    def document(prompt: str) -> str:
        text = prompt
        for _ in range(MAX_CHARS):
            number = zlib.crc32(f"{seed}/{text[-memory:]}".encode())
            if number % one_in == 0:
                break
            text += ALPHABET[number // one_in % len(ALPHABET)]
        return text[len(prompt) :]

    return document


class ScriptedBackend(Backend):
    """A `FakeServer` with a document, without HTTP in between. `calls` are the prompts sent."""

    def __init__(
        self,
        document: Callable[[str], str],
        tokens_of: Callable[[str], list[str]] = list,
        *,
        tokens_per_chunk: int = 1,
        tells_tokens: bool = True,
    ) -> None:
        self.server = FakeServer(document=document, tokens_of=tokens_of)
        self.tokens_per_chunk = tokens_per_chunk
        self.tells_tokens = True
        self._really_tells_tokens = tells_tokens
        self.calls: list[str] = []

    @property
    def name(self) -> str:
        return "the script"

    @staticmethod
    def _text_of(prompt: Prompt) -> str:
        if not isinstance(prompt, ChatPrompt):
            return prompt.text
        text = "".join(f"<{m.role}>{m.text}</>" for m in prompt.messages)
        if prompt.ending == "continue":
            return text.removesuffix("</>")
        return text + ("<assistant>" if prompt.ending == "generate" else "")

    async def generate(self, request: GenRequest) -> GenAnswer:
        prompt = self._text_of(request.prompt)
        self.calls.append(prompt)
        await asyncio.sleep(0)
        body = {"stop": request.sampling.stop, "max_tokens": request.sampling.max_new_tokens}
        completion = self.server.complete(prompt, body)
        text, reason, num_tokens = completion.text, completion.finish_reason, len(completion.tokens)
        if request.watch is not None:
            text, reason, num_tokens = await self._stream(completion, request)
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=num_tokens, calls=1)
        return GenAnswer((Generated(text, reason),), usage)

    async def _stream(self, completion: Completion, request: GenRequest) -> tuple[str, str, int]:
        assert request.watch is not None
        text = ""
        for piece, num_tokens in completion.pieces(self.tokens_per_chunk):
            await asyncio.sleep(0)
            text += piece
            told = num_tokens if self._really_tells_tokens else None
            if piece and request.watch(piece, told):
                return text, "length", num_tokens
        return completion.text, completion.finish_reason, len(completion.tokens)

    async def warm(self, prompt: Prompt) -> Usage:
        self.calls.append(self._text_of(prompt))
        return Usage(calls=1)


Step: TypeAlias = tuple[Any, ...]
"""What a program does: a kind with its arguments.

    ("const", text)  ("arg",)  ("gen", name, stop, max_tokens)
    ("use", name)              append a variable without waiting for it
    ("await", name)            wait for a variable, and append its text if it is long enough
    ("scope", name, steps)  ("fork", several steps, mode)  ("turn", role, steps)
"""
Steps: TypeAlias = tuple[Step, ...]


async def write(s: Any, steps: Steps, arg: str, read: Callable[[Any], Awaitable[object]]) -> None:
    """Write a program on the prompt `s`, whose variables `read` waits for."""
    for step in steps:
        match step:
            case ("const", text):
                s += text
            case ("arg",):
                s += arg
            case ("gen", name, stop, max_tokens):
                s += sgl.gen(name, stop=stop, max_tokens=max_tokens)
            case ("use", name):
                s += sgl.var(name)
            case ("await", name):
                value = str(await read(s[name]))
                s += f"({value})" if len(value) > 2 else "-"
            case ("scope", name, inner):
                with s.var_scope(name):
                    await write(s, inner, arg, read)
            case ("fork", branches, mode):
                forks = s.fork(len(branches))
                for branch, inner in zip(forks, branches, strict=True):
                    await write(branch, inner, arg, read)
                forks.join(mode)
            case ("turn", role, inner):
                with getattr(s, role)():
                    await write(s, inner, arg, read)


async def as_it_is(value: Any) -> Any:
    return value


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


@dataclass(frozen=True)
class RandomProgram:
    """`names` are the variables of its state at the end."""

    steps: Steps
    names: tuple[str, ...]
    args: dict[str, str] = field(default_factory=lambda: {"arg": "b"})

    @property
    def sync_function(self) -> Callable[..., None]:
        def program(s: Any, arg: str) -> None:
            with contextlib.suppress(StopIteration):  # it never waits
                write(s, self.steps, arg, as_it_is).send(None)

        return program

    @property
    def async_function(self) -> Callable[..., Any]:
        async def program(s: Any, arg: str) -> None:
            await write(s, self.steps, arg, awaited)

        return program

    def outcome(self, state: sgl.ProgramState) -> tuple[Any, ...]:
        """Everything that must not depend on how the program was run."""
        return {name: state[name] for name in self.names}, state.text(), state.messages()


# Stops followed by constants are frequent, because speculation answers there.
_stops = st.sampled_from([None, "\n", ".", ["\n", "."], (" ", "b."), ("ab", "b")])
_texts = st.sampled_from(["a", "\n", ".", "\na", ". b", " ", "ab", "b.\n", "a" * 70])
_max_tokens = st.sampled_from([None, 1, 2, 3, 5, 8])


@st.composite
def _steps(draw: Any, known: list[str], depth: int) -> Steps:
    """Some steps. Adds the variables they make to `known`."""
    steps: list[Step] = []
    kinds = ["const", "gen", "gen", "arg", "use", "scope", "await"]
    if depth:
        kinds.append("fork")
    for _ in range(draw(st.integers(1, 5 if depth else 3))):
        kind = draw(st.sampled_from(kinds))
        if kind in ("use", "await") and not known:
            kind = "gen"
        match kind:
            case "const":
                steps.append(("const", draw(_texts)))
            case "arg":
                steps.append(("arg",))
            case "gen":
                name = f"v{len(known)}"
                steps.append(("gen", name, draw(_stops), draw(_max_tokens)))
                known.append(name)
            case "use":
                steps.append(("use", draw(st.sampled_from(known))))
            case "await":
                steps.append(("await", draw(st.sampled_from(known))))
            case "scope":
                inner = draw(_steps(known, 0))
                name = f"v{len(known)}"
                steps.append(("scope", name, inner))
                known.append(name)
            case "fork":
                branches, made = [], list(known)
                for _ in range(draw(st.integers(1, 3))):
                    names = list(known)
                    branches.append(draw(_steps(names, depth - 1)))
                    made += [name for name in names if name not in made]
                mode = draw(st.sampled_from(["gather_variable", "concate_and_append"]))
                steps.append(("fork", tuple(branches), mode))
                if mode == "gather_variable":
                    known[:] = made
    return tuple(steps)


@st.composite
def programs(draw: Any) -> RandomProgram:
    """Programs with constants, generations, uses of variables, scopes and forks; some are chats."""
    names: list[str] = []
    if draw(st.booleans()):
        turns: list[Step] = []
        for _ in range(draw(st.integers(1, 2))):
            turns.append(("turn", "user", (("const", draw(_texts)), ("arg",))))
            inner = draw(_steps(names, 1))
            turns.append(("turn", "assistant", inner))
        return RandomProgram(tuple(turns), tuple(names))
    steps = (("const", draw(_texts)), *draw(_steps(names, 2)))
    return RandomProgram(steps, tuple(names))
