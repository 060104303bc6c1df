"""Forced tokens from live grammars, with errors contained.

Owns what an unexpected error costs: its request decodes token by token. Does not own which tokens
are forced (`fsm/vllm/forced_tokens.py`, `unique.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

from vllm.logger import init_logger
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.degrade import Guard
from sgl_vllm.fsm.forecast import Forecast
from sgl_vllm.fsm.vllm.forced_tokens import ForcedTokens, live_grammar, may_end
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.jump.counters import JumpCounters
from sgl_vllm.jump.part import LEAST_RUN, shows_end
from sgl_vllm.jump.refused import refuses
from sgl_vllm.jump.unique import UniqueTokens
from sgl_vllm.protocol.quoting import quoted

logger = init_logger("vllm.sgl_vllm.jump")

Answer = TypeVar("Answer")


class ForcedSource:
    """The forced tokens of requests, one run at a time. Never raises.

    Args:
        mode: a value of the option `jump_mode`.
        learns: whether `likelihood` will be called, so that `take` must collect statistics.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        mode: str,
        counters: JumpCounters,
        *,
        learns: bool = False,
    ) -> None:
        self._manager = manager
        self._is_canonical = mode == "canonical"
        self._taker = ForcedTokens(manager) if self._is_canonical else UniqueTokens(manager)
        self._counters = counters
        self._learns = learns
        self._forecasts: WeakKeyDictionary[Request, Forecast] = WeakKeyDictionary()
        """Of grammars of vLLM's own backends, which do not say where they are: one for all tokens
        of a request."""
        self._guard = Guard("jump-forward", "no other request is affected", logger)
        self._excluded: WeakSet[Request] = WeakSet()
        """Requests with an error, which decode token by token."""

    def take(self, request: Request) -> list[int]:
        """The tokens forced after the last token of `request`; its grammar has accepted them. None
        if the request's sampling parameters refuse one of them. Without the token that ends the
        text, if that is shown (`shows_end`)."""
        return self._ask(request, self._take) or []

    def take_opening(self, request: Request) -> list[int]:
        """`take` for text that is sent together with the first sampled token. Empty if a stream
        shows that token and it may end the text: a shown end gets its own chunk."""
        forced, params = self.take(request), request.sampling_params
        if not forced or params is None or not shows_end(params):
            return forced
        grammar = live_grammar(self._manager, request)
        if grammar is None:
            return forced
        if not self._ask(request, lambda _: may_end(grammar, params.all_stop_token_ids)):
            return forced
        self.take_back(request, len(forced))
        return []

    def take_back(self, request: Request, num_tokens: int) -> bool:
        """Roll the grammar back by the last tokens that it has accepted. Whether that worked."""
        return bool(self._ask(request, lambda one: _roll_back(one, num_tokens)))

    def num_canonical(self, request: Request, tokens: list[int]) -> int:
        """How many of the sampled `tokens` come before forced text that they spell in other tokens
        than a jump; all of them if there is no such text. What is forced after the last one does
        not matter. The grammar, which has not accepted them, stays as it is.

        Costs at most one question to the grammar for each token but the last.
        """
        number = self._ask(request, lambda one: self._num_canonical(one, tokens))
        return len(tokens) if number is None else number

    def likelihood(self, request: Request) -> float:
        """How likely forced tokens are after the next one of `request`, from 0 to 1."""
        return self._ask(request, self._likelihood) or 0.0

    def record(self, request: Request, consequence: str) -> None:
        """Count the exception being handled; call it from an `except` block.

        Args:
            consequence: what happens to the request, for the log.
        """
        self._counters.errors += 1
        self._guard.record(f"request {quoted(request.request_id)}, which {consequence}")

    def _ask(self, request: Request, question: Callable[[Request], Answer]) -> Answer | None:
        """The answer; None for a request that has had an error, now or before."""
        if request in self._excluded:
            return None
        try:
            return question(request)
        except Exception:
            self._excluded.add(request)
            self.record(request, "decodes token by token")
            return None

    def _take(self, request: Request) -> list[int]:
        params = request.sampling_params
        assert params is not None
        forecast = self._forecast_of_last_token(request) if self._learns else None
        forced = self._taker.take(request)
        if forced and refuses(request, forced):
            _roll_back(request, len(forced))
            forced = []
        ends = bool(forced) and live_grammar(self._manager, request) is None
        if ends and shows_end(params):
            _roll_back(request, 1)
            forced, ends = forced[:-1], False
        if forecast is not None:
            forecast.learn(ends or len(forced) >= LEAST_RUN)
        return forced

    def _num_canonical(self, request: Request, tokens: list[int]) -> int:
        grammar = live_grammar(self._manager, request)
        if grammar is None:
            return len(tokens)
        known, num_accepted = request._all_token_ids, 0
        num_before = len(known)
        try:
            while num_accepted < len(tokens) - 1 and not grammar.is_terminated():
                token = tokens[num_accepted]
                if grammar.validate_tokens([token]) != [token]:
                    break
                grammar.accept_tokens(request.request_id, [token])
                known.append(token)
                num_accepted += 1
                forced = self._taker.take(request)
                if forced != tokens[num_accepted : num_accepted + len(forced)]:
                    grammar.rollback(len(forced))
                    return num_accepted
                known.extend(forced)
                num_accepted += len(forced)
            return len(tokens)
        finally:
            del known[num_before:]
            grammar.rollback(num_accepted)

    def _likelihood(self, request: Request) -> float:
        grammar = live_grammar(self._manager, request)
        if grammar is None:
            return 0.0
        if isinstance(grammar, SglGrammar):
            return grammar.likelihood_of_forced()
        forecast = self._forecasts.setdefault(request, Forecast())
        return forecast.likelihood(lambda: self._is_canonical)

    def _forecast_of_last_token(self, request: Request) -> Forecast | None:
        """The forecast that what follows the last token of `request` confirms or not."""
        grammar = live_grammar(self._manager, request)
        if isinstance(grammar, SglGrammar):
            return grammar.forecast_of_last_token()
        return self._forecasts.setdefault(request, Forecast()) if grammar is not None else None


def _roll_back(request: Request, num_tokens: int) -> bool:
    structured = request.structured_output_request
    grammar = structured.grammar if structured is not None else None
    assert isinstance(grammar, StructuredOutputGrammar)
    grammar.rollback(num_tokens)
    return True
