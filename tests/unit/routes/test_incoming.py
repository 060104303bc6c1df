"""What happens to each request between vLLM's routes and the engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from benchmarks.schedulers import engine_request
from sgl_vllm.routes.incoming import IncomingRequests
from sgl_vllm.routes.tenants import NO_TENANTS, TenantMiddleware, TenantSource

BLOCK = 16


def request(name: str = "a", salt: str | None = None, **extra_args: Any) -> EngineCoreRequest:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
    params.extra_args = extra_args
    return engine_request(params, request_id=name, cache_salt=salt)


def processor(tenants: TenantSource = NO_TENANTS, *, is_exact: bool = False) -> OutputProcessor:
    made = OutputProcessor(None, log_stats=True)
    client: Any = SimpleNamespace(output_processor=made, add_request=None)
    IncomingRequests(tenants, lambda: BLOCK, is_exact=is_exact).attach(client)
    return made


def cached(num_tokens: int) -> PrefillStats:
    stats = PrefillStats()
    stats.set(100, num_tokens, 0)
    stats.finalize(100)
    return stats


def told(salt: str | None, num_cached: int, *, is_exact: bool = False) -> tuple[int, int, int]:
    """What a client is told to be cached and to be newly cached, and what vLLM's metrics count."""
    answering = processor(is_exact=is_exact)
    answering.add_request(request(salt=salt), None)
    state = answering.request_states["a"]
    stats = IterationStats()
    output = EngineCoreOutput(
        "a", [5], finish_reason=FinishReason.STOP, prefill_stats=cached(num_cached)
    )
    (answer,) = answering.process_outputs([output], 1.0, stats).request_outputs or [None]
    assert answer is not None and state.external_req_id == "a"
    counted = stats.prompt_token_stats.cached_tokens
    return answer.num_cached_tokens, answer.num_cache_creation_tokens, counted


@pytest.mark.parametrize(
    ("num_cached", "whole_blocks"), [(0, 0), (5, 0), (15, 0), (16, 16), (21, 16), (99, 96)]
)
def test_without_a_salt_a_client_is_told_of_whole_blocks(num_cached, whole_blocks) -> None:
    assert told(None, num_cached) == (whole_blocks, 100 - whole_blocks, num_cached)


@pytest.mark.parametrize(("salt", "is_exact"), [("mine", False), (None, True)])
def test_with_a_salt_or_by_option_a_client_is_told_of_every_token(salt, is_exact) -> None:
    assert told(salt, 21, is_exact=is_exact) == (21, 79, 21)


# -- what the engine refuses


def queued(reason: str | None, kind: RequestOutputKind) -> Any:
    """What a client's handler reads after an engine has ended its request with an error."""
    answering = processor()
    collector = RequestOutputCollector(kind, "a")
    answering.add_request(request(), None, queue=collector)
    output = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    answering.process_outputs([output], 1.0, IterationStats())
    assert answering.request_states == {}
    return collector.get_nowait()


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_a_format_that_an_engine_refuses_is_the_clients_error(kind) -> None:
    with pytest.raises(InputStreamError) as refused:
        queued("no text satisfies the regex", kind)
    assert isinstance(refused.value.cause, VLLMValidationError)
    assert str(refused.value.cause) == "no text satisfies the regex"


def test_an_error_of_the_engine_is_left_to_vllm() -> None:
    (answer,) = queued(None, RequestOutputKind.FINAL_ONLY).outputs
    assert answer.finish_reason == "error"


# -- tenants


def salts(source: str, *headers: dict[str, str], own: str | None = None) -> list[str | None]:
    """The salts of requests with these headers, over HTTP."""
    app = FastAPI()
    tenants = app.state.sgl_vllm_tenants = TenantSource(source)
    app.add_middleware(TenantMiddleware)

    @app.get("/")
    async def salt() -> dict[str, str | None]:
        return {"salt": tenants.salt(own)}

    with TestClient(app) as client:
        return [client.get("/", headers=given).json()["salt"] for given in headers]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_each_api_key_is_a_tenant_and_does_not_show_in_its_salt() -> None:
    a, b, again, none = salts("api_key", bearer("key-a"), bearer("key-b"), bearer("key-a"), {})
    assert a == again != b and None not in (a, b)
    assert "key-a" not in str(a)
    assert none is None, "requests without a key share what stock vLLM shares"


def test_a_clients_own_salt_divides_its_tenant_and_reaches_no_other() -> None:
    (other,) = salts("header:X-Tenant", {"x-tenant": "a"})
    mine, without = salts("header:X-Tenant", {"x-tenant": "a"}, {}, own=other)
    assert len({mine, without, other}) == 3


def test_marks_without_a_wish_to_reuse_are_for_routers() -> None:
    processor().add_request(request(sgl_segments=[4, 0]), None)
    processor().add_request(request(sgl_segments=[0, 4], sgl_reuse="approximate"), None)
