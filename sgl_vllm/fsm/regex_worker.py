"""The process that compiles patterns (`worker.py`): a question is a pattern, an answer what
`rust_regex.build` returns."""

from __future__ import annotations

from sgl_vllm.fsm.errors import TooComplexError, UnsupportedPatternError
from sgl_vllm.fsm.rust_regex import TOO_COMPLEX, UNSUPPORTED, build
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
