"""How `select` decides: pure scoring methods.

Owns the arithmetic from token log-probabilities (`sgl_vllm.protocol.scoring`) to a decision. Knows
no server and no tokenizer: log-probabilities (natural logarithm) come in per choice, and a
`Decision` goes out.
Ties are stable: the choice that was listed first wins. A log-probability of exactly 0.0 is a value
like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_vllm.protocol.scoring import ChoiceTokens


@dataclass(frozen=True)
class Decision:
    """Which choice won, and the score of every choice under the method's own measure."""

    index: int
    scores: tuple[float, ...]


class ChoicesMethod(Protocol):
    """A rule that picks one of several scored choices."""

    @property
    def needs_unconditional(self) -> bool:
        """Whether `ChoiceTokens.unconditional_logprobs` must be filled in (one more request)."""
        ...

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision: ...


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def first_best(scores: Sequence[float]) -> int:
    """The index of the highest score; the first one on a tie."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


@dataclass(frozen=True)
class TokenLengthNormalized:
    """The highest mean token log-probability wins (SGLang's default)."""

    needs_unconditional: bool = False

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision:
        scores = tuple(mean(choice.logprobs) for choice in choices)
        return Decision(first_best(scores), scores)


@dataclass(frozen=True)
class GreedyTokenSelection:
    """Decide token by token, keeping the choices with the most probable token at each position.

    A choice that has ended takes part in later positions with its mean log-probability, so that
    a choice which begins another one can be compared with it. The scores are those means.
    """

    needs_unconditional: bool = False

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision:
        means = tuple(mean(choice.logprobs) for choice in choices)

        def logprob_at(index: int, position: int) -> float:
            logprobs = choices[index].logprobs
            return logprobs[position] if position < len(logprobs) else means[index]

        remaining = list(range(len(choices)))
        for position in range(max(len(choice.logprobs) for choice in choices)):
            best = max(logprob_at(index, position) for index in remaining)
            remaining = [index for index in remaining if logprob_at(index, position) == best]
        return Decision(remaining[0], means)


@dataclass(frozen=True)
class UnconditionalLikelihoodNormalized:
    """The highest mean gain in token log-probability that the prefix brings wins.

    Corrects for choices that are likely anyway. Where the unconditional log-probability of a
    token is unknown (the first token, for a tokenizer without a beginning-of-text token) it
    counts as 0, as in SGLang.
    """

    needs_unconditional: bool = True

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision:
        scores = tuple(self._mean_gain(choice) for choice in choices)
        return Decision(first_best(scores), scores)

    @staticmethod
    def _mean_gain(choice: ChoiceTokens) -> float:
        if choice.unconditional_logprobs is None:
            raise ValueError("unconditional_likelihood_normalized needs unconditional logprobs")
        pairs = zip(choice.logprobs, choice.unconditional_logprobs, strict=True)
        return mean([given - (alone if alone is not None else 0.0) for given, alone in pairs])


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
