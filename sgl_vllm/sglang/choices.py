"""SGLang's choices methods, and those of a program's own with SGLang's keywords.

Owns the way between SGLang's lists of ``(logprob, token id, text)`` and the scored choices of
`sgl_vllm.lang.choices`, which has the arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias  # Any: what a program's own method adds

from sgl_vllm.lang import choices as core
from sgl_vllm.protocol.scoring import ChoiceTokens

TokenLogprobs: TypeAlias = Sequence[Sequence[Any]]
"""Tokens as ``(logprob, token id, text)``. The log-probability may be None."""


@dataclass
class ChoicesDecision:
    """The text of the choice made, and what `get_meta_info` is to show of how it was made."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """A method that picks one of several scored choices, called with SGLang's keywords."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether `unconditional_token_logprobs` is needed, which takes one more request."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[TokenLogprobs],
        output_token_logprobs: list[TokenLogprobs],
        unconditional_token_logprobs: list[TokenLogprobs] | None = None,
    ) -> ChoicesDecision:
        """Pick one of `choices`. The lists have an entry per choice: the mean log-probability of
        its tokens, and its tokens. `output_token_logprobs` are empty lists."""


class _Known(ChoicesSamplingMethod):
    """A method that `sgl_vllm` has. `details` are what SGLang's shows of the choices' tokens and
    scores beside its arguments."""

    def __init__(
        self,
        method: core.ChoicesMethod,
        details: Callable[[list[ChoiceTokens], Sequence[float]], dict[str, object]] | None = None,
    ) -> None:
        self.method = method
        self._details = details

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return self.method.needs_unconditional

    def __call__(
        self, *, choices: list[str], unconditional_token_logprobs: Any = None, **scored: Any
    ) -> ChoicesDecision:
        alone = unconditional_token_logprobs or [None] * len(choices)
        tokens = [
            ChoiceTokens(
                tuple(token[1] for token in given),
                tuple(token[0] for token in given),
                None if unconditional is None else tuple(token[0] for token in unconditional),
            )
            for given, unconditional in zip(scored["input_token_logprobs"], alone, strict=True)
        ]
        if self._details is None:
            best = core.first_best(scored["normalized_prompt_logprobs"])
            return ChoicesDecision(choices[best], scored)
        decision = self.method(tokens)
        meta_info = {**scored, **self._details(tokens, decision.scores)}
        return ChoicesDecision(choices[decision.index], meta_info)


def _greedy_matrix(choices: list[ChoiceTokens], scores: Sequence[float]) -> dict[str, object]:
    longest = max(len(choice.logprobs) for choice in choices)
    pairs = zip(choices, scores, strict=True)
    matrix = [[*one.logprobs, *[mean] * (longest - len(one.logprobs))] for one, mean in pairs]
    return {"greedy_logprob_matrix": matrix}


def _mean_gains(choices: list[ChoiceTokens], scores: Sequence[float]) -> dict[str, object]:
    return {"normalized_unconditional_prompt_logprobs": list(scores)}


token_length_normalized = _Known(core.token_length_normalized)
greedy_token_selection = _Known(core.greedy_token_selection, _greedy_matrix)
unconditional_likelihood_normalized = _Known(core.unconditional_likelihood_normalized, _mean_gains)


@dataclass(frozen=True)
class _OwnMethod:
    """A program's own method for these `texts`, as the language calls it."""

    method: ChoicesSamplingMethod
    texts: tuple[str, ...]

    @property
    def needs_unconditional(self) -> bool:
        return self.method.requires_unconditional_logprobs

    def __call__(self, choices: Sequence[ChoiceTokens]) -> core.Decision:
        means = [core.mean(choice.logprobs) for choice in choices]
        alone = [_entries(c.unconditional_logprobs or (), c.token_ids) for c in choices]
        made = self.method(
            choices=list(self.texts),
            normalized_prompt_logprobs=means,
            input_token_logprobs=[_entries(c.logprobs, c.token_ids) for c in choices],
            output_token_logprobs=[[] for _ in choices],
            unconditional_token_logprobs=alone if self.needs_unconditional else None,
        )
        if made.decision not in self.texts:
            raise ValueError(
                f"{type(self.method).__name__} chose {made.decision!r}: return one of the choices"
            )
        index = self.texts.index(made.decision)
        return core.Decision(index, tuple(means), made.meta_info or {})


def _entries(logprobs: Sequence[float | None], ids: Sequence[int]) -> TokenLogprobs:
    return [(logprob, token, None) for logprob, token in zip(logprobs, ids, strict=False)]


def as_core_method(
    method: ChoicesSamplingMethod | core.ChoicesMethod, texts: tuple[str, ...]
) -> core.ChoicesMethod:
    """`method` as the language calls it, for a select among `texts`."""
    if isinstance(method, _Known):
        return method.method
    return _OwnMethod(method, texts) if isinstance(method, ChoicesSamplingMethod) else method
