"""When jump-forward is off: in an engine, for one request, and for one run of forced tokens."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from sgl_vllm.fsm.vllm.part import why_no_backend
from sgl_vllm.jump.connectors import unfit
from sgl_vllm.part import EngineView, Part
from sgl_vllm.speculation import refusal

if TYPE_CHECKING:
    from vllm.v1.request import Request


def _unsupported(engine: EngineView) -> str | None:
    scheduler, vllm_config = engine.scheduler, engine.vllm_config
    if engine.options.jump_mode == "canonical" and (reason := why_no_backend(vllm_config)):
        return reason
    if (reason := refusal(vllm_config)) is not None:
        return reason
    if vllm_config.model_config.logits_processors or entry_points(group="vllm.logits_processors"):
        return "custom logits processors would not see forced tokens as output"
    if scheduler.return_sampling_mask:
        return "sampling masks are returned for every token"
    if name := unfit(scheduler.connectors):
        return f"it is not known whether {name} takes jumped requests for new ones"
    if scheduler.use_pp and scheduler.use_v2_model_runner and engine.options.self_check != "on":
        return (
            "with pipeline parallelism and the V2 model runner it has never run "
            "(self_check=on tries it here)"
        )
    return None


PART = Part("jump_forward", _unsupported)


def may_jump(request: Request, *, has_logprobs: bool, drops_after_stop: bool) -> bool:
    """Whether jumping leaves the output of `request` exactly as it would be without.

    On the V1 runner, earlier output of a resumed request counts as prompt. So a request decodes
    token by token if its sampling looks at the output alone (presence and frequency penalties, bad
    words) or changes which legal token is picked. So does a request with a seed, because each
    sampled token advances its random generator and forced tokens would not.

    Args:
        has_logprobs: whether the engine returns log-probabilities, not logits.
        drops_after_stop: whether vLLM's frontend, which looks for stop strings, drops the tokens
            that the engine has sent together with the last one of a stop string (from 0.32 on).
    """
    params = request.sampling_params
    if params is None or not request.use_structured_output:
        return False
    return not (
        request.mm_features
        or request.resumable
        or request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or (params.num_logprobs is not None and not has_logprobs)
        or params.logprobs == -1
        or params.logprob_token_ids
        or params.prompt_logprobs is not None
        or (params.stop and not drops_after_stop)
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.logit_bias
        or params.allowed_token_ids
        or (params.seed is not None and params.temperature > 0)
    )


SENT_PER_PASS = 65_536
"""A jumped request is sent to the worker whole, which takes 3 ms for 32,000 tokens. So many tokens
take as long as a decoding pass: 6 ms for 8 billion weights on an H100."""


def least_run(mode: str, num_tokens: int, *, has_step_in_flight: bool) -> int:
    """How many forced tokens are worth a jump. Each but the one that the step in flight would
    decode saves a pass.

    With canonical tokenization any run is: decoding might write the same text in other tokens, and
    an answer must not depend on which steps were in flight.

    Args:
        mode: a value of the option `jump_mode`.
        num_tokens: prompt and output of the request.
    """
    if mode != "exact":
        return 1
    return 1 + has_step_in_flight + num_tokens // SENT_PER_PASS
