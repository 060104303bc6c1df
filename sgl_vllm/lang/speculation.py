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

from bisect import bisect_left
from dataclasses import dataclass, replace

from sgl_vllm.lang.backends.base import Generated
from sgl_vllm.lang.ir import Gen, Sampling


def can_be_speculated(expr: Gen, sampling: Sampling) -> bool:
    """Whether a generation may run past its end, or be answered from one that did."""
    return (
        expr.regex is None
        and expr.json_schema is None
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

    First is the one that is complete first, as a server that looks after every token finds it.
    """
    stops = (stop,) if isinstance(stop, str) else stop or ()
    found = [(at + len(s), at) for s in stops if s and (at := text.find(s)) >= 0]
    if not found:
        return None
    end, at = min(found)
    return at, end


@dataclass(frozen=True)
class Ahead:
    """What has been generated and not yet been used: ``text[position:]``.

    ``marks[i]`` is how many characters the first ``i + 1`` tokens are; None if that is not known,
    and then the whole text is at most what the first request allowed. `num_tokens_used` is the
    tokens before `position`.
    """

    text: str
    finish_reason: str
    sampling: Sampling
    num_prompt_tokens: int
    marks: tuple[int, ...] | None = None
    position: int = 0

    @property
    def _num_tokens_used(self) -> int:
        return self._tokens_within(self.position)

    def _tokens_within(self, num_chars: int) -> int:
        """How many tokens it takes to have `num_chars` characters."""
        if not self.marks or num_chars == 0:
            return 0
        return bisect_left(self.marks, num_chars) + 1

    @property
    def _is_between_tokens(self) -> bool:
        if self.marks is None or self.position == 0:
            return True
        at = bisect_left(self.marks, self.position)
        return at < len(self.marks) and self.marks[at] == self.position

    @property
    def num_prompt_tokens_here(self) -> int:
        """About how many tokens the prompt has up to here."""
        return self.num_prompt_tokens + self._num_tokens_used

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
        if self.marks is None and max_tokens < (self.sampling.max_new_tokens or 0):
            return None  # it might be cut somewhere in here
        stop = first_stop(rest, sampling.stop)
        limit = self._limit(max_tokens)
        if stop is not None and (limit is None or stop[1] <= limit):
            return self._taken(stop[0], "stop")
        if limit is not None and limit <= len(rest):
            return self._taken(limit, "length")
        if self.finish_reason == "stop":  # the model has ended here by itself
            return self._taken(len(rest), "stop")
        return None

    def _limit(self, max_tokens: int) -> int | None:
        """How many characters from here `max_tokens` tokens are; None if there are not so many.

        Without marks only the very first answer knows: there it is the whole text.
        """
        if self.marks is None:
            is_cut = self.finish_reason == "length" and self.position == 0
            is_first = max_tokens == self.sampling.max_new_tokens
            return len(self.text) if is_cut and is_first else None
        index = self._num_tokens_used + max_tokens - 1
        return self.marks[index] - self.position if index < len(self.marks) else None

    def _taken(self, num_chars: int, finish_reason: str) -> tuple[Generated, Ahead]:
        text = self.text[self.position : self.position + num_chars]
        return Generated(text, finish_reason), replace(self, position=self.position + num_chars)
