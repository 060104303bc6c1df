"""One real `vllm serve` with the plugin, and one without, for all modules that can share them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import openai
import pytest

import sgl_vllm as sgl
from sgl_vllm.commands.quickstart import OPTIONS
from sgl_vllm.demo import MODEL_PATH, TOOL_FLAGS
from sgl_vllm.server_process import VllmServer

MODEL = os.environ.get("SGL_VLLM_TEST_MODEL", str(MODEL_PATH))
API_KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
BLOCK = 128
"""Tokens, on CPUs."""


def serve(**options) -> VllmServer:
    defaults = {
        "max_model_len": 2048,
        "served_model_name": "demo",
        # With more, a small model waits for the slowest core at every operation.
        "env": {"OMP_NUM_THREADS": "1"},
    }
    return VllmServer(MODEL, **{**defaults, **options})


@pytest.fixture(scope="session")
def shared_server() -> Iterator[VllmServer]:
    # A small share, so that a test can reach it.
    options = ["--api-key", API_KEY, "--plugin-config", "radix_pin_share=0.02", *TOOL_FLAGS]
    with serve(plugin=True, extra_args=options) as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_server: VllmServer) -> VllmServer:
    """What a module replaces if it needs other options."""
    return shared_server


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", headers=HEADERS, timeout=60) as http:
        yield http


def flush(http: httpx.Client) -> None:
    assert http.post("/sgl/flush_cache", json={}).json() == {"flushed": True}


@pytest.fixture(scope="session")
def compact_server() -> Iterator[VllmServer]:
    """One with the options of `sgl-vllm quickstart`: JSON has no whitespace between tokens."""
    flags = ["--api-key", API_KEY, *TOOL_FLAGS]
    with serve(plugin=True, plugin_config=OPTIONS, extra_args=flags) as running:
        yield running


@pytest.fixture(scope="session")
def stock() -> Iterator[sgl.VLLM]:
    """Stock vLLM, as a program's backend."""
    with serve() as running:
        yield sgl.VLLM(running.url)
