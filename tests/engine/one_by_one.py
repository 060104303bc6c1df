"""What jump-forward must be equal to: the same forced tokens, decoded one by one by stock vLLM.

The reference forces nothing into a request. It only narrows the grammar's mask: where text is
forced, just the canonical token of it is legal, and the model samples it in a pass of its own.
Which token that is comes from `forced_oracle.py`, not from the plugin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xgrammar
from vllm import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

from tests.engine.forced_oracle import ForcedOracle

DROPS_AFTER_STOP = hasattr(OutputProcessor, "_trim_surplus_tokens")
"""vLLM 0.31 keeps tokens that come after a stop string."""


class NarrowedGrammar(StructuredOutputGrammar):
    """xgrammar's grammar of a request, with masks that allow just the next of `forced`."""

    def __init__(self, inner: XgrammarGrammar) -> None:
        self.inner = inner
        self.forced: deque[int] = deque()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self.forced and self.forced.popleft() != token:
                return False
        return self.inner.accept_tokens(request_id, tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        if not self.forced:
            self.inner.fill_bitmask(bitmask, index)
            return
        word, bit = divmod(self.forced[0], 32)
        bitmask[index].zero_()
        bitmask[index, word] = (1 << bit) - (1 << 32 if bit == 31 else 0)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise AssertionError("no drafts in this test")

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("no drafts in this test")

    def is_terminated(self) -> bool:
        return self.inner.is_terminated()

    def reset(self) -> None:
        self.forced.clear()
        self.inner.reset()


def jumps(params: SamplingParams, *, on_v2: bool) -> bool:
    """Whether docs/structured-output.md promises that such a request jumps on this model runner."""
    decoded_token_by_token = bool(params.stop) and not DROPS_AFTER_STOP
    decoded_on_v1 = params.seed is not None and params.temperature > 0
    return not decoded_token_by_token and (on_v2 or not decoded_on_v1)


def refuses(params: SamplingParams, output: Sequence[int], forced: Sequence[int]) -> bool:
    """Whether it promises that these forced tokens are left to the model."""
    for number in range(len(forced)):
        so_far = [*output, *forced[: number + 1]]
        if any(so_far[-len(word) :] == word for word in params.bad_words_token_ids or ()):
            return True
    biased, allowed = params.logit_bias or (), params.allowed_token_ids or forced
    return any(token in biased or token not in allowed for token in forced)


@contextmanager
def decoding_one_by_one(scheduler: Scheduler) -> Iterator[None]:
    """While inside, a stock scheduler narrows the masks of requests that would jump.

    Raises AssertionError if the scheduler is the plugin's or works asynchronously: the first would
    be no reference, and the second fills masks before it knows the tokens.
    """
    assert type(scheduler) is Scheduler
    manager = scheduler.structured_output_manager
    vocab_size = scheduler.vllm_config.model_config.get_vocab_size()
    tokenizer: Any = manager.tokenizer
    if manager.backend is None:
        manager.backend = XgrammarBackend(
            scheduler.vllm_config, tokenizer=tokenizer, vocab_size=vocab_size
        )
    oracle = ForcedOracle(
        partial(tokenizer.encode, add_special_tokens=False),
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size),
    )
    get_grammar_bitmask = scheduler.get_grammar_bitmask

    def of_narrowed(scheduled: SchedulerOutput) -> GrammarOutput | None:
        for request_id in scheduled.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            if jumps(request.sampling_params, on_v2=scheduler.use_v2_model_runner):
                _narrow(request, oracle)
        return get_grammar_bitmask(scheduled)

    scheduler.get_grammar_bitmask = of_narrowed
    try:
        yield
    finally:
        del scheduler.get_grammar_bitmask  # the class has it


def _narrow(request: Request, oracle: ForcedOracle) -> None:
    """Let only forced tokens through, if there are any where the output ends."""
    structured = request.structured_output_request
    params = request.sampling_params
    if structured is None or params is None or request.is_prefill_chunk:
        return
    if params.prompt_logprobs is not None and not request.num_output_tokens:
        return  # what is forced at the start is left to the model
    if not isinstance(structured.grammar, NarrowedGrammar):
        assert isinstance(structured.grammar, XgrammarGrammar)
        structured.grammar = NarrowedGrammar(structured.grammar)
    narrowed = structured.grammar
    if not narrowed.forced and not narrowed.is_terminated():
        prompt, output = request.prompt_token_ids, request.output_token_ids
        stops = params.all_stop_token_ids
        assert prompt is not None
        forced = oracle.forced(narrowed.inner.ctx, stops, prompt, output)
        if not refuses(params, output, forced):
            narrowed.forced.extend(forced)
