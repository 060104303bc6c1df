"""Helpers: walks of texts through automata, and random ones out of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.expressions import Expression


def bits_of(byte_set: int) -> Iterator[int]:
    """The bytes in a set of bytes (bit b for byte b), in order."""
    return (byte for byte in range(256) if byte_set >> byte & 1)


def after(state: State, text: str | bytes) -> State | None:
    """The state after `text`; None where it is refused."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    for byte in data:
        following = state.step(byte)
        if following is None:
            return None
        state = following
    return state


def accepts(automaton: Automaton | Expression, text: str | bytes) -> bool:
    """Whether the whole `text` is legal."""
    if not isinstance(automaton, Automaton):
        automaton = Automaton(automaton)
    state = after(automaton.start, text)
    return state is not None and state.accepting


def random_walk(start: State, rng: random.Random, steps: int, end: float = 0.5) -> list[State]:
    """The states of a random text, which ends where it may with probability `end`."""
    states = [start]
    for _ in range(steps):
        state = states[-1]
        if not state.first or (state.accepting and rng.random() < end):
            break
        following = state.step(rng.choice(list(bits_of(state.first))))
        assert following is not None
        states.append(following)
    return states


def random_text(start: State, rng: random.Random, steps: int) -> bytes | None:
    """A random legal text; None if it is not at an end after so many bytes."""
    state, text = start, bytearray()
    for _ in range(steps):
        if state.accepting and (not state.first or rng.random() < 0.5):
            return bytes(text)
        options = list(bits_of(state.first))
        # Ends of strings and of objects are rare among bytes: prefer punctuation.
        marks = [byte for byte in options if byte in b'"}],:']
        byte = rng.choice(marks if marks and rng.random() < 0.4 else options)
        following = state.step(byte)
        assert following is not None
        text.append(byte)
        state = following
    return bytes(text) if state.accepting else None
