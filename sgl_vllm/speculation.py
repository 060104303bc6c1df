"""Beside which methods of speculative decoding the parts work.

Owns the table of methods, with a reason for each that is refused. Does not own what a part does
beside a drafter: `radix/manager.py` ends hits before tokens that the drafter has read ahead, and
`jump/jump.py` drops the drafts of a request that jumps. Imports no vLLM at run time.

The answers never depend on a drafter, because the model verifies every draft. What the parts must
keep is the model's own KV: only tokens that it has accepted are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.runners import kind_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Support:
    """What is known of one method.

    Attributes:
        refused: why the parts are off beside it, for a log line; None if they work.
        is_tested: the project's tests run it on a CPU. The self-check compares the others with
            stock vLLM before the first request.
    """

    refused: str | None = None
    is_tested: bool = False


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter does to the KV cache, in tokens.

    Attributes:
        num_lookahead: how many tokens after a token it reads to compute its own KV of that token.
        num_slots: the most slots that a request has beyond its own tokens: for drafts that are
            verified, and for those that the drafter writes.
    """

    num_lookahead: int = 0
    num_slots: int = 0


NO_DRAFTING = Drafting()

_BLOCK_DRAFTER = "its drafter fills in several tokens at once, which is not verified"
_NO_TEST = "no test of this project runs it"

METHODS: Mapping[str, Support] = {
    "ngram": Support(is_tested=True),
    "draft_model": Support(is_tested=True),
    "eagle": Support(is_tested=True),
    "eagle3": Support(is_tested=True),
    "mtp": Support(is_tested=True),
    "ngram_gpu": Support(),
    "dflash": Support(_BLOCK_DRAFTER),
    "dspark": Support(_BLOCK_DRAFTER),
    "suffix": Support(_NO_TEST),
    "medusa": Support(_NO_TEST),
    "mlp_speculator": Support(_NO_TEST),
    "custom_class": Support("its drafter is the user's own"),
    "extract_hidden_states": Support("it stores hidden states by block, for others to read"),
}
"""By the value of `SpeculativeConfig.method`, as vLLM has resolved it. Others are refused."""


def is_tested(vllm_config: VllmConfig) -> bool:
    """Whether the project's tests run this speculation, or none is configured."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return True
    support = METHODS.get(speculative.method or "")
    return support is not None and support.is_tested


def refusal(vllm_config: VllmConfig) -> str | None:
    """Why radix, jump-forward and select are off beside the configured speculation, for a log line;
    None if they work beside it, or if there is none."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    method = speculative.method or "none"
    support = METHODS.get(method, Support("it is not known to this version"))
    reason = support.refused or _why_lookahead_is_refused(vllm_config)
    if reason is None and replays_states(vllm_config):
        reason = "with --use-replayssm a pass leaves no recurrent state behind"
    return f"speculative decoding with {method}: {reason}" if reason else None


def refusal_beside_groups(vllm_config: VllmConfig) -> str | None:
    """Why the tree is off beside the configured speculation, for a model with several KV-cache
    groups, if `refusal` gives no reason; None if it works."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        return None
    return (
        "speculative decoding with draft_model and several KV-cache groups: "
        f"{kind_of(vllm_config).why_no_draft_model}"
    )


def facts_of(vllm_config: VllmConfig) -> dict[str, object] | None:
    """The configured speculation, as far as the result of a check may depend on it."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    return {
        "method": speculative.method,
        "model": speculative.model,
        "num_speculative_tokens": speculative.num_speculative_tokens,
    }


def drafting_of(vllm_config: VllmConfig) -> Drafting:
    """What the configured speculation does to the KV cache; nothing without one."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return NO_DRAFTING
    num_slots = 2 * (speculative.num_speculative_tokens or 0) + 1
    return Drafting(vllm_config.num_prefill_lookahead_tokens, num_slots)


def replays_states(vllm_config: VllmConfig) -> bool:
    """Whether `--use-replayssm` is set. vLLM 0.31 does not have it."""
    return getattr(vllm_config.cache_config, "use_replayssm", False)


def _why_lookahead_is_refused(vllm_config: VllmConfig) -> str | None:
    num_tokens = vllm_config.num_prefill_lookahead_tokens
    if num_tokens > 1:
        return f"its drafter reads {num_tokens} tokens ahead, which is not verified"
    if num_tokens and vllm_config.kv_transfer_config is not None:
        return "a KV connector does not know which tokens its drafter has read ahead"
    return None
