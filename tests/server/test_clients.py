"""Clients that others wrote, as docs/clients.md shows them: stock's answers, for less work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from sgl_vllm.commands.quickstart import STRICT_TOOLS
from sgl_vllm.demo import TOOL_FLAGS
from sgl_vllm.server_process import Counters, VllmServer
from tests.server.conftest import API_KEY, HEADERS, serve
from tools.clients.__main__ import RESULTS
from tools.clients.environments import CLIENTS, PINS, Driver, interpreter, version_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = (*TOOL_FLAGS, *STRICT_TOOLS, "--api-key", API_KEY)
COMPACT = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Without it, the demo model writes line breaks between JSON tokens until it is cut off."""

DriverOf = Callable[[str | None], Driver]
Servers = tuple[VllmServer, VllmServer]


@pytest.fixture(scope="module")
def driver_of() -> Iterator[DriverOf]:
    """The process that runs clients of an environment. Installs while the servers start."""
    running: dict[str | None, Driver] = {}
    with ThreadPoolExecutor(1) as pool:
        names = (None, *(path.stem for path in PINS.iterdir()))
        installed = {name: pool.submit(interpreter, name) for name in names}

        def driver(environment: str | None) -> Driver:
            if environment not in running:
                running[environment] = Driver(installed[environment].result())
            return running[environment]

        yield driver
    for one in running.values():
        one.close()


@pytest.fixture(scope="module")
def servers_of(driver_of: DriverOf) -> Iterator[Callable[[bool], Servers]]:
    """Stock vLLM, and vLLM with the plugin, whose JSON is compact or not: one pair at a time."""
    environment = {"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}  # to empty the cache
    started: dict[bool, Servers] = {}
    with ExitStack() as stack:

        def servers(compact: bool) -> Servers:
            if compact not in started:
                stack.close()
                started.clear()
                flags = [*FLAGS, *(["--structured-outputs-config", COMPACT] if compact else [])]
                arms = [serve(plugin=on, extra_args=flags, env=environment) for on in (False, True)]
                stock, plugin = map(stack.enter_context, arms)
                started[compact] = (stock, plugin)
            return started[compact]

        yield servers


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """Of each client that ran, as docs/clients.json keeps it. WRITE_CLIENTS=1 writes that file."""
    results: dict[str, Any] = {}
    yield results
    if os.environ.get("WRITE_CLIENTS") and results.keys() == CLIENTS.keys():
        in_order = {name: results[name] for name in CLIENTS}
        RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")


def run(client: str, driver: Driver, server: VllmServer) -> tuple[Any, Counters]:
    """What the client answers on an empty cache, and what the server counted."""
    httpx.post(f"{server.url}/reset_prefix_cache", headers=HEADERS, timeout=30).raise_for_status()
    before = server.counters()
    answer = driver.run(client, server.url, API_KEY)
    return answer, server.counters() - before


def test_langchains_json_mode_answers_as_on_stock(driver_of: DriverOf, servers_of) -> None:
    driver = driver_of("shared")
    ask = {"client": "langchain-openai", "key": API_KEY, "use": "langchain_json_mode"}
    answer, ours = [driver.run(url=server.url, **ask) for server in servers_of(True)]
    assert ours == answer


def comparable(answer: Any) -> Any:
    """Of JSON, the names of its fields: after forced text, values may differ (docs/support.md)."""
    if isinstance(answer, str) and answer.startswith("{"):
        answer = json.loads(answer)
    if isinstance(answer, dict):
        return sorted(answer)
    return list(map(comparable, answer)) if isinstance(answer, list) else answer


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_the_answers_of_stock_for_less_work(
    name: str, driver_of: DriverOf, servers_of, results: dict[str, Any]
) -> None:
    client = CLIENTS[name]
    driver = driver_of(client.environment)
    (answer, stock), (ours, plugin) = [
        run(name, driver, server) for server in servers_of(client.compact)
    ]
    expected = comparable(answer["uses"])
    assert comparable(ours["uses"]) == (
        pytest.approx(expected, abs=2e-3) if client.scores else expected
    )
    assert ours.get("printed") == answer.get("printed") or name == "instructor"
    what = {"version": version_of(name), "uses": client.uses}
    results[name] = {**what, "stock": asdict(stock), "plugin": asdict(plugin)}
    assert plugin.computed_prompt_tokens < stock.computed_prompt_tokens
    assert ("JSON" in client.uses) == (plugin.forced_tokens > 0)


def test_the_table_is_of_these_versions() -> None:
    recorded = {name: one["version"] for name, one in json.loads(RESULTS.read_text()).items()}
    assert recorded == {name: version_of(name) for name in CLIENTS}
