"""API speculative execution: answering several `gen`s from one generation.

Owns the text that a server has written past what the program asked for, and the rules by which it
answers what the program asks next. Pure: sends nothing. (arXiv 2312.07104, section 5.)

    program    "Name:" + gen("name", stop="\\n") + "\\nJob:" + gen("job", stop="\\n")
    generated  " Ada Lovelace\\nJob: mathematician\\nAge: 36\\n"
               [-- name ----][ text ][--- job ---][-- ahead: used if the program goes on so
                             must match, or all ahead is dropped and the server is asked

It must not be seen in any variable, so whatever cannot be told exactly is not answered: where a
text is cut by `max_tokens` is known only if the server tells tokens as they come, and then the text
that the program writes in between must also end where a token does, as the model would otherwise
have gone on from a prompt that is spelled differently.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from sgl_vllm.lang.backends.base import Generated
from sgl_vllm.lang.ir import Gen
from sgl_vllm.lang.sampling import Sampling


def can_be_speculated(expr: Gen, sampling: Sampling) -> bool:
    """Whether a generation may run past its end, or be answered from one that did."""
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
    """What two generations must have in common for one to answer the other."""
    return replace(sampling, stop=None, max_new_tokens=None)


def first_stop(text: str, stop: str | tuple[str, ...] | None) -> tuple[int, int] | None:
    """Where the first of the `stop` texts is in `text`: half-open; None if none is.

    First is the one that is complete first and, of those that end together, the one that is listed
    first: as vLLM does it.
    """
    found = [(at, at + len(s)) for s in _stops(stop) if s and (at := text.find(s)) >= 0]
    return min(found, key=lambda interval: interval[1], default=None)


def without_begun_stop(text: str, stop: str | tuple[str, ...] | None) -> str:
    """`text` without an end that may be the beginning of a `stop` text."""
    stops = _stops(stop)
    for size in range(min(max(map(len, stops), default=0) - 1, len(text)), 0, -1):
        if any(len(s) > size and s.startswith(text[-size:]) for s in stops):
            return text[:-size]
    return text


def _stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else stop or ()


@dataclass(frozen=True)
class Mark:
    """The first `num_tokens` tokens are `num_chars` characters."""

    num_tokens: int
    num_chars: int


class Lookout:
    """Looks on while a generation runs past its end, and says when it has gone far enough.

    `begun` is what the program has written in this turn already, where the service cannot continue
    a turn and is asked for all of it. Where tokens are not told while text comes, nothing is asked
    for beyond `max_new_tokens`, unless for the sake of `begun`.
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
        self._tokens_are_told = True
        self._enough: int | None = None  # so many tokens, once the wanted end has come
        self._was_enough = False

    @property
    def sampling(self) -> Sampling:
        """What to ask for."""
        return replace(self._wanted, stop=None, max_new_tokens=self._max_tokens + self._more)

    def __call__(self, piece: str, num_tokens: int | None) -> bool:
        """Take a piece of the text, with which there are `num_tokens`; whether it is enough."""
        marks = self._marks
        self._text += piece
        if num_tokens is None or (marks and num_tokens <= marks[-1].num_tokens):
            self._tokens_are_told = False
            return self._more > 0 and not self._begun  # all that comes is of no use then
        marks.append(Mark(num_tokens, len(self._text)))
        if self._enough is None and first_stop(self._own_text, self._wanted.stop) is not None:
            self._enough = num_tokens + self._num_tokens_ahead
        self._was_enough = self._enough is not None and num_tokens >= self._enough
        return self._was_enough

    @property
    def _own_text(self) -> str:
        return self._text[len(self._begun) :]

    def shown(self) -> str | None:
        """What readers may be given of it so far, as it will not be taken back; None while that
        cannot be told."""
        marks = self._marks
        is_told = bool(marks) and marks[-1].num_chars == len(self._text)
        if not is_told or not self._text.startswith(self._begun):
            return None
        within = marks[bisect_right(marks, self._max_tokens, key=lambda m: m.num_tokens) - 1]
        if within.num_tokens > self._max_tokens:
            return ""
        text = self._text[len(self._begun) : within.num_chars]
        stop = first_stop(text, self._wanted.stop)
        return text[: stop[0]] if stop else without_begun_stop(text, self._wanted.stop)

    def ahead(self, generated: Generated, num_prompt_tokens: int) -> Ahead:
        """What has come, none of it used yet."""
        if generated.finish_reason == "length" and not self._was_enough:
            self._marks.append(Mark(self._max_tokens + self._more, len(self._text)))
        is_known = self._tokens_are_told and self._text == generated.text
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
    """What has been generated and not yet been used: ``text[position:]``.

    `marks` are the places, in order, up to which the number of tokens is known: every one in the
    text where a server sends tokens one by one, fewer where it sends several in one piece. They are
    None where it does not tell; all that is known is then that `max_tokens`, which were asked for,
    are enough for the whole text.
    """

    text: str
    finish_reason: str
    sampling: Sampling
    num_prompt_tokens: int
    max_tokens: int
    marks: tuple[Mark, ...] | None = None
    position: int = 0

    def _mark_here(self) -> Mark:
        """The last place before `position`, or at it, up to which the number of tokens is known."""
        marks = self.marks or ()
        index = bisect_right(marks, self.position, key=lambda mark: mark.num_chars)
        return marks[index - 1] if index else Mark(0, 0)

    @property
    def _is_between_tokens(self) -> bool:
        return self.marks is None or self._mark_here().num_chars == self.position

    @property
    def num_prompt_tokens_here(self) -> int:
        """About how many tokens the prompt has up to here."""
        return self.num_prompt_tokens + self._mark_here().num_tokens

    def after(self, text: str) -> Ahead | None:
        """After the program wrote `text` itself; None if the model wrote something else."""
        if not self.text.startswith(text, self.position):
            return None
        return replace(self, position=self.position + len(text))

    def answer(self, sampling: Sampling) -> tuple[Generated, Ahead] | None:
        """What a generation with `sampling` gives here, and what is then left; None if what is
        here does not tell, or would be something else than the server's own answer."""
        if without_end(sampling) != without_end(self.sampling) or not self._is_between_tokens:
            return None
        rest = self.text[self.position :]
        max_tokens = sampling.max_new_tokens or 0
        if self.marks is None and max_tokens < self.max_tokens:
            return None  # it might be cut somewhere in here
        stop = first_stop(rest, sampling.stop)
        limit = self._limit(max_tokens)
        if stop is not None and (limit is None or stop[1] <= limit[0]):
            return self._taken(stop[0], "stop")
        if limit is not None:
            return self._taken(limit[0], "length") if limit[0] == limit[1] else None
        if self.finish_reason == "stop":  # the model has ended here by itself
            return self._taken(len(rest), "stop")
        return None

    def _limit(self, max_tokens: int) -> tuple[int, int] | None:
        """How many characters from here `max_tokens` tokens are, at least and at most; None if
        there are not so many tokens.

        Without marks only the very first answer knows: there it is the whole text.
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
