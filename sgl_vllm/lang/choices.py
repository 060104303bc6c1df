"""How `select` decides between scored choices.

Owns the arithmetic from token log-probabilities (natural logarithms, see
`sgl_vllm.protocol.scoring`) to a decision. Knows no server and no tokenizer. On a tie, the choice
listed first wins. A log-probability of exactly 0.0 is a value like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgl_vllm.protocol.scoring import ChoiceTokens


@dataclass(frozen=True)
class Decision:
    """The index of the winner, and the score of every choice as the method defines it.

    `details` are what else `get_meta_info` is to show.
    """

    index: int
    scores: tuple[float, ...]
    details: Mapping[str, object] = field(default_factory=dict)


class ChoicesMethod(Protocol):
    """A method that picks one of several scored choices."""

    @property
    def needs_unconditional(self) -> bool:
        """Whether `ChoiceTokens.unconditional_logprobs` is needed, which takes one more request."""
        ...

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision: ...


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def first_best(scores: Sequence[float]) -> int:
    """The index of the highest score, the first one on a tie."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


@dataclass(frozen=True)
class TokenLengthNormalized:
    """Choose the highest mean token log-probability. This is the default, as in SGLang."""

    needs_unconditional: bool = False

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision:
        scores = tuple(mean(choice.logprobs) for choice in choices)
        return Decision(first_best(scores), scores)


@dataclass(frozen=True)
class GreedyTokenSelection:
    """Choose token by token, keeping the choices with the most likely token at each position.

    A choice that has ended is represented by its mean log-probability at later positions, so that
    it can be compared with longer choices that begin with it. The scores are those means.
    """

    needs_unconditional: bool = False

    def __call__(self, choices: Sequence[ChoiceTokens]) -> Decision:
        means = tuple(mean(choice.logprobs) for choice in choices)

        def logprob_at(index: int, position: int) -> float:
            logprobs = choices[index].logprobs
            return logprobs[position] if position < len(logprobs) else means[index]

        def token_at(index: int, position: int) -> object:
            tokens = choices[index].token_ids
            return tokens[position] if position < len(tokens) else ("ended", index)

        # By token: in different choices, the same one may differ in its last digits.
        remaining = list(range(len(choices)))
        for position in range(max(len(choice.logprobs) for choice in choices)):
            best = max(logprob_at(index, position) for index in remaining)
            chosen = {
                token_at(index, position)
                for index in remaining
                if logprob_at(index, position) == best
            }
            remaining = [index for index in remaining if token_at(index, position) in chosen]
        return Decision(remaining[0], means)


@dataclass(frozen=True)
class UnconditionalLikelihoodNormalized:
    """Choose the highest mean gain in token log-probability through the prompt.

    This corrects for choices that are likely without the prompt, too, and needs one more request.
    If the log-probability of a token without the prompt is unknown (the first token, for a
    tokenizer without a beginning-of-text token), it counts as 0, as in SGLang.
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
