"""How near a tie was where two answers part, asked of a stock engine that returns logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm import SamplingParams

from tests.engine.engine import Ask, Engine
from tests.engine.play import LOGPROB_TOLERANCE, NEAR_TIE, Difference, Played, differences
from tests.engine.programs import MAX_MODEL_LEN, Program

JUDGE = {
    "max_model_len": MAX_MODEL_LEN + 1,
    "enable_prefix_caching": False,
    "logprobs_mode": "raw_logits",
}
"""Arguments of the stock engine that `gap` asks."""


def check_answers(
    start: Callable[..., Engine],
    program: Program,
    want: Played,
    got: Played,
    *,
    logprob_tolerance: float = LOGPROB_TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> None:
    """Fail on any difference but a near tie of two tokens. `start` starts the judge, if there is a
    difference."""
    found = list(differences(program, want, got, logprob_tolerance=logprob_tolerance))
    if found:
        judge = start(**JUDGE)
        gaps = [gap(judge, one) for one in found]
        real = [
            f"{far} apart\n{one}" for one, far in zip(found, gaps, strict=True) if far > near_tie
        ]
        assert not real, f"{len(real)} requests got another answer:\n" + "\n\n".join(real[:3])


def gap(engine: Engine, difference: Difference) -> float:
    """How far apart the two tokens' logits are where the answers part; infinity if they do not part
    in a token. A grammar's mask does not move logits, and penalties are applied here again.

    0 if stock, which computes all before the token in one pass here, chooses ours: where it decodes
    a token at a time, its logits are others, in bfloat16 by 0.016 and more.
    """
    if difference.tokens is None or difference.common is None:
        return float("inf")
    tokens = [*difference.prompt, *difference.common]
    row, chosen = _next(engine, tokens, difference.tokens)
    want, got = (_penalized(row[token], token, tokens, difference) for token in difference.tokens)
    return 0.0 if got >= want and chosen == difference.tokens[1] else abs(want - got)


def logits(engine: Engine, prompt: list[int], tokens: Sequence[int]) -> list[float]:
    """Those of `tokens` as the next one, from an engine that was started with `JUDGE`."""
    row, _ = _next(engine, prompt, tokens)
    return [row[token] for token in tokens]


def _next(engine: Engine, prompt: list[int], tokens: Sequence[int]) -> tuple[dict[int, float], int]:
    """The logits of `tokens` as the next one, and which token of all has the highest."""
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[*tokens])
    output = engine.run([Ask(prompt, params)])[0].outputs[0]
    row = output.logprobs[0]
    return {token: row[token].logprob for token in tokens}, output.token_ids[0]


def _penalized(logit: float, token: int, seen: list[int], difference: Difference) -> float:
    params, output = difference.call.params, difference.common
    assert output is not None
    if token in seen:
        factor = params.repetition_penalty
        logit = logit / factor if logit > 0 else logit * factor
    count = output.count(token)
    return logit - params.frequency_penalty * count - params.presence_penalty * (count > 0)
