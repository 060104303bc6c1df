"""The command `benchmarks.ab` and its client, over small HTTP servers in vLLM's place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("prometheus_client")

import sgl_vllm as sgl
from benchmarks.ab.__main__ import main, parser
from benchmarks.ab.client import run_programs, unique_prompt_tokens
from benchmarks.ab.plan import Plan, plans_of

METRICS = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:iteration_tokens_total_count {passes}
vllm:prompt_tokens_total {prompt_tokens}
vllm:prompt_tokens_cached_total {cached_tokens}
vllm:generation_tokens_total {output_tokens}
vllm:num_preemptions_total 0
"""


@dataclass
class FakeVllm:
    """Answers a prompt with its length in two parts; a word is a token, which no other holds."""

    plugin: bool = False
    reply: str = "{num_words} words"
    finish_reason: str = "length"
    fails_from: int | None = None
    url: str = ""
    num_emptied: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        return [self.tokens.setdefault(word, len(self.tokens)) for word in text.split()]

    def metrics(self) -> str:
        num_tokens = sum(len(body["prompt"].split()) for body in self.bodies)
        return METRICS.format(
            passes=len(self.bodies),
            prompt_tokens=num_tokens,
            cached_tokens=num_tokens // 2 if self.plugin else 0,
            output_tokens=2 * len(self.bodies),
        )

    def parts_of_answer(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        num_words = len(body["prompt"].split())
        first, rest = self.reply.format(num_words=num_words).split(" ")
        assert body["stream"] and body["stream_options"]["include_usage"]
        tells_tokens = body["stream_options"].get("continuous_usage_stats", False)
        texts = (first, None), (" " + rest, self.finish_reason)
        for num_tokens, (text, reason) in enumerate(texts, start=1):
            part = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
            usage = {"prompt_tokens": num_words, "completion_tokens": num_tokens}
            yield part | {"usage": usage} if tells_tokens else part
        yield {"choices": [], "usage": usage}


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(fake.metrics().encode())
            elif self.path == "/v1/models":
                self._json({"data": [{"id": "fake", "max_model_len": 4096}]})
            elif self.path == "/v1/sgl/stats" and fake.plugin:
                self._json({"parts": {"radix": "on"}})
            else:
                self._json({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            if self.path == "/reset_prefix_cache":
                fake.num_emptied += 1
                self._json({"success": True})
            elif self.path == "/tokenize":
                self._json({"tokens": fake.ids(body["prompt"])})
            elif self.path == "/v1/completions":
                body.pop("request_id", None)  # no two requests have the same
                body.get("vllm_xargs", {}).pop("sgl_program", None)  # nor two programs
                fake.bodies.append(body)
                if fake.fails_from is not None and len(fake.bodies) >= fake.fails_from:
                    self._json({"error": {"message": "EngineDeadError"}}, 500)
                    return
                lines = [f"data: {json.dumps(part)}\n\n" for part in fake.parts_of_answer(body)]
                self._answer("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
            else:
                self._json({"detail": "Not Found"}, 404)

        def _json(self, content: Any, status: int = 200) -> None:
            self._answer(json.dumps(content).encode(), "application/json", status)

        def _answer(self, body: bytes, kind: str = "text/plain", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("retry-after-ms", "1")  # heeded after an error
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    return Handler


@contextmanager
def serving(fake: FakeVllm) -> Iterator[FakeVllm]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake)) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        # Looks every poll_interval (s) whether it is to end.
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield fake
        server.shutdown()


@pytest.fixture
def stock() -> Iterator[FakeVllm]:
    with serving(FakeVllm()) as fake:
        yield fake


@pytest.fixture
def plugin() -> Iterator[FakeVllm]:
    with serving(FakeVllm(plugin=True)) as fake:
        yield fake


def plan(*words: str) -> Plan:
    (made,) = plans_of(parser().parse_args(words))
    return made


# -- the whole command


def test_both_servers_get_the_same_requests_by_turns_from_an_empty_cache(
    stock: FakeVllm, plugin: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--requests", "12", "--rounds", "2", "--concurrency", "3", "--json", str(file)]
    assert main(["no_sharing", "--stock-url", stock.url, "--sgl-url", plugin.url, *sizes]) == 0
    assert stock.num_emptied == plugin.num_emptied == 2
    num_warm_up = 3  # a quarter of the programs at most
    assert len(stock.bodies) == len(plugin.bodies) == 2 * (num_warm_up + 12)
    assert {body["prompt"] for body in stock.bodies} == {body["prompt"] for body in plugin.bodies}

    content = json.loads(file.read_text())
    assert content["requests"] == 12
    assert content["same_output"] == {"compared": 24, "equal": 24}
    stock_arm, sgl_arm = content["arms"]["stock"], content["arms"]["sgl"]
    assert stock_arm["forward_passes"] == sgl_arm["forward_passes"] == 12  # no warm-up
    assert stock_arm["cached_prompt_tokens"] == 0 < sgl_arm["cached_prompt_tokens"]
    assert 0 < stock_arm["ttft_p50_s"] <= stock_arm["latency_p99_s"]
    assert len(stock_arm["rounds"]) == 2
    limits = content["limits"]
    assert limits["prompt_tokens"] == limits["unique_prompt_tokens"] == stock_arm["prompt_tokens"]
    assert content["arguments"]["concurrency"] == 3
    assert "same output: 24 of 24" in capsys.readouterr().out


def test_a_server_that_fails_is_named_with_the_reason(
    stock: FakeVllm, plugin: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.fails_from = 5
    urls = ["--stock-url", stock.url, "--sgl-url", plugin.url]
    assert main(["no_sharing", *urls, "--requests", "9", "--concurrency", "2"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"vLLM with the plugin at {plugin.url} failed" in said
    assert "EngineDeadError" in said


# -- the client


@sgl.function
def twice(s: sgl.ProgramState, question: str) -> None:
    s += question + sgl.gen("first", max_tokens=2)
    s += " and" + sgl.gen("second", max_tokens=2)


def test_what_a_reply_left_in_the_cache_need_not_be_computed(stock: FakeVllm) -> None:
    run = run_programs(twice, [{"question": "a b c "}], stock.url, 1)
    prompts = [len(body["prompt"].split()) for body in stock.bodies]
    assert prompts == [3, 6]
    # The second prompt is the first, "3 words", of which "3" was fed back, and " and".
    assert unique_prompt_tokens(run, stock.url) == 3 + 2


# -- arguments


def test_ablations_leave_one_thing_out_each() -> None:
    made = plan("json_regex", "--ablations", "--off", "select")
    names = [variant.name for variant in made.variants]
    assert names[:2] == ["stock", "sgl"]
    assert {"no_cache", "no_tree", "fcfs", "random", "no_parallelism", "no_hint", "no_jump"} == {
        *names[2:]
    }
    assert "no_jump" not in [one.name for one in plan("no_sharing", "--ablations").variants]
    alone = [(one.plugin_config, one.server_args, one.client) for one in made.variants[2:]]
    assert len({repr(one) for one in alone}) == len(alone)
    assert all(one.plugin_config["select"] is False for one in made.variants[1:])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["tight_cache", "--stock-url", "http://a"], "go together"),
        (
            ["tight_cache", "--stock-url", "http://a", "--sgl-url", "http://b", "--off", "radix"],
            "for servers started here",
        ),
        (["tight_cache", "--model", "shape:1t"], "shape:33m"),
        (["tight_cache", "--json", "/nowhere/result.json"], "/nowhere"),
        (["json_schema", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["tight_cache", "--rounds", "0"], "less than 1"),
        (["knitting"], "tight_cache"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err
