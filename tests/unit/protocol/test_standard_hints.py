"""Hints of OpenAI's, Anthropic's and Dynamo's clients, and what hostile ones are read as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_vllm.protocol.hints import NO_HINTS, read_hints
from sgl_vllm.protocol.standard_hints import (
    SESSION_HEADERS,
    agent_priority,
    with_standard_hints,
)


def program(request: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """Of a request, as a mapping and as an object."""
    own = request.get("vllm_xargs")
    found = [
        read_hints(with_standard_hints(own, of, headers or {}), "id").program
        for of in (request, SimpleNamespace(**request))
    ]
    assert found[0] == found[1]
    return found[0]


def test_the_most_specific_name_is_the_program() -> None:
    request: dict[str, Any] = {"prompt_cache_key": "key"}
    assert program(request) == "key"
    request["vllm_xargs"] = {"session_id": "in xargs"}
    assert program(request) == "in xargs"
    for header in reversed(SESSION_HEADERS):
        assert program(request, {header: header}) == header
    assert program({**request, "session_id": "body"}, {"x-session-id": "header"}) == "body"
    request["vllm_xargs"] = {"sgl_program": "ours"}
    assert program({**request, "session_id": "body"}) == "ours"


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud83d", 5, 1.5, True, ["a"], {"a": 1}, None])
def test_what_is_no_name_is_ignored_and_another_name_counts(name: Any) -> None:
    assert program({"session_id": name, "prompt_cache_key": "key"}) == "key"
    assert with_standard_hints(None, {"prompt_cache_key": name}, {"x-session-id": ""}) is None
    assert read_hints(with_standard_hints([1], {"session_id": name}, {}), "id") == NO_HINTS


def kept(request: Any) -> list[list[float]]:
    hints = read_hints(with_standard_hints(None, request, {}), "id")
    return [[seconds, round(share, 2)] for seconds, share in hints.kept]


HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "x" * 100}


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ({"prompt_cache_retention": "24h"}, [[86400, 1]]),
        ({"prompt_cache_retention": "in_memory"}, []),
        ({"prompt_cache_options": {"mode": "implicit"}}, [[1800, 1]]),
        ({"prompt_cache_options": {"ttl": "12h"}, **MARK}, [[43200, 1]]),
        ({"nvext": MARK}, [[300, 1]]),
        ({"messages": [{"content": [TEXT, {**TEXT, **HOUR}]}]}, [[3600, 1]]),
        (
            {"system": [{**TEXT, **HOUR}], "messages": [{"content": [TEXT] * 4}, {**TEXT, **MARK}]},
            [[300, 1], [3600, 0.17]],
        ),
        ({"messages": [{"content": "x" * 30, **MARK}, {"content": "x" * 90}]}, [[300, 0.25]]),
        ({"input": "x", "tools": [{"input_schema": {"a": "x" * 91}, **MARK}]}, [[300, 0.99]]),
        ({"input": [{"content": [{**TEXT, "prompt_cache_breakpoint": {}}]}]}, [[1800, 1]]),
        ({"messages": [{**TEXT, **MARK}] * 9}, [[300, round(n / 9, 2)] for n in (9, 8, 7, 6)]),
    ],
)
def test_marks_are_prefixes_and_how_long_they_are_kept(request_: Any, wanted: Any) -> None:
    assert kept(request_) == wanted


@pytest.mark.parametrize(
    "ttl", ["", "forever", "-5m", "5 m", "9" * 5000 + "d", 1e308, None, ["5m"]]
)
def test_a_time_that_cannot_be_read_is_no_mark(ttl: Any) -> None:
    mark = {"cache_control": {"ttl": ttl}, "prompt_cache_retention": ttl, "nvext": ttl}
    assert kept({**mark, "messages": [mark, {"content": [mark, ttl]}, ttl]}) == []
    assert kept({"messages": ttl, "tools": ttl, "cache_control": {"ttl": "999999d"}}) == [
        [86400, 1]
    ]


@pytest.mark.parametrize(
    ("sent", "priority"), [(5, -5), (-2, 2), (1 << 31, 0), ("5", 0), (0.5, 0), (None, 0), ([5], 0)]
)
def test_the_priority_of_an_agent_is_vllms_the_other_way_round(sent: Any, priority: int) -> None:
    assert agent_priority({"nvext": {"agent_hints": {"priority": sent}}}) == priority
    assert agent_priority({"nvext": sent}) == 0
