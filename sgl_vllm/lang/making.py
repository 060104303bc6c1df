"""Runs `speech`, `picture` and `transcribe`: asks the backend, and records what it made.

Owns what these expressions do to a prompt. Their requests are in `backends/requests.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_vllm.lang.backends.requests import (
    MediaRequest,
    PictureRequest,
    SpeechRequest,
    SpokenRequest,
    TranscriptionRequest,
    WatchMedia,
)
from sgl_vllm.lang.generation import open_prompt
from sgl_vllm.lang.ir import MediaExpr, Picture, Speech, SpokenGen, Transcription, Var
from sgl_vllm.lang.media import recording_of
from sgl_vllm.lang.prompts import ChatPrompt
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.transcript import MediaMeta, Transcript, Variable


async def make(
    expr: MediaExpr,
    run: Run,
    before: Transcript,
    known: Mapping[str, Variable],
    watch: WatchMedia | None,
) -> tuple[Variable, Transcript]:
    """The variable that `expr` makes, and the prompt with what it appends to `before`.

    `known` has the variables that it reads, and `watch` receives speech as it arrives. Raises
    BackendError, and ValueError for a prompt or a value that it cannot use.
    """
    answer = await run.backend.media(_request(expr, run, before, known, watch))
    run.usage += answer.usage
    text = "" if isinstance(expr, Speech | Picture) else answer.text
    usage = answer.usage if isinstance(expr, SpokenGen) else None  # of a request with this prompt
    after = before.appended(text, "media", expr.name, usage=usage, media=answer.media)
    value = answer.text if isinstance(expr, Transcription) else answer.media
    meta = MediaMeta(answer.finish_reason, answer.usage)
    variable = Variable(value, answer.text, meta)
    return variable, after.seen() if isinstance(expr, SpokenGen) else after


def _request(
    expr: MediaExpr,
    run: Run,
    before: Transcript,
    known: Mapping[str, Variable],
    watch: WatchMedia | None,
) -> MediaRequest:
    def text_of(given: str | Var) -> str:
        return known[given.name].text if isinstance(given, Var) else given

    match expr:
        case Speech(_, options, text, voice):
            return SpeechRequest(options, text_of(text), voice, watch)
        case SpokenGen(_, options, sampling, voice):
            prompt = open_prompt(before, run.backend, "a spoken answer")
            if not isinstance(prompt, ChatPrompt):
                raise ValueError("speech without a text answers a chat: put it in assistant(...)")
            sampling = sampling.over(run.defaults)
            if sampling.stop_regex:
                raise ValueError("stop_regex cannot cut a spoken answer: use stop")
            return SpokenRequest(options, prompt, sampling, voice, watch)
        case Picture(_, options, description, size):
            described = before.last_text if description is None else text_of(description)
            return PictureRequest(options, described, size)
        case Transcription(_, options, audio, language, hint):
            recording = recording_of(known[audio.name].value) if isinstance(audio, Var) else audio
            return TranscriptionRequest(options, recording, language, hint)
    raise TypeError(f"{type(expr).__name__} cannot be made")
