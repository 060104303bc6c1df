"""Runs one `gen`: asks the backend, streams the text, and reads it as a value.

Owns what happens between a `Gen` expression and its variable: sampling options, stop patterns,
text generated ahead, reasoning, parsing and retries. How the result changes the prompt is in
`execution.py`; the rules for text generated ahead are in `speculation.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest, Watch, no_hints
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.ir import Gen
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.sampling import each_of
from sgl_vllm.lang.speculation import Ahead, AheadBudget, Lookout, can_be_speculated
from sgl_vllm.lang.text import shortened
from sgl_vllm.lang.transcript import GenMeta, Transcript, Variable
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.hints import Hints

MAX_SHOWN_CHARS = 200


def open_prompt(transcript: Transcript, backend: Backend, feature: str) -> Prompt:
    """The prompt, which must end where `feature` (gen or select) can write text.

    Raises UnsupportedError where the backend cannot write, ValueError outside of a turn.
    """
    prompt = transcript.prompt()
    if not isinstance(prompt, ChatPrompt) or prompt.ending == "generate":
        return prompt
    if prompt.ending == "continue":
        if backend.continues_turns:
            return prompt
        raise UnsupportedError(
            backend.name,
            f"{feature} after other text in a turn",
            f"let the {transcript.role} turn begin with it, or try "
            f"@function(num_api_spec_tokens=...)",
        )
    if transcript.role is None:
        raise ValueError(f"{feature} outside of a turn: put it in assistant(...)")
    raise UnsupportedError(
        backend.name,
        f"{feature} at the start of a {transcript.role} turn",
        "begin the turn with some text",
    )


@dataclass(eq=False)
class Generation:
    """One `gen` on `transcript`, answered by text generated ahead of it if that matches, otherwise
    by the backend.

    `ahead` is that text, and afterwards what is left of it or was generated instead. `first` is the
    text that joins the prompt, and `usage` the cost of its request.

    Args:
        show: receives the text generated so far, in a streamed run.
        hints: what is known to follow an attempt, given whether it is the last one.
    """

    expr: Gen
    run: Run
    transcript: Transcript
    ahead: Ahead | None
    show: Callable[[str], None]
    hints: Callable[[bool], Hints]

    def __post_init__(self) -> None:
        self.first = Generated("", "")
        self.usage = Usage()
        self._backend = self.run.backend
        self._sampling = self.expr.sampling.over(self.run.defaults)

    async def variable(self) -> Variable:
        """Generate until the text can be read as a value, or the retries are used up.

        Raises ValueError with the reader's error if it cannot, and BackendError.
        """
        expr = self.expr
        for retries_left in reversed(range(expr.retries + 1)):
            answer = await self._ask(is_last=not retries_left)
            self.run.usage += answer.usage
            reasonings, texts = _split_reasoning(expr, answer.texts)
            try:
                values = [_read_as(expr, text) for text in texts]
            except ValueError:
                if not retries_left:
                    raise
                self.ahead = None
                self.show("")
            else:
                break
        self.first, self.usage = texts[0], answer.usage
        meta = GenMeta(
            finish_reason=tuple(text.finish_reason for text in texts),
            output_token_logprobs=tuple(text.logprobs for text in texts),
            usage=answer.usage,
            prompt_logprobs=answer.prompt_logprobs,
            with_text=self._sampling.return_text_in_logprobs is not False,
            request_id=answer.request_id,
        )
        if (self._sampling.n or 1) > 1:
            return Variable(values, self.first.text, meta, reasonings)
        return Variable(values[0], self.first.text, meta, reasonings[0])

    async def _ask(self, *, is_last: bool) -> GenAnswer:
        num_tokens_ahead = self.run.num_api_spec_tokens
        if num_tokens_ahead and can_be_speculated(self.expr, self._sampling):
            return await self._ask_speculatively(num_tokens_ahead)
        hints = no_hints if num_tokens_ahead else functools.partial(self.hints, is_last)
        return await self._ask_plainly(functools.cache(hints))

    # --- one request per generation ------------------------------------------------------------

    async def _ask_plainly(self, hints: Callable[[], Hints] = no_hints) -> GenAnswer:
        self.ahead = None
        stop = _StopRegex(self._sampling.stop_regex)
        request = GenRequest(
            open_prompt(self.transcript, self._backend, "gen"),
            self._sampling,
            self.expr.constraint,
            self._watch(stop),
            hints,
        )
        try:
            answer = await self._backend.generate(request)
        except BackendError as error:
            if error.status == 400 and (constraint := request.constraint) is not None:
                shown = shortened(constraint.text, MAX_SHOWN_CHARS)
                error.add_note(f"The request's {constraint.kind.name}: {shown}")
            raise
        if not stop.patterns:
            return answer
        return replace(answer, texts=tuple(stop.cut(text) for text in answer.texts))

    def _watch(self, stop: _StopRegex) -> Watch | None:
        """A watcher if the run is streamed or a stop pattern is set; None otherwise."""
        if self._sampling.n != 1 or not (self.run.is_streamed or stop.patterns):
            return None

        # Readers must not see text that a stop pattern or a retry may still remove.
        is_shown = self.run.is_streamed and not stop.patterns and not self.expr.retries
        reasoning = self.expr.reasoning
        raw = ""

        def watch(piece: str, num_tokens: int | None) -> bool:
            nonlocal raw
            raw += piece
            if is_shown:
                self.show(reasoning.begun(raw) if reasoning else raw)
            return stop.is_settled(raw)

        return watch

    # --- API speculative execution -------------------------------------------------------------

    async def _ask_speculatively(self, num_tokens_ahead: int) -> GenAnswer:
        """Answer from text generated ahead, or by a generation that runs past its end.

        If the backend cannot continue a turn, the model is asked for the whole turn, and what the
        program has already written in it must come back unchanged.
        """
        if self.ahead is not None:
            answer = self.ahead.answer(self._sampling)
            if answer is not None:
                self._backend.ahead_budget.count(AheadBudget.SAVED)
                saved = Usage(saved_calls=1, saved_prompt_tokens=self.ahead.num_prompt_tokens_here)
                text, self.ahead = answer
                return GenAnswer((text,), saved)
        transcript, backend = self.transcript, self._backend
        begun = ""
        prompt = transcript.prompt()
        if (
            isinstance(prompt, ChatPrompt)
            and prompt.ending == "continue"
            and transcript.role == "assistant"
            and not backend.continues_turns
        ):
            begun = transcript.turn_text
            prompt = replace(prompt, messages=transcript.messages, ending="generate")
        else:
            prompt = open_prompt(transcript, backend, "gen")
        try:
            ahead, usage = await self._run_ahead(prompt, num_tokens_ahead, begun)
        except BackendError as error:
            if begun or error.status != 400:
                raise
            return await self._ask_plainly()  # the additional tokens may exceed a limit
        if begun:
            after = ahead.after(begun)
            if after is None:
                raise UnsupportedError(
                    backend.name,
                    f"a turn that begins with {begun!r}",
                    f"the model began it with {ahead.text[: len(begun) + 20]!r}; ask for this "
                    f"beginning in the prompt",
                )
            ahead = after
        answer = ahead.answer(self._sampling)
        if answer is None and not begun:
            if ahead.marks is None:
                backend.tells_tokens = False
            else:  # the end is inside of several tokens that came at once
                backend.ahead_budget.count(AheadBudget.WASTED)
            plain = await self._ask_plainly()
            return replace(plain, usage=plain.usage + usage)
        if answer is None:
            raise UnsupportedError(
                backend.name,
                "gen after other text in a turn",
                f"the turn {ahead.text!r} ends before it; raise max_tokens",
            )
        text, self.ahead = answer
        return GenAnswer((text,), usage)

    async def _run_ahead(
        self, prompt: Prompt, num_tokens_ahead: int, begun: str
    ) -> tuple[Ahead, Usage]:
        backend = self._backend
        is_ahead = backend.tells_tokens and backend.ahead_budget.allows_a_call
        if not (is_ahead or begun):
            backend.ahead_budget.count(AheadBudget.ASKED_PLAINLY)
        lookout = Lookout(self._sampling, num_tokens_ahead, begun, tells_tokens=is_ahead)

        def watch(piece: str, num_tokens: int | None) -> bool:
            is_enough = lookout(piece, num_tokens)
            if self.run.is_streamed and (shown := lookout.shown()) is not None:
                self.show(shown)
            return is_enough

        answer = await self._backend.generate(GenRequest(prompt, lookout.sampling, watch=watch))
        return lookout.ahead(answer.texts[0], answer.usage.prompt_tokens), answer.usage


# --- generated text ------------------------------------------------------------------------------


class _StopRegex:
    """Patterns that end a generation. The match and everything after it is removed."""

    def __init__(self, patterns: str | tuple[str, ...] | None) -> None:
        self.patterns = [re.compile(pattern) for pattern in each_of(patterns)]

    def position(self, text: str) -> int | None:
        """Where the first match begins."""
        found = [match.start() for p in self.patterns if (match := p.search(text))]
        return min(found, default=None)

    def is_settled(self, text: str) -> bool:
        """Whether a match ends before the end of the text so far. One that ends there depends on
        what comes next: `END\\b`, `\\n(?! )`."""
        return any((match := p.search(text)) and match.end() < len(text) for p in self.patterns)

    def cut(self, generated: Generated) -> Generated:
        position = self.position(generated.text)
        return generated if position is None else generated.cut(position)


def _split_reasoning(
    expr: Gen, texts: tuple[Generated, ...]
) -> tuple[list[str | None], tuple[Generated, ...]]:
    """The reasoning in each text, and the texts without it."""
    if expr.reasoning is None:
        return [None] * len(texts), texts
    parts = [
        expr.reasoning.split(text.text)
        if text.reasoning is None
        else (text.reasoning.strip(), text.text.strip())
        for text in texts
    ]
    answers = (
        replace(t, text=answer, forced=()) for t, (_, answer) in zip(texts, parts, strict=True)
    )
    return [reasoning for reasoning, _ in parts], tuple(answers)


def _read_as(expr: Gen, generated: Generated) -> object:
    """The value of a generated text. ValueError if it does not have the required form."""
    text = generated.text
    if expr.parse is None:
        return text
    try:
        return expr.parse(text)
    except (ValueError, KeyError) as error:
        is_cut = generated.finish_reason == "length"
        reason = "it was cut off, raise max_tokens" if is_cut else str(error)
        if "\n" in reason:  # pydantic's, which the traceback shows as the cause
            reason = "see the error above"
        shown = shortened(text, MAX_SHOWN_CHARS)
        raise ValueError(
            f"the generated text {shown!r} does not have the required form: {reason}"
        ) from error
