"""Random programs, and an endpoint on which each has exactly one right outcome.

A `RandomProgram` is a small syntax tree that writes a prompt, as a plain function or as an ``async
def``. `markov` is an endpoint whose text depends only on the end of the prompt: after its own
text, it continues exactly as it would have without the interruption.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
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


@dataclass(frozen=True)
class Const:
    text: str


@dataclass(frozen=True)
class Arg:
    """The program's argument."""


@dataclass(frozen=True)
class Gen:
    name: str
    stop: str | tuple[str, ...] | None
    max_tokens: int | None


@dataclass(frozen=True)
class Use:
    """Append a variable without waiting for it."""

    name: str


@dataclass(frozen=True)
class Await:
    """Wait for a variable in the program's function, and append its text if it is long enough."""

    name: str


@dataclass(frozen=True)
class Scope:
    name: str
    steps: Steps


@dataclass(frozen=True)
class Fork:
    branches: tuple[Steps, ...]
    mode: str


@dataclass(frozen=True)
class Turn:
    role: str
    steps: Steps


Step: TypeAlias = Const | Arg | Gen | Use | Await | Scope | Fork | Turn
Steps: TypeAlias = tuple[Step, ...]


def _expr(step: Step, arg: str) -> Any:
    match step:
        case Const(text):
            return text
        case Arg():
            return arg
        case Gen(name, stop, max_tokens):
            return sgl.gen(name, stop=stop, max_tokens=max_tokens)
        case Use(name):
            return sgl.var(name)
    raise TypeError(step)


def write(s: Any, steps: Steps, arg: str) -> None:
    """Write a program on the prompt of a plain function."""
    for step in steps:
        match step:
            case Await(name):
                value = str(s[name])
                s += f"({value})" if len(value) > 2 else "-"
            case Scope(name, inner):
                with s.var_scope(name):
                    write(s, inner, arg)
            case Fork(branches, mode):
                forks = s.fork(len(branches))
                for branch, inner in zip(forks, branches, strict=True):
                    write(branch, inner, arg)
                forks.join(mode)
            case Turn(role, inner):
                with getattr(s, role)():
                    write(s, inner, arg)
            case _:
                s += _expr(step, arg)


async def write_async(s: Any, steps: Steps, arg: str) -> None:
    """Write a program on the prompt of an ``async def``."""
    for step in steps:
        match step:
            case Await(name):
                value = str(await s[name])
                s += f"({value})" if len(value) > 2 else "-"
            case Scope(name, inner):
                with s.var_scope(name):
                    await write_async(s, inner, arg)
            case Fork(branches, mode):
                forks = s.fork(len(branches))
                for branch, inner in zip(forks, branches, strict=True):
                    await write_async(branch, inner, arg)
                forks.join(mode)
            case Turn(role, inner):
                with getattr(s, role)():
                    await write_async(s, inner, arg)
            case _:
                s += _expr(step, arg)


@dataclass(frozen=True)
class RandomProgram:
    """`names` are the variables of its state at the end."""

    steps: Steps
    names: tuple[str, ...]
    args: dict[str, str] = field(default_factory=lambda: {"arg": "b"})

    @property
    def sync_function(self) -> Callable[..., None]:
        def program(s: Any, arg: str) -> None:
            write(s, self.steps, arg)

        return program

    @property
    def async_function(self) -> Callable[..., Any]:
        async def program(s: Any, arg: str) -> None:
            await write_async(s, self.steps, arg)

        return program

    def outcome(self, state: sgl.ProgramState) -> tuple[Any, ...]:
        """Everything that must not depend on how the program was run."""
        return {name: state[name] for name in self.names}, state.text(), state.messages()


# Stops followed by constants are frequent, because speculation answers there.
_stops = st.sampled_from([None, "\n", ".", ("\n", "."), (" ", "b."), ("ab", "b")])
_texts = st.sampled_from(["a", "\n", ".", "\na", ". b", " ", "ab", "b.\n", "a" * 70])
_max_tokens = st.sampled_from([None, 1, 2, 3, 5, 8])


@st.composite
def _steps(draw: Any, known: list[str], depth: int, *, reads: bool, chat: bool) -> Steps:
    """Some steps. Adds the variables they make to `known`."""
    steps: list[Step] = []
    kinds = ["const", "gen", "gen", "arg", "use", "scope", *(["await"] if reads else [])]
    if depth:
        kinds.append("fork")
    for _ in range(draw(st.integers(1, 5 if depth else 3))):
        kind = draw(st.sampled_from(kinds))
        if kind in ("use", "await") and not known:
            kind = "gen"
        match kind:
            case "const":
                steps.append(Const(draw(_texts)))
            case "arg":
                steps.append(Arg())
            case "gen":
                name = f"v{len(known)}"
                steps.append(Gen(name, draw(_stops), draw(_max_tokens)))
                known.append(name)
            case "use":
                steps.append(Use(draw(st.sampled_from(known))))
            case "await":
                steps.append(Await(draw(st.sampled_from(known))))
            case "scope":
                inner = draw(_steps(known, 0, reads=reads, chat=chat))
                name = f"v{len(known)}"
                steps.append(Scope(name, inner))
                known.append(name)
            case "fork":
                branches, made = [], list(known)
                for _ in range(draw(st.integers(1, 3))):
                    names = list(known)
                    branches.append(draw(_steps(names, depth - 1, reads=reads, chat=chat)))
                    made += [name for name in names if name not in made]
                mode = draw(st.sampled_from(["gather_variable", "concate_and_append"]))
                steps.append(Fork(tuple(branches), mode))
                if mode == "gather_variable":
                    known[:] = made
    return tuple(steps)


@st.composite
def programs(draw: Any, *, reads: bool = True, roles: bool = True) -> RandomProgram:
    """Programs with constants, generations, uses of variables, scopes, forks and turns.

    With `reads`, their functions wait for variables and write text that depends on them. With
    `roles`, some are chats.
    """
    names: list[str] = []
    if roles and draw(st.booleans()):
        turns: list[Step] = []
        for _ in range(draw(st.integers(1, 2))):
            turns.append(Turn("user", (Const(draw(_texts)), Arg())))
            inner = draw(_steps(names, 1, reads=reads, chat=True))
            turns.append(Turn("assistant", inner))
        return RandomProgram(tuple(turns), tuple(names))
    steps = (Const(draw(_texts)), *draw(_steps(names, 2, reads=reads, chat=False)))
    return RandomProgram(steps, tuple(names))
