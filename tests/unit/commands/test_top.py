"""`sgl-vllm top`, against stand-ins for servers."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from sgl_vllm.commands import cli
from sgl_vllm.commands.top import Sample, compare, draw
from tests.fake_engines import NO_AGENTS, NO_TURNS, NO_TURNS_IN_WORDS, TURNS, TURNS_IN_WORDS

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 3.0
vllm:num_requests_running{{engine="1"}} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 2.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} {output}
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0"}} {prompt}
# TYPE vllm:prompt_tokens_cached counter
vllm:prompt_tokens_cached_total{{engine="0"}} {hits}
"""
STATS = {
    "parts": {"radix": "on", "jump_forward": "by option"},
    "radix": {"tree_tokens": 1234, "cache_tokens": 8192},
    "jump_forward": {"jumps": 7, "forced_tokens": 70},
    "programs": {"running": 1, "unknown": 221},
}
NOT_FOUND = httpx.Response(404, json={"detail": "Not Found"})


class Servers:
    """Answers by address. Counters grow by a fixed number with every request for `/metrics`."""

    def __init__(self) -> None:
        self.stats: dict[str, httpx.Response] = {}
        self.keys: list[str | None] = []
        self._num_requests: dict[str, int] = {}

    def request(self, method: str, url: str, headers: dict[str, str], timeout: float, **more):
        self.keys.append(headers.get("Authorization"))
        base, _, path = url.removeprefix("http://").partition("/")
        if base not in self.stats:
            raise httpx.ConnectError("Connection refused")
        if path != "metrics":
            return self.stats[base]
        count = self._num_requests[base] = self._num_requests.get(base, 0) + 1
        page = METRICS.format(output=100 * count, prompt=1000 * count, hits=100 + 900 * count)
        return httpx.Response(200, text=page)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(httpx, "request", servers.request)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return servers


@pytest.fixture
def run(servers, capsys) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        status = cli.main(["top", *arguments, "--interval", "0.05"])
        return status, capsys.readouterr().out

    return run


def test_servers_with_the_plugin_stock_ones_and_dead_ones_are_in_one_table(servers, run):
    servers.stats |= {"a:1": httpx.Response(200, json=STATS), "b:2": NOT_FOUND}
    status, out = run("a:1", "http://b:2/v1", "c:3")  # into a pipe: one table
    lines = [line.split() for line in out.splitlines()]
    assert status == 1
    assert lines[1][:3] == ["server", "run", "wait"]
    assert lines[2][:3] == ["a:1", "4", "2"]
    assert lines[2][5:7] == ["90%", "95%"]
    assert lines[2][7:] == ["1234", "8192", "0", "0", "1", "off"]
    assert lines[3][:3] == ["b:2", "4", "2"]
    assert lines[3][7:] == ["-", "-", "-", "-", "none"]
    assert lines[4] == ["c:3", *"-" * 10, "down"]
    assert max(map(len, out.splitlines()[:5])) <= 80
    assert "a:1: jump_forward is off: by option" in out
    totals = "2,000 prompt tokens, 1,900 of them cached, 200 output tokens, 70 of them forced"
    assert f"a:1: since start: {totals}" in out
    assert "a:1: programs: 1 running, 221 unknown (one request so far)" in out
    assert "http://c:3 does not answer: Connection refused" in out
    assert "\x1b" not in out


def test_a_server_whose_agents_recompute_tokens_says_whether_they_take_turns(servers, run):
    for name, admission in (("a:1", TURNS), ("b:2", NO_TURNS), ("c:3", NO_AGENTS)):
        servers.stats[name] = httpx.Response(200, json=STATS | {"admission": admission})
    _, out = run("a:1", "b:2", "c:3")
    lines = [f"a:1: {TURNS_IN_WORDS}", f"b:2: {NO_TURNS_IN_WORDS}"]
    assert [line for line in out.splitlines() if "turns" in line] == lines
    _, out = run("a:1", "b:2", "c:3", "--once", "--json")
    assert [row["admission"] for row in json.loads(out)] == [TURNS, NO_TURNS, NO_AGENTS]


def test_a_server_that_requires_a_key_is_shown_with_its_metrics(servers, run):
    servers.stats["a:1"] = httpx.Response(401)
    status, out = run("a:1", "--once")
    assert status == 0
    assert out.splitlines()[2].split()[:3] == ["a:1", "4", "2"]
    assert "http://a:1 requires an API key" in out
    run("a:1", "--api-key", "k")
    assert servers.keys[-1] == "Bearer k"


def sample(at_s: float, **totals: float) -> Sample:
    return Sample("http://a", at_s, {f"vllm:{n}_total": v for n, v in totals.items()}, None)


@pytest.mark.parametrize(
    "earlier", [None, sample(10, generation_tokens=900), Sample("http://a", 10, None, None, "down")]
)
def test_a_new_or_restarted_server_has_no_rates_yet(earlier):
    row = compare(earlier, sample(12, generation_tokens=10))
    assert row["answers"] and row["output_tokens_per_s"] is None


def test_a_server_cannot_control_the_terminal(capsys):
    from rich.console import Console

    parts = {"ra\x1b[2Jdix": "be\x1b[1mcause [red]"}
    row = compare(None, Sample("http://a", 0, {}, {"parts": parts}))
    Console(width=160).print(draw([row]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "be [1mcause [red]" in out


@pytest.mark.parametrize("text", ["<html>", "a b c d e"])
def test_a_metrics_page_in_another_format_is_reported(servers, run, monkeypatch, text):
    monkeypatch.setattr(httpx, "request", lambda *a, **k: httpx.Response(200, text=text))
    status, out = run("a:1", "--once")
    assert status == 1
    assert "http://a:1/metrics is not in Prometheus' text format" in out
