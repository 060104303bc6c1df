"""What jump-forward must be equal to: the same forced tokens, decoded one by one.

The reference forces nothing into a request. It only narrows the grammar's mask: where the grammar
forces text, just the canonical token of it is legal, and the model samples it in a pass of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.jump.jump import JumpForward


class NarrowedGrammar(StructuredOutputGrammar):
    """A grammar that has accepted `pending` already and lets only these tokens through first."""

    def __init__(self, inner: StructuredOutputGrammar) -> None:
        self.inner = inner
        self.pending: deque[int] = deque()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self.pending:
                if self.pending.popleft() != token:
                    return False
            elif not self.inner.accept_tokens(request_id, [token]):
                return False
        return True

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        if not self.pending:
            self.inner.fill_bitmask(bitmask, index)
            return
        word, bit = divmod(self.pending[0], 32)
        bitmask[index].zero_()
        bitmask[index, word] = (1 << bit) - (1 << 32 if bit == 31 else 0)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise AssertionError("no drafts in this test")

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("no drafts in this test")

    def is_terminated(self) -> bool:
        return not self.pending and self.inner.is_terminated()

    def reset(self) -> None:
        self.pending.clear()
        self.inner.reset()


class OneByOne(JumpForward):
    """Put in place of a scheduler's jump."""

    def open(self, request: Request) -> None:
        if self.may_jump(request):
            self._narrow(request)

    def after_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            request = self._scheduler.requests.get(output.request_id)
            if output.finish_reason or not output.new_token_ids or request is None:
                continue
            if self.may_jump(request):
                self._narrow(request)

    def _narrow(self, request: Request) -> None:
        structured = request.structured_output_request
        grammar: Any = structured.grammar
        narrowed = grammar if isinstance(grammar, NarrowedGrammar) else NarrowedGrammar(grammar)
        if not narrowed.pending:
            structured.grammar = narrowed.inner
            narrowed.pending.extend(self._source.take(request))
        structured.grammar = narrowed


def decode_one_by_one(engine: Any) -> None:
    """From now on `engine` narrows masks instead of jumping."""
    engine.scheduler.parts.jump = OneByOne(
        engine.scheduler, "canonical", [engine.scheduler.parts.reports]
    )
