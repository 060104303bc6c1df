"""`sgl-vllm tree`, `pin` and `unpin`, against the real routes with fake engines."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from fastapi.testclient import TestClient

from sgl_vllm.commands import cli, client
from sgl_vllm.scheduler.control import ListedPin, PinAnswer, Pinned
from sgl_vllm.scheduler.stats import EngineStats
from tests import fake_engines
from tests.fake_engines import FakeEngine, fake_server, node, tokens_of, tree_answer

URL = "http://testserver"
ISOLATED = {"namespaces": 2, "num_tokens": 500, "num_nodes": 7, "num_blocks": 32}


@pytest.fixture
def sgl_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command against these engines. Returns (exit status, stdout, stderr)."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str, engines=(), api_key=None) -> tuple[int, str, str]:
        http = TestClient(fake_server(*engines, api_key=api_key))

        def request(method, url, timeout, **options):
            return http.request(method, url, **options)

        monkeypatch.setattr(client.httpx, "request", request)
        status = cli.main(list(arguments))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_tree_has_a_line_for_each_prefix(sgl_vllm) -> None:
    nodes = [
        node(None, 600, hits=12, num_pinned_blocks=10, num_locked_blocks=10, age_s=0.2),
        node(0, 100, wanted=True, age_s=180),
        node(0, 300, num_locked_blocks=2, age_s=7200),
        node(None, 1),
    ]
    engine = FakeEngine(
        tree=tree_answer(nodes, isolated=ISOLATED, nodes_left_out=3, total_blocks=1000),
        pins=[ListedPin("p1", num_tokens=160, num_blocks=10, age_s=60.0)],
    )
    status, out, _ = sgl_vllm("tree", URL, engines=[engine])
    assert status == 0
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "1,001 tokens, 4 nodes, evicts by LRU, blocks of 16 tokens"
    space = "in use 2  pinned 10  evictable 49  not in the tree yet 839  free 100  of 1,000 blocks"
    assert lines[2] == space
    assert lines[3:] == [
        "all prefixes",
        "├── 600 tokens  ×12  now  pinned",
        "│   ├── 300 tokens  2 h  in use",
        "│   └── 100 tokens  3 min  wanted",
        "├── 1 token  1 s",
        "└── isolated: 2 tenants, 500 tokens in 32 blocks",
        "3 nodes farther from the root not shown: see --max-nodes",
        "pin p1  160 tokens, 10 blocks  60 s",
    ]


def test_programs_are_above_the_tree_and_contexts_at_their_nodes(sgl_vllm) -> None:
    states = {"running": 1, "in_tool": 2, "waiting_for_person": 1, "unknown": 0, "ended": 0}
    tools = [{"name": "ba\x1bsh", "num_contexts": 2, "longest_s": 14.2}]
    nodes = [
        node(None, 600, context={"state": "in_tool", "paused_s": 14.2, "tool": "bash"}),
        node(None, 300, context={"state": "waiting_for_person", "paused_s": 180, "tool": None}),
    ]
    shown = {**states, "longest_in_tool_s": 14.2, "tools": tools}
    _, out, _ = sgl_vllm("tree", URL, engines=[FakeEngine(tree=tree_answer(nodes, programs=shown))])
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[3:5] == [
        "programs: 1 running, 2 in a tool, 1 waiting for a person",
        "in tools: ba sh 2 (up to 14 s)",
    ]
    assert lines[6:] == [
        "├── 600 tokens  1 s  in a tool (bash) for 14 s",
        "└── 300 tokens  1 s  waiting for a person for 3 min",
    ]
    shown["tools"] = []  # the server does not show text
    trees = [
        tree_answer(nodes, programs=shown, admission=one)
        for one in (fake_engines.TURNS, fake_engines.NO_AGENTS)
    ]
    _, out, _ = sgl_vllm("tree", URL, engines=[FakeEngine(tree=tree) for tree in trees])
    lines = [" ".join(line.split()) for line in out.splitlines()]
    first, second = lines.index("Engine 0"), lines.index("Engine 1")
    assert lines[first + 5] == "in tools: up to 14 s"
    assert fake_engines.TURNS_IN_WORDS in " ".join(lines[first:second])
    assert "turns" not in " ".join(lines[second:])


@pytest.mark.parametrize(
    ("positions", "left_out", "words"),
    [
        ([], 0, "no state"),
        ([20], 0, "state at 20"),
        ([20, 99], 3, "states at …, 20, 99"),
        ([1, 2, 3, 4, 5], 0, "states at …, 2, 3, 4, 5"),
    ],
)
def test_states_are_said_of_each_prefix(sgl_vllm, positions, left_out, words) -> None:
    shown = node(None, 2000, states={"positions": positions, "left_out": left_out})
    _, out, _ = sgl_vllm("tree", URL, engines=[FakeEngine(tree=tree_answer([shown]))])
    assert out.splitlines()[-1].rstrip() == f"└── 2,000 tokens  1 s  {words}"


def test_a_prompt_cannot_control_the_terminal(sgl_vllm) -> None:
    text = "a\x1b[2J\x9b1mb\u202ec\n[red]d"
    engine = FakeEngine(tree=tree_answer([node(None, 20, tokens=tokens_of(text))]))
    _, out, _ = sgl_vllm("tree", URL, engines=[engine])
    assert "a [2J 1mb c [red]d" in out
    assert not set("\x1b\x9b\u202e") & set(out)


def test_many_prefixes_are_counted_and_deep_ones_are_no_problem(sgl_vllm) -> None:
    wide = [node(None, 100 + number) for number in range(30)]
    _, out, _ = sgl_vllm("tree", URL, engines=[FakeEngine(tree=tree_answer(wide))])
    assert "14 smaller: 1,491 tokens" in out
    deep = [node(number - 1 if number else None, 5) for number in range(1200)]
    status, _, _ = sgl_vllm("tree", URL, engines=[FakeEngine(tree=tree_answer(deep))])
    assert status == 0


def test_every_engine_is_shown_and_a_missing_tree_is_explained(sgl_vllm) -> None:
    off = FakeEngine(stats=EngineStats(parts={"radix": "by option"}))
    on = FakeEngine(tree=tree_answer([node(None, 10)]), stats=EngineStats(parts={"radix": "on"}))
    status, out, _ = sgl_vllm("tree", URL, engines=[on, off])
    assert status == 0
    assert out.startswith("Engine 0\n10 tokens") and "Engine 1\nThe part radix is off" in out
    status, out, _ = sgl_vllm("tree", URL, engines=[off])
    assert (status, out) == (1, "The part radix is off: by option\n")


def test_a_key_comes_from_the_option_or_the_environment(sgl_vllm, monkeypatch) -> None:
    engines = [FakeEngine(tree=tree_answer([]))]
    status, out, err = sgl_vllm("tree", URL, engines=engines, api_key="k")
    assert (status, out) == (1, "")
    assert err == (f"sgl-vllm tree: {URL} requires an API key: set --api-key or VLLM_API_KEY\n")
    _, _, err = sgl_vllm("tree", URL, "--api-key", "x", engines=engines, api_key="k")
    assert "refuses this API key" in err
    assert sgl_vllm("tree", URL, "--api-key", "k", engines=engines, api_key="k")[0] == 0
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert sgl_vllm("tree", URL, engines=engines, api_key="k")[0] == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(404, json={"detail": "Not Found"}), "was it started with --plugin"),
        (httpx.Response(200, text="<html>"), "answers, but not like a vLLM server"),
        (httpx.Response(500, text="oh"), "error 500"),
        (httpx.Response(500, json={"error": {"message": "no\nluck"}}), "no luck"),
        (
            httpx.ConnectError("[Errno 1] No route"),
            "does not answer: No route. Is a server",
        ),
        (httpx.ReadTimeout(""), "does not answer: ReadTimeout"),
    ],
)
def test_an_error_is_one_line(monkeypatch, capsys, answer, said) -> None:
    def request(*arguments, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(client.httpx, "request", request)
    assert cli.main(["tree", URL]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("sgl-vllm tree: ") and printed.err.count("\n") == 1
    assert said in printed.err


def test_a_pin_prints_the_id_that_unpins_it(sgl_vllm) -> None:
    known = {"p1"}
    engine = FakeEngine(
        pin=lambda **_: PinAnswer(Pinned("p1", 4, 1)),
        unpin=lambda pin_id: pin_id in known,
    )
    pinning = sgl_vllm("pin", URL, "Once", "--cache-salt", "mine", engines=[engine])
    assert pinning == (0, "p1\n", "pinned 4 of 4 tokens, in 1 block\n")
    _, asked = engine.asked[-1]
    assert asked is not None and asked["cache_salt"] == "mine"
    assert sgl_vllm("unpin", URL, "p1", engines=[engine]) == (0, "", "")
    known.clear()
    status, _, err = sgl_vllm("unpin", URL, "p1", engines=[engine])
    assert (status, err) == (1, f"sgl-vllm unpin: {URL}: there is no pin 'p1'\n")
