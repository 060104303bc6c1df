"""SGLang's choices methods: those of `sgl_vllm`, which take SGLang's keywords, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any  # Any: SGLang's lists of ``(logprob, token id, text)``

from sgl_vllm.lang import choices as core
from sgl_vllm.protocol.scoring import ChoiceTokens


@dataclass
class ChoicesDecision:
    """The text of the choice made, and how it was made."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod:
    """A method of `sgl_vllm`. `details` are what SGLang's shows of the choices' tokens and scores
    beside its arguments."""

    def __init__(
        self,
        method: core.ChoicesMethod,
        details: Callable[[list[ChoiceTokens], Sequence[float]], dict[str, object]] | None = None,
    ) -> None:
        self.method = method
        self._details = details

    def __call__(
        self, *, choices: list[str], unconditional_token_logprobs: Any = None, **scored: Any
    ) -> ChoicesDecision:
        """Pick one of `choices`, with an entry per choice in ``normalized_prompt_logprobs`` (the
        mean log-probability of its tokens) and ``input_token_logprobs`` (its tokens)."""
        if self._details is None:
            best = core.first_best(scored["normalized_prompt_logprobs"])
            return ChoicesDecision(choices[best], scored)
        alone = unconditional_token_logprobs or [None] * len(choices)
        tokens = [
            ChoiceTokens(
                tuple(token[1] for token in given),
                tuple(token[0] for token in given),
                None if unconditional is None else tuple(token[0] for token in unconditional),
            )
            for given, unconditional in zip(scored["input_token_logprobs"], alone, strict=True)
        ]
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


token_length_normalized = ChoicesSamplingMethod(core.token_length_normalized)
greedy_token_selection = ChoicesSamplingMethod(core.greedy_token_selection, _greedy_matrix)
unconditional_likelihood_normalized = ChoicesSamplingMethod(
    core.unconditional_likelihood_normalized, _mean_gains
)
