"""Forced tokens from live grammars, with errors contained.

Owns what an unexpected error costs: its request decodes token by token. Does not own which tokens
are forced (`fsm/vllm/forced_tokens.py`, `unique.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakSet

from vllm.logger import init_logger
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.degrade import Guard
from sgl_vllm.fsm.forecast import Forecast
from sgl_vllm.fsm.vllm.forced_tokens import ForcedTokens, live_grammar
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.jump.counters import JumpCounters
from sgl_vllm.jump.part import least_run, shows_end
from sgl_vllm.jump.unique import UniqueTokens
from sgl_vllm.protocol.quoting import quoted

if TYPE_CHECKING:
    from sgl_vllm.jump.refused import RefusedTokens

logger = init_logger("vllm.sgl_vllm.jump")

WORTH_A_HELD_PASS = least_run(has_step_in_flight=True)
"""With at least this many forced tokens, or the end of the text, after a token, it pays that the
next pass waits for it."""


class _Taker(Protocol):
    def take(self, request: Request) -> list[int]: ...


class ForcedSource:
    """The forced tokens of requests, one run at a time. Never raises.

    Args:
        mode: a value of the option `jump_mode`.
        refused: which forced tokens requests do not take.
        learns: whether `likelihood` will be called, so that `take` must collect statistics.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        mode: str,
        refused: RefusedTokens,
        counters: JumpCounters,
        *,
        learns: bool = False,
    ) -> None:
        self._learns = learns
        self._forecasts: WeakKeyDictionary[Request, Forecast] = WeakKeyDictionary()
        self._refused = refused
        self._counters = counters
        self._manager = manager
        self._is_canonical = mode == "canonical"
        self._taker: _Taker = ForcedTokens(manager) if self._is_canonical else UniqueTokens(manager)
        self._guard = Guard("jump-forward", "no other request is affected", logger)
        self._excluded: WeakSet[Request] = WeakSet()
        """Requests with an error, which decode token by token."""

    def take(self, request: Request) -> list[int]:
        """The tokens forced after the last token of `request`; its grammar has accepted them. None
        if the request's sampling parameters refuse one of them. Without the token that ends the
        text, if that is shown (`shows_end`)."""
        if request in self._excluded:
            return []
        try:
            forecast = self._forecast_of_last_token(request) if self._learns else None
            forced = self._taker.take(request)
        except Exception:
            self._exclude(request)
            return []
        if forced and self._refuses(request, forced):
            self.take_back(request, len(forced))
            forced = []
        if forced and self._has_shown_end(request):
            forced = forced[:-1] if self.take_back(request, 1) else []
        if forecast is not None:
            ends = bool(forced) and live_grammar(self._manager, request) is None
            forecast.learn(ends or len(forced) >= WORTH_A_HELD_PASS)
        return forced

    def _refuses(self, request: Request, forced: list[int]) -> bool:
        try:
            return self._refused.any_of(request, forced)
        except Exception:
            self._exclude(request)
            return True

    def _has_shown_end(self, request: Request) -> bool:
        """Whether the tokens taken last end the text of a request whose client sees that."""
        params = request.sampling_params
        is_seen = params is not None and shows_end(params)
        return is_seen and live_grammar(self._manager, request) is None

    def num_canonical(self, request: Request, tokens: list[int]) -> int:
        """How many of the sampled `tokens` come before forced text that they spell in other tokens
        than a jump; all of them if there is no such text. What is forced after the last one does
        not matter. The grammar, which has not accepted them, stays as it is.

        Costs at most one question to the grammar for each token but the last.
        """
        grammar = live_grammar(self._manager, request)
        if grammar is None or request in self._excluded:
            return len(tokens)
        all_token_ids = request._all_token_ids
        num_before, num_accepted = len(all_token_ids), 0
        differs = False
        try:
            while num_accepted < len(tokens) - 1 and not (differs or grammar.is_terminated()):
                token = tokens[num_accepted]
                if grammar.validate_tokens([token]) != [token]:
                    break
                grammar.accept_tokens(request.request_id, [token])
                num_accepted += 1
                all_token_ids.append(token)
                forced = self._taker.take(request)
                if forced == tokens[num_accepted : num_accepted + len(forced)]:
                    num_accepted += len(forced)
                    all_token_ids.extend(forced)
                else:
                    grammar.rollback(len(forced))
                    differs = True
            grammar.rollback(num_accepted)
        except Exception:
            self._exclude(request)
            return len(tokens)
        finally:
            del all_token_ids[num_before:]
        return num_accepted if differs else len(tokens)

    def likelihood(self, request: Request) -> float:
        """How likely forced tokens are after the next one of `request`, from 0 to 1."""
        if request in self._excluded:
            return 0.0
        try:
            grammar = live_grammar(self._manager, request)
            if grammar is None:
                return 0.0
            if isinstance(grammar, SglGrammar):
                return grammar.likelihood_of_forced()
            return self._forecast_of_request(request).likelihood(lambda: self._is_canonical)
        except Exception:
            self._exclude(request)
            return 0.0

    def _forecast_of_last_token(self, request: Request) -> Forecast | None:
        """The forecast that what follows the last token of `request` confirms or not."""
        grammar = live_grammar(self._manager, request)
        if grammar is None:
            return None
        if isinstance(grammar, SglGrammar):
            return grammar.forecast_of_last_token()
        return self._forecast_of_request(request)

    def _forecast_of_request(self, request: Request) -> Forecast:
        """For all its tokens: grammars of vLLM's own backends do not say where they are."""
        return self._forecasts.setdefault(request, Forecast())

    def take_back(self, request: Request, num_tokens: int) -> bool:
        """Roll the grammar back by the last tokens that it has accepted. Whether that worked."""
        structured = request.structured_output_request
        assert structured is not None
        try:
            grammar = structured.grammar
            assert isinstance(grammar, StructuredOutputGrammar)
            grammar.rollback(num_tokens)
            return True
        except Exception:
            self._exclude(request)
            return False

    def record(self, request: Request, consequence: str) -> None:
        """Count the exception being handled; call it from an `except` block.

        Args:
            consequence: what happens to the request, for the log.
        """
        self._counters.errors += 1
        self._guard.record(f"request {quoted(request.request_id)}, which {consequence}")

    def _exclude(self, request: Request) -> None:
        """Called from an `except` block."""
        self._excluded.add(request)
        self.record(request, "decodes token by token")
