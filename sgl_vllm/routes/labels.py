"""Labels of several tokens for vLLM's `POST /generative_scoring`.

vLLM's own labels are single tokens, `label_token_ids`. If that list is empty, the field `labels`
may have texts or lists of token ids. An item's `score` is the first label's probability after query
and item: among the labels, or in the whole vocabulary without `apply_softmax`. `label_scores` has
the probabilities of all labels.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any  # Any: the JSON of a request

from fastapi import HTTPException, Request
from pydantic import Field, TypeAdapter, ValidationError
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringItemResult,
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    ServingGenerativeScoring,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from sgl_vllm.protocol import scoring
from sgl_vllm.routes.bodies import TextOrIds
from sgl_vllm.routes.score import ScoreBody, Served
from sgl_vllm.vllm_api.patching import wrap

_LABELS = TypeAdapter(
    Annotated[
        list[Annotated[TextOrIds, Field(min_length=1)]],
        Field(min_length=1, max_length=scoring.MAX_CONTINUATIONS),
    ]
)

_WHAT_LABELS_ARE = (
    f"labels must be a list of at most {scoring.MAX_CONTINUATIONS:,} texts or lists of token ids, "
    "none of them empty"
)


def accept_labels(serving: ServingGenerativeScoring) -> None:
    """Let `/generative_scoring` take `labels` from now on."""

    @wrap(serving, "create_generative_scoring")
    async def create_generative_scoring(
        original: Callable[..., Awaitable[Any]],
        request: GenerativeScoringRequest,
        raw_request: Request | None = None,
    ) -> Any:
        labels = (request.model_extra or {}).get("labels")
        if labels is None or raw_request is None:
            return await original(request, raw_request)
        try:
            checked = _LABELS.validate_python(labels)
        except ValidationError:
            raise HTTPException(400, _WHAT_LABELS_ARE) from None
        if request.label_token_ids:
            raise HTTPException(400, "label_token_ids must be empty in a request with labels")
        if not 0 < len(request.items) * len(checked) <= scoring.MAX_CONTINUATIONS:
            limit = f"at least 1 and, times labels, at most {scoring.MAX_CONTINUATIONS:,}"
            raise HTTPException(400, f"the number of items must be {limit}")
        return await _scored(serving, request, raw_request, checked)


async def _scored(
    serving: ServingGenerativeScoring,
    request: GenerativeScoringRequest,
    raw_request: Request,
    labels: list[str | list[int]],
) -> GenerativeScoringResponse:
    tokenizer = serving.renderer.tokenizer
    if tokenizer is None:
        raise HTTPException(400, "labels need a server with a tokenizer")
    endings = [
        tokenizer.encode(label, add_special_tokens=False) if isinstance(label, str) else label
        for label in labels
    ]
    room = serving.model_config.max_model_len - max(map(len, endings))
    if room < 2:
        raise HTTPException(400, "a label is longer than the model's context")
    inputs, _ = await serving._build_prompts(request, tokenizer, room)
    salt = getattr(request, "cache_salt", None)  # from vLLM 0.32 on
    served = Served(raw_request, ScoreBody.model_construct(model=request.model, cache_salt=salt))
    prompts = [one["prompt_token_ids"] for one in inputs]
    requests = [
        scoring.score(served, ids, [ids + one for one in endings], unconditional=False, warm=True)
        for ids in prompts
    ]
    try:
        answers = await scoring.all_answers(requests)
    except scoring.NothingToScoreError as error:
        raise HTTPException(400, str(error)) from None
    num_prompt_tokens = sum(map(len, prompts))
    num_sampled = sum(usage["completion_tokens"] for one in answers for usage in one.costs)
    return GenerativeScoringResponse(
        id=f"generative-scoring-{request.request_id}",
        model=serving.models.model_name(None) if request.model is None else request.model,
        data=[_result(*one, request.apply_softmax) for one in enumerate(answers)],
        usage=UsageInfo(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_sampled,
            total_tokens=num_prompt_tokens + num_sampled,
        ),
    )


def _result(index: int, answer: scoring.Scored[Any], is_softmax: bool) -> Any:
    logprobs = [math.fsum(choice.logprobs) for choice in answer.choices]
    largest = max(logprobs) if is_softmax else 0.0
    if largest == -math.inf:  # no label is possible at all
        largest = 0.0
    scores = [math.exp(logprob - largest) for logprob in logprobs]
    total = (math.fsum(scores) if is_softmax else 0.0) or 1.0
    scores = [score / total for score in scores]
    return GenerativeScoringItemResult.model_validate(
        {"index": index, "score": scores[0], "label_scores": scores}
    )
