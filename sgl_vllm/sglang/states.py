"""SGLang's `ProgramState`: the prompt of a program, with SGLang's names and meanings.

Owns where SGLang's meaning differs from that of `sgl_vllm.lang.state`: text outside of turns is
kept, `join` gathers only names that are new to the parent, and `get_meta_info` has SGLang's form.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any  # Any: values of the user's types, and JSON

from sgl_vllm.lang.backends.requests import TokenLogprob
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Role, VariableExpr, name_of
from sgl_vllm.lang.state import ProgramState as CoreState
from sgl_vllm.lang.transcript import GenMeta, MediaMeta, Report, SelectMeta, Transcript
from sgl_vllm.lang.usage import Usage


@dataclass(frozen=True)
class FreeTranscript(Transcript):
    """A transcript in which text may be outside of turns.

    Text after a turn belongs to that turn, and text before the first turn to the first: the model
    reads it there, and `messages` shows it there.
    """

    def appended(self, text: str, *args: Any, **options: Any) -> Transcript:
        if self.role is not None or not self.messages:
            return super().appended(text, *args, **options)
        *before, last = self.messages
        inside = replace(self, role=last.role)
        after = super(FreeTranscript, inside).appended(text, *args, **options)
        return replace(after, role=None, messages=(*before, last.extended(text)))

    def turn_begun(self, role: Role) -> Transcript:
        if self.role is None and not self.messages:
            return replace(self, role=role, turn_start=0)
        return super().turn_begun(role)


class ProgramStateGroup(ProgramGroup["ProgramState"]):
    """The branches of a fork."""

    gathers_known_names = False


class ProgramState(CoreState):
    """The prompt that a program writes."""

    transcript_class = FreeTranscript
    group_class = ProgramStateGroup

    @property
    def stream_executor(self) -> StreamExecutor:
        """The prompt under the attributes of SGLang's executor."""
        return StreamExecutor(self)

    def get_meta_info(self, name: str | VariableExpr) -> dict[str, Any]:
        """How variable `name` was made, with SGLang's names: `id`, `finish_reason`,
        `prompt_tokens`, `completion_tokens`, `cached_tokens`, and `output_token_logprobs`,
        `output_top_logprobs`, `input_token_logprobs` and `input_top_logprobs`, which are empty
        unless they were asked for. Empty for a value that the program set itself.

        Tokens are ``(logprob, token id, text)``; the id is None, because OpenAI's API does not
        return it."""
        return _meta_info(self._variable(name_of(name)).meta)

    def __repr__(self) -> str:
        return f"ProgramState({self.text()})"


class StreamExecutor:
    """What programs read of SGLang's executor: the names of variables, and whether they exist. It
    has the methods of `ProgramState`, too."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def variable_event(self) -> dict[str, threading.Event]:
        """An event for each variable, which is set when its value exists or its `gen` has
        failed."""
        return {name: _event_of(f) for name, f in dict(self._state._stream.variables).items()}


def _event_of(future: Future[Any]) -> threading.Event:
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


# --- meta information ----------------------------------------------------------------------------


def _meta_info(meta: GenMeta | SelectMeta | MediaMeta | Report | None) -> dict[str, Any]:
    match meta:
        case None:
            return {}
        case Report(details):
            return dict(details)
        case GenMeta():
            found = _of_gen(meta)
        case SelectMeta():
            tokens = [[(logprob, None, None) for logprob in one] for one in meta.token_logprobs]
            found = {
                "normalized_prompt_logprobs": list(meta.scores),
                "input_token_logprobs": tokens,
                "output_token_logprobs": [[] for _ in tokens],
                **meta.details,
            }
        case MediaMeta():
            found = {"finish_reason": _reason(meta.finish_reason, meta.usage)}
    return {
        "prompt_tokens": meta.usage.prompt_tokens,
        "completion_tokens": meta.usage.completion_tokens,
        "cached_tokens": meta.usage.cached_prompt_tokens,
        **found,
    }


def _of_gen(meta: GenMeta) -> dict[str, Any]:
    """With n > 1, the reasons and the output's tokens are lists with an entry per text."""
    texts = [
        {
            "finish_reason": _reason(reason, meta.usage),
            "output_token_logprobs": _tokens(tokens, meta.with_text),
            "output_top_logprobs": _tops(tokens, meta.with_text),
        }
        for reason, tokens in zip(meta.finish_reason, meta.output_token_logprobs, strict=True)
    ]
    of_output = {name: [text[name] for text in texts] for name in texts[0]}
    return {
        "id": meta.request_id,
        **(of_output if len(texts) > 1 else texts[0]),
        "input_token_logprobs": _tokens(meta.prompt_logprobs, meta.with_text),
        "input_top_logprobs": _tops(meta.prompt_logprobs, meta.with_text),
    }


def _reason(reason: str, usage: Usage) -> dict[str, Any]:
    if reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    return {"type": reason, "matched": None}


def _tokens(tokens: Sequence[TokenLogprob], with_text: bool) -> list[tuple[Any, ...]]:
    return [(token.logprob, None, token.text if with_text else None) for token in tokens]


def _tops(tokens: Sequence[TokenLogprob], with_text: bool) -> list[list[tuple[Any, ...]]]:
    """The alternatives at each position, the most likely first."""
    return [
        [
            (logprob, None, text if with_text else None)
            for text, logprob in sorted(token.top, key=lambda one: -one[1])
        ]
        for token in tokens
    ]
