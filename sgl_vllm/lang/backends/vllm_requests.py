"""What vLLM's API has beside OpenAI's: prompts, options and answers, as JSON.

Owns the fields for prompts and their log-probabilities, the plugin's options and reports, and the
prompts that `select` sends to a server without the plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.openai_api import sampling_body
from sgl_vllm.lang.backends.requests import Generated, GenRequest, TokenLogprob
from sgl_vllm.lang.prompts import ChatPrompt, Prompt, TextPrompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.request_keys import APPROXIMATE, REPORT, REUSE, SCORE_FROM, SEGMENTS
from sgl_vllm.protocol.scoring import ChoiceTokens, scored_rows

ONE_TOKEN: Json = {"max_tokens": 1, "temperature": 0.0}
"""The fewest tokens that vLLM generates: for requests that are about their prompt."""


def has_media(prompt: Prompt) -> TypeGuard[ChatPrompt]:
    """Whether it is a chat with images, videos or audio."""
    return isinstance(prompt, ChatPrompt) and bool(prompt.media)


def prompt_body(prompt: Prompt) -> Json:
    """A prompt in the form of vLLM's API. For a chat, it also says how the prompt ends."""
    if isinstance(prompt, TextPrompt):
        return {"prompt": prompt.text}
    return {
        "messages": [message.as_dict() for message in prompt.messages],
        "add_generation_prompt": prompt.ending == "generate",
        "continue_final_message": prompt.ending == "continue",
    }


def missed_by_cause(explanation: Json) -> dict[str, int]:
    """Tokens by cause, of an explanation as the plugin gives it (`radix/misses.py`)."""
    missed: Counter[str] = Counter()
    for one in explanation["causes"]:
        missed[str(one["cause"])] += int(one["end"]) - int(one["start"])
    return dict(missed)


def generation_body(request: GenRequest) -> Json:
    """A generation in the form of vLLM's API, but for its prompt."""
    sampling = request.sampling
    body = sampling_body(sampling, chat=isinstance(request.prompt, ChatPrompt))
    asked: Json = {}  # of the plugin: a report of forced text, and to reuse segments
    if (constraint := request.constraint) is not None:
        body["structured_outputs"] = {constraint.kind.vllm_key: constraint.value}
        if (sampling.n or 1) == 1:  # vLLM reports on one text only
            asked[REPORT] = 1
    if request.prompt.reusable and not has_media(request.prompt):
        asked[SEGMENTS] = [mark for interval in request.prompt.reusable for mark in interval]
        asked[REUSE] = APPROXIMATE
    if asked:
        body["vllm_xargs"] = asked
    if sampling.prompt_logprobs_from is not None:
        body["prompt_logprobs"] = sampling.top_logprobs_num
    return body


def with_report(texts: list[Generated], usage: Usage, kv_transfer_params: Json | None) -> Usage:
    """Add the plugin's report to the first text. Returns the usage with its forced tokens, and with
    the tokens of reused segments."""
    answers = kv_transfer_params or {}
    if reused := answers.get(REUSE):
        usage = replace(usage, reused_tokens=int(reused["reused_tokens"]))
    report = answers.get(REPORT)
    if not report:
        return usage
    texts[0] = _with_forced(texts[0], report["forced_bytes"])
    return replace(usage, forced_tokens=int(report["forced_tokens"]))


def _with_forced(generated: Generated, forced_bytes: list[list[int]]) -> Generated:
    """The text with its forced intervals converted from bytes to characters. A stop text may have
    cut them."""
    data = generated.text.encode()

    def num_chars(num_bytes: int) -> int:
        return len(data[:num_bytes].decode(errors="ignore"))

    intervals = ((num_chars(start), num_chars(end)) for start, end in forced_bytes)
    return replace(generated, forced=tuple((a, b) for a, b in intervals if a < b))


def prompt_rows(answer: Json) -> list[list[Json]]:
    """The log-probabilities of each prompt of a request: a chat's are in the answer, a completion's
    in its choices."""
    choices = answer["choices"]
    holders = choices if "prompt_logprobs" in choices[0] else [answer]
    return [holder.get("prompt_logprobs") or [] for holder in holders]


def logprobs_of(rows: Sequence[Json], ending: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of the last tokens of a prompt, which are `ending`."""
    return tuple(float(row[str(token)]["logprob"]) for row, token in scored_rows(rows, ending))


def prompt_tokens(answer: Json, start: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the prompt's tokens from `start` on. The first token has none."""
    tokens = []
    for row in prompt_rows(answer)[0][start:]:
        if row is not None:
            (chosen, *others) = row.values()
            top = tuple((o["decoded_token"], float(o["logprob"])) for o in (chosen, *others))
            tokens.append(TokenLogprob(chosen["decoded_token"], float(chosen["logprob"]), top))
    return tuple(tokens)


def choices_of(answer: Json) -> tuple[ChoiceTokens, ...]:
    """The scored choices in an answer of `/v1/sgl/score`."""
    return tuple(
        ChoiceTokens(
            tuple(int(token) for token in choice["token_ids"]),
            tuple(float(logprob) for logprob in choice["logprobs"]),
            None if (alone := choice["unconditional_logprobs"]) is None else tuple(alone),
        )
        for choice in answer["choices"]
    )


# --- select ---------------------------------------------------------------------------------------


@dataclass
class ScoringByPrompts:
    """The model as `sgl_vllm.protocol.scoring` asks it, for one prompt and its choices.

    The tokens of a prompt with media do not say what its media show, so it cannot be sent as
    tokens: each choice is sent as a chat that ends with it.

    Args:
        compute: as `VLLM.compute`.
        begin_ids: what the tokenizer puts before any text: one token, or nothing.
        prompt: what comes before the choices.
        continued: the prompt with each choice.
        prefix_ids: tokens of the prompt. An image may be one token of them, or as many as the model
            reads.
        full_ids: tokens of `continued`, in the same form.
    """

    compute: Callable[..., Awaitable[tuple[list[tuple[float, ...]], Usage]]]
    begin_ids: Callable[[], Coroutine[Any, Any, list[int]]]
    prompt: Prompt
    continued: Sequence[Prompt]
    prefix_ids: Sequence[int]
    full_ids: list[list[int]]
    num_read: int | None = None

    async def warm_ids(self, ids: list[int]) -> Usage:
        """Compute and cache these tokens, or the whole prompt that they are a prefix of."""
        cost = (await self.compute([self.prompt] if has_media(self.prompt) else [ids]))[1]
        self.num_read = cost.prompt_tokens
        return cost

    async def next_token_logprobs(self, ids: list[int], tokens: list[int]) -> None:
        """Only the server's route knows which kind of log-probabilities it returns."""

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        endings = [ids[start:] for ids in sequences]
        if not has_media(self.prompt) or sequences != self.full_ids:  # or the choices alone
            return await self.compute(sequences, endings, {SCORE_FROM: start})
        asked: Json = {}
        if self.num_read is not None:  # where scoring starts in the tokens that the model reads
            asked[SCORE_FROM] = self.num_read - (len(self.prefix_ids) - start)
        return await self.compute(self.continued, endings, asked)
