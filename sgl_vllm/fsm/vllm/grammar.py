"""vLLM's grammar interface over an automaton.

Owns where one request is in an automaton, which many may share, and what happens when a walk fails:
that request fails, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.fsm.automaton import UNLIMITED, Automaton, State
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.forecast import Forecast
from sgl_vllm.fsm.masks import fill, some_tokens
from sgl_vllm.fsm.vllm.resources import TokenizerResources
from sgl_vllm.protocol.quoting import quoted

logger = init_logger("vllm.sgl_vllm.fsm")

MAX_ALLOWANCE = 30_000
ALLOWANCE_PER_TOKEN = 500
"""What a request may have the automaton do in the engine's step, in threads looked at (some
microseconds each): so much at once, and so much more for each token."""

MAX_TOKENS_TRIED = 8
"""From a state that no request has left yet, to forecast what follows."""


class SglGrammar(StructuredOutputGrammar):
    """The grammar of one request.

    Invariant: `_path` holds the states after each accepted token, the start first. After a failure
    only the end of the text is offered, and then refused, so vLLM fails this request.

    Attributes:
        resources: of its vocabulary.
        refusal: why this request fails, if its format is the reason.

    Args:
        stops: the tokens that end the text. They are legal only where it may end.
        has_failed: called with the exception being handled when this grammar fails.
    """

    def __init__(
        self,
        resources: TokenizerResources,
        automaton: Automaton,
        stops: Iterable[int],
        has_failed: Callable[[Exception], None],
    ) -> None:
        self.resources = resources
        self._report_failure = has_failed
        self._automaton = automaton
        self._allowance = MAX_ALLOWANCE
        self.stops = frozenset(stops)
        size = resources.vocabulary.size
        self._stop_bits = [
            (t >> 5, np.uint32(1 << (t & 31))) for t in sorted(self.stops) if 0 <= t < size
        ]
        self._path: list[State] = [automaton.start]
        self._is_terminated = False
        self._has_failed = False
        self.refusal: str | None = None

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance. Tokens after the end are ignored, as in vLLM's backends.

        Returns: False at the first token that is not legal.
        """
        for token in tokens:
            if self._is_terminated:
                return True
            if not self._accept(token):
                shown = quoted(request_id)
                logger.error("the grammar of request %s refuses token %d", shown, token)
                return False
            self._allowance = min(MAX_ALLOWANCE, self._allowance + ALLOWANCE_PER_TOKEN)
        return True

    def accept_run(self, request_id: str, tokens: tuple[int, ...]) -> bool:
        """`accept_tokens` for forced text. A run that any request has accepted here before costs a
        microsecond."""
        before = len(self._path)
        states = self._path[-1].known_run(tokens)
        if states is None:
            if not self.accept_tokens(request_id, list(tokens)):
                return False
            self._path[before - 1].remember(tokens, tuple(self._path[before:]))
        else:
            self._path.extend(states)
            granted = ALLOWANCE_PER_TOKEN * len(tokens)
            self._allowance = min(MAX_ALLOWANCE, self._allowance + granted)
        return True

    def _accept(self, token: int) -> bool:
        state = self._path[-1]
        if token in self.stops:
            if not state.accepting or self._has_failed:
                return False
            self._is_terminated = True
            self._path.append(state)
            return True
        following = self._after(state, token)
        if following is None:
            return False
        self._path.append(following)
        return True

    def _after(self, state: State, token: int) -> State | None:
        pieces = self.resources.token_bytes
        piece = pieces[token] if 0 <= token < len(pieces) else b""
        if not piece:
            return None
        self._automaton.allowance = self._allowance
        try:
            return state.walk(piece)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            self._settle()

    def _settle(self) -> None:
        """Take over what is left of the allowance. Other threads may walk the same automaton for
        other requests, so this is no exact account."""
        self._allowance = min(self._allowance, self._automaton.allowance)
        self._automaton.allowance = UNLIMITED

    def _fail(self, error: Exception) -> None:
        """Fail this request; called while `error` is handled."""
        if isinstance(error, TooComplexError):
            logger.warning("a structured-output request fails: %s", error)
            self.refusal = f"{error}. Sent again, the request goes to vLLM's own backend"
        self._report_failure(error)
        self._has_failed = True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest prefix of `tokens` that would be accepted; does not advance."""
        length, is_terminated = len(self._path), self._is_terminated
        count = 0
        for token in tokens:
            if token < 0 or self._is_terminated or not self._accept(token):
                break
            count += 1
        del self._path[length:]
        self._is_terminated = is_terminated
        return list(tokens[:count])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0:
            del self._path[-num_tokens:]
            self._is_terminated = False

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        words = self.resources.words(bitmask, batch_index)
        state = self._path[-1]
        self._automaton.allowance = self._allowance
        try:
            if self._has_failed:
                words.fill(0)
            else:
                fill(self.resources.bitmasks.of(state), words)
        except Exception as error:
            self._fail(error)
            words.fill(0)
        finally:
            self._settle()
        may_end = state.accepting or self._has_failed
        for number, bit in self._stop_bits:
            if may_end:
                words[number] |= bit
            else:
                words[number] &= ~bit

    def is_terminated(self) -> bool:
        return self._is_terminated

    def reset(self) -> None:
        del self._path[1:]
        self._is_terminated = False

    def forecast_of_last_token(self) -> Forecast | None:
        """The forecast that what follows the last token confirms or not; None before the first."""
        return self._path[-2] if len(self._path) > 1 else None

    def likelihood_of_forced(self) -> float:
        """How likely forced text is after the next token, from 0 to 1. May do what the request's
        allowance is for, and leaves it as it is."""
        state = self._path[-1]
        self._automaton.allowance = self._allowance
        try:
            return state.likelihood(
                partial(state.is_mostly_forced, partial(self._some_pieces, state))
            )
        finally:
            self._automaton.allowance = UNLIMITED

    def _some_pieces(self, state: State) -> list[bytes]:
        pieces = self.resources.token_bytes
        tokens = some_tokens(self.resources.bitmasks.of(state), MAX_TOKENS_TRIED)
        return [pieces[token] for token in tokens]

    def forced(self) -> tuple[bytes, int, int | None]:
        """What must come next.

        Returns: the bytes; the bytes that may follow them, as bits; and the one token that then
            ends the text, if nothing else may come.
        """
        self._automaton.allowance = self._allowance
        try:
            run, end = self._path[-1].forced()
        except Exception as error:  # counted here, so that jump-forward stays on
            self._fail(error)
            return b"", 0, None
        finally:
            self._settle()
        only_end = end.accepting and not end.first and len(self.stops) == 1
        return run, end.first, next(iter(self.stops)) if only_end else None
