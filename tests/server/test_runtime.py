"""SGLang's `Runtime` starts a real `vllm serve`, and ends it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

import sgl_vllm.sglang as sgl
from tests.server.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

API_KEY = "a-key"
BLOCK_SIZE = 64


@sgl.function
def capital(s, country):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))


@pytest.fixture(scope="module")
def runtime() -> Iterator[sgl.Runtime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        started = sgl.Runtime(
            model_path=MODEL, context_length=2048, page_size=BLOCK_SIZE, api_key=API_KEY
        )
    yield started
    started.shutdown()


def answer_of(backend: object) -> str:
    answer: str = capital.run("France", backend=backend)["answer"]
    return answer


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_program_runs_on_it_and_on_its_endpoint(runtime):
    assert "Paris" in answer_of(runtime)
    assert answer_of(runtime.endpoint) == answer_of(runtime)
    # As programs do from another process.
    assert answer_of(sgl.RuntimeEndpoint(runtime.url, api_key=API_KEY)) == answer_of(runtime)


def test_it_tells_what_it_runs(runtime):
    assert httpx.get(f"{runtime.url}/health").status_code == 200
    assert runtime.get_model_name() == MODEL
    info = runtime.get_server_info()
    assert info == {
        **runtime.endpoint.get_server_info(),
        "internal_states": info["internal_states"],
    }
    assert (info["model_path"], info["context_length"], info["plugin"]) == (MODEL, 2048, True)
    assert info["internal_states"][0]["parts"]["radix"] == "on"
    assert runtime.get_tokenizer().encode("The capital of France")


def test_a_text_is_cached_before_a_program_begins_with_it_and_until_it_is_flushed(runtime):
    text = "The rivers of Egypt, and the cities beside them. " * 16

    @sgl.function
    def complete(s):
        s += text + sgl.gen("more", max_tokens=2, temperature=0)

    def cached_tokens() -> int:
        """In whole blocks, as the server reports them."""
        meta = complete.run(backend=runtime).get_meta_info("more")
        assert meta["prompt_tokens"] > BLOCK_SIZE
        return int(meta["cached_tokens"])

    runtime.flush_cache()
    assert cached_tokens() == 0
    runtime.flush_cache()
    runtime.cache_prefix(text)
    assert cached_tokens() >= BLOCK_SIZE
    runtime.endpoint.flush_cache()
    assert cached_tokens() == 0


def test_shutdown_ends_the_process(runtime):
    process = psutil.Process(runtime.pid)
    all_of_them = [process, *process.children(recursive=True)]
    assert any("serve" in one.cmdline() for one in all_of_them[1:])
    runtime.shutdown()
    assert runtime.pid is None
    assert not [one for one in all_of_them if is_alive(one)]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{runtime.url}/health")
    runtime.shutdown()  # ends nothing more
