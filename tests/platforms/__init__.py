"""Which of vLLM's model runners and schedulers the engine tests run on, on a CPU.

    python -m pytest -p tests.platforms.plugin --vllm-platform v2-async tests/engine/test_radix.py
    python -m tests.engine.soak --vllm-platform v2-async --minutes 15
    make test-platforms

| platform | model runner | scheduling |
|---|---|---|
| `v2-async` (vLLM's choice on a GPU) | V2 | asynchronous |
| `v2-sync` | V2 | synchronous |
| `v1-async` | V1 (deprecated) | asynchronous |
| `v1-sync` (vLLM's choice on a CPU) | V1 (deprecated) | synchronous |

The runners are vLLM's own. The V2 runner's Triton kernels run in Triton's interpreter, which takes
the place of a GPU (`interpreter.py`); a pass is several times slower than with the V1 runner, so
`tests/effort.py` sends fewer requests there.
"""
