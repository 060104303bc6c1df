"""API speculative execution: answering several `gen`s from one generation.

Owns the text that was generated past the end of a `gen`, and the rules for answering later
operations from it. Pure: sends nothing. (arXiv 2312.07104, section 5.) ::

    program    "Name:" + gen("name", stop="\\n") + "\\nJob:" + gen("job", stop="\\n")
    generated  " Ada Lovelace\\nJob: mathematician\\nAge: 36\\n"
               [-- name ----][ text ][--- job ---][-- ahead: used if the program continues so
                             must match; otherwise the rest is dropped and the server is called

Variables must be the same as without speculation, so text is used only if it is certain to be what
the server would have answered. Where `max_tokens` cuts a text is known only if the server reports
tokens while it streams. In that case, the program's text in between must also end at a token
boundary: otherwise the prompt would be tokenized differently and the model might continue
differently. Text that was sampled is one sample, so no two branches are answered from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from sgl_vllm.lang.backends.requests import Generated
from sgl_vllm.lang.ir import Gen
from sgl_vllm.lang.sampling import Sampling, each_of


class AheadBudget:
    """Whether a backend is asked past the end of a generation, as far as that has paid so far.

    If a server sends several tokens at once and a text ends inside of them, what was generated
    ahead is of no use, and the call is made again. There may be one such call, another one for each
    call that was saved since, and another one for every 16 that were made without. So a server that
    fell behind once keeps its speculation, and one that always sends several tokens at once makes
    at most a sixteenth more calls.
    """

    SAVED = 1.0
    WASTED = -1.0
    ASKED_PLAINLY = 1 / 16

    _MOST = 4.0
    _calls = 1.0  # that may be wasted

    @property
    def allows_a_call(self) -> bool:
        """Whether one more call may be wasted."""
        return self._calls >= 1

    def count(self, calls: float) -> None:
        """A call was saved, wasted, or made without asking for anything ahead."""
        self._calls = min(self._calls + calls, self._MOST)


def can_be_speculated(expr: Gen, sampling: Sampling) -> bool:
    """Whether a generation may run past its end, or be answered by one that did."""
    return (
        expr.constraint is None
        and expr.reasoning is None
        and sampling.n == 1
        and not sampling.min_new_tokens
        and not sampling.ignore_eos
        and not sampling.return_logprob
        and not sampling.stop_token_ids
        and sampling.stop_regex is None
    )


def without_end(sampling: Sampling) -> Sampling:
    """The options that two generations must share for one to answer the other."""
    return replace(sampling, stop=None, max_new_tokens=None)


def first_stop(text: str, stop: str | tuple[str, ...] | None) -> tuple[int, int] | None:
    """Where the first `stop` text is in `text`, as a half-open interval; None if there is none.

    As in vLLM, the first is the one that ends first or, if several end together, the one that is
    listed first.
    """
    found = [(at, at + len(s)) for s in each_of(stop) if s and (at := text.find(s)) >= 0]
    return min(found, key=lambda interval: interval[1], default=None)


def without_begun_stop(text: str, stop: str | tuple[str, ...] | None) -> str:
    """`text` without a suffix that may be the beginning of a `stop` text."""
    stops = each_of(stop)
    for size in range(min(max(map(len, stops), default=0) - 1, len(text)), 0, -1):
        if any(len(s) > size and s.startswith(text[-size:]) for s in stops):
            return text[:-size]
    return text


@dataclass(frozen=True)
class Mark:
    """The first `num_tokens` tokens are `num_chars` characters long."""

    num_tokens: int
    num_chars: int


class Lookout:
    """Watches a generation that runs past its end, and says when it has gone far enough.

    `begun` is what the program has already written in this turn, if the service cannot continue a
    turn and generates all of it again. If the service does not report tokens while it streams,
    nothing beyond `max_new_tokens` is requested, except to make room for `begun`.
    """

    def __init__(
        self, sampling: Sampling, num_tokens_ahead: int, begun: str, *, tells_tokens: bool
    ) -> None:
        self._wanted = sampling
        self._num_tokens_ahead = num_tokens_ahead
        self._begun = begun
        self._max_tokens = sampling.max_new_tokens or 0
        self._more = num_tokens_ahead if tells_tokens or begun else 0
        self._text = ""
        self._marks: list[Mark] = []
        self._tokens_are_known = True
        self._enough: int | None = None  # tokens to stop at, once the end has been found
        self._was_enough = False

    @property
    def sampling(self) -> Sampling:
        """The sampling options to request."""
        return replace(self._wanted, stop=None, max_new_tokens=self._max_tokens + self._more)

    def __call__(self, piece: str, num_tokens: int | None) -> bool:
        """Add a piece of text; there are now `num_tokens` tokens. Whether that is enough."""
        marks = self._marks
        self._text += piece
        if num_tokens is None or (marks and num_tokens <= marks[-1].num_tokens):
            self._tokens_are_known = False
            return self._more > 0 and not self._begun  # what follows cannot be used
        marks.append(Mark(num_tokens, len(self._text)))
        if self._enough is None and first_stop(self._own_text, self._wanted.stop) is not None:
            self._enough = num_tokens + self._num_tokens_ahead
        self._was_enough = self._enough is not None and num_tokens >= self._enough
        return self._was_enough

    @property
    def _own_text(self) -> str:
        return self._text[len(self._begun) :]

    def shown(self) -> str | None:
        """The part of the text that is final and may be shown to readers; None while unknown."""
        marks = self._marks
        is_known = bool(marks) and marks[-1].num_chars == len(self._text)
        if not is_known or not self._text.startswith(self._begun):
            return None
        within = marks[bisect_right(marks, self._max_tokens, key=lambda m: m.num_tokens) - 1]
        if within.num_tokens > self._max_tokens:
            return ""
        text = self._text[len(self._begun) : within.num_chars]
        stop = first_stop(text, self._wanted.stop)
        return text[: stop[0]] if stop else without_begun_stop(text, self._wanted.stop)

    def ahead(self, generated: Generated, num_prompt_tokens: int) -> Ahead:
        """The generated text, with nothing used yet."""
        if generated.finish_reason == "length" and not self._was_enough:
            self._marks.append(Mark(self._max_tokens + self._more, len(self._text)))
        is_known = self._tokens_are_known and self._text == generated.text
        return Ahead(
            generated.text,
            generated.finish_reason,
            self._wanted,
            num_prompt_tokens,
            self._max_tokens if self._begun else self._max_tokens + self._more,
            tuple(self._marks) if is_known else None,
        )


@dataclass(frozen=True)
class Ahead:
    """Text that was generated ahead; ``text[position:]`` has not been used yet.

    `marks` are the positions, in order, at which the number of tokens is known. There is one per
    token if the server streams token by token, fewer if it sends several at once. They are None if
    the server does not report tokens; it is then only known that the whole text has at most
    `max_tokens`, the number requested.
    """

    text: str
    finish_reason: str
    sampling: Sampling
    num_prompt_tokens: int
    max_tokens: int
    marks: tuple[Mark, ...] | None = None
    position: int = 0

    def _mark_here(self) -> Mark:
        """The last mark at or before `position`."""
        marks = self.marks or ()
        index = bisect_right(marks, self.position, key=lambda mark: mark.num_chars)
        return marks[index - 1] if index else Mark(0, 0)

    @property
    def _is_between_tokens(self) -> bool:
        return self.marks is None or self._mark_here().num_chars == self.position

    @property
    def num_prompt_tokens_here(self) -> int:
        """About how many tokens the prompt has up to this position."""
        return self.num_prompt_tokens + self._mark_here().num_tokens

    def after(self, text: str) -> Ahead | None:
        """The rest after the program has written `text`; None if the model wrote something else."""
        if not self.text.startswith(text, self.position):
            return None
        return replace(self, position=self.position + len(text))

    def answer(self, sampling: Sampling) -> tuple[Generated, Ahead] | None:
        """The answer to a generation with `sampling` at this position, and the rest after it. None
        if the text does not determine exactly what the server would have answered."""
        if without_end(sampling) != without_end(self.sampling) or not self._is_between_tokens:
            return None
        rest = self.text[self.position :]
        max_tokens = sampling.max_new_tokens or 0
        if self.marks is None and max_tokens < self.max_tokens:
            return None  # max_tokens might cut the text somewhere
        stop = first_stop(rest, sampling.stop)
        limit = self._limit(max_tokens)
        if stop is not None and (limit is None or stop[1] <= limit[0]):
            return self._taken(stop[0], "stop")
        if limit is not None:
            return self._taken(limit[0], "length") if limit[0] == limit[1] else None
        if self.finish_reason == "stop":  # the model ended the text here
            return self._taken(len(rest), "stop")
        return None

    def _limit(self, max_tokens: int) -> tuple[int, int] | None:
        """The least and most characters that `max_tokens` tokens have from here; None if the text
        has fewer tokens.

        Without marks, this is known only for the very first answer, where it is the whole text.
        """
        if self.marks is None:
            is_cut = self.finish_reason == "length" and self.position == 0
            is_first = max_tokens == self.max_tokens
            return (len(self.text), len(self.text)) if is_cut and is_first else None
        wanted = self._mark_here().num_tokens + max_tokens
        index = bisect_left(self.marks, wanted, key=lambda mark: mark.num_tokens)
        if index == len(self.marks):
            return None
        after = self.marks[index]
        before = self.marks[index - 1] if index else Mark(0, 0)
        at_least = after if after.num_tokens == wanted else before
        return at_least.num_chars - self.position, after.num_chars - self.position

    def _taken(self, num_chars: int, finish_reason: str) -> tuple[Generated, Ahead]:
        text = self.text[self.position : self.position + num_chars]
        return Generated(text, finish_reason), replace(self, position=self.position + num_chars)
