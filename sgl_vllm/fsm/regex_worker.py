"""Compiles patterns in a process of its own (`worker.py`): a pattern, its `regex.build`."""

from __future__ import annotations

from sgl_vllm.fsm.automaton import TooComplexError
from sgl_vllm.fsm.regex import TOO_COMPLEX, UNSUPPORTED, UnsupportedPatternError, build
from sgl_vllm.fsm.worker import serve


def answer(question: bytes) -> tuple[int, bytes]:
    try:
        return 0, build(question.decode())
    except (TooComplexError, MemoryError) as error:
        return TOO_COMPLEX, str(error).encode()
    except UnsupportedPatternError as error:
        return UNSUPPORTED, str(error).encode()


if __name__ == "__main__":
    build("a")  # imports what it needs
    serve(answer)
