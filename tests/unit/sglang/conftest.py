"""The scripted server of the language's tests, as the default backend under SGLang's names."""

from __future__ import annotations

import pytest

import sgl_vllm.sglang as sgl
from tests.unit.lang.conftest import FakeServer, running, running_servers, server

__all__ = ["running", "running_servers", "server"]


@pytest.fixture
def endpoint(server: FakeServer) -> sgl.RuntimeEndpoint:
    """An endpoint for the fake server, which is also the default backend of the test."""
    endpoint = sgl.RuntimeEndpoint(server.url)
    sgl.set_default_backend(endpoint)
    return endpoint
