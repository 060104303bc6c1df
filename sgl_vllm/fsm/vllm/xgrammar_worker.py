"""The process that compiles with xgrammar (`worker.py`), to see that it comes to an end.

The first question is the vocabulary, as xgrammar serializes it. Each other question is a list of
calls of its compiler, `[[method, argument, options], ...]`, or one call for a JSON schema or a
structural tag in an object, `{"print": [method, argument, options]}`, which prints its grammar
instead. The answer is that grammar, or empty: what is wrong with a format is reported by the
backend that compiles it next.
"""

from __future__ import annotations

import json
import sys

from sgl_vllm.fsm.vllm.xgrammar_alone import xgrammar
from sgl_vllm.fsm.worker import serve

NUM_THREADS = 4
_PRINTED = {
    "compile_json_schema": xgrammar.Grammar.from_json_schema,
    "compile_structural_tag": xgrammar.Grammar.from_structural_tag,
}
_compilers: list[xgrammar.GrammarCompiler] = []


def answer(question: bytes) -> tuple[int, bytes]:
    if not _compilers:
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(question.decode())
        _compilers.append(
            xgrammar.GrammarCompiler(vocabulary, max_threads=NUM_THREADS, cache_enabled=False)
        )
        return 0, b""
    asked = json.loads(question)
    try:
        if isinstance(asked, dict):
            method, argument, options = asked["print"]
            return 0, str(_PRINTED[method](argument, **options)).encode()
        for method, argument, options in asked:
            getattr(_compilers[0], method)(argument, **options)
    except Exception as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            sys.exit(1)  # the asker sees that the process has ended
    return 0, b""


if __name__ == "__main__":
    serve(answer)
