"""Faults that were put into a log are found, with the cost that leaving them out would save."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from sgl_vllm.prompt_lint.lint import LintReport, Replay, Words, lint
from sgl_vllm.prompt_lint.prompts import LogError, Prompt, read_log
from tests.unit.prompt_lint import synthetic_log
from tests.unit.prompt_lint.synthetic_log import FAULTS, Json, chat, lines, log, text

VALUE = "comes before text that does not"
WHAT = {
    "timestamp": VALUE,
    "tool_order": "The same tools come in",
    "example_order": "blocks of text, such as examples or documents",
    "question_first": "Text that is the same in most requests",
    "salts": "values of cache_salt",
}


def linted(bodies: list[Json]) -> LintReport:
    return lint(read_log(lines(bodies)), Words())


def kinds_of(report: LintReport, *kinds: str) -> list[str]:
    """Of each finding, which of some kinds it is, by what it says is wrong."""
    said = [finding.fault.what for finding in report.findings]
    return ["".join(kind for kind in kinds if kind in what) for what in said]


def computed_by_hand(prompts: list[Prompt]) -> int:
    """Words that no earlier prompt begins with, by comparing each prompt with all before it."""
    computed = 0
    earlier: list[tuple[tuple[str, str], list[str]]] = []
    for prompt in prompts:
        words = [
            word for part in prompt.parts for word in re.findall(r" ?\w{1,8}|\s+|.", part.text)
        ]
        cache = (prompt.model, prompt.salt)
        longest = 0
        for other_cache, others in earlier:
            if other_cache == cache:
                pairs = enumerate(zip(words, others, strict=False))
                same = next(
                    (index for index, (one, other) in pairs if one != other),
                    min(len(words), len(others)),
                )
                longest = max(longest, same)
        computed += len(words) - min(longest, len(words) - 1)
        earlier.append((cache, words))
    return computed


def test_five_faults_are_found_in_the_order_of_their_cost() -> None:
    report = linted(log(FAULTS))
    now = computed_by_hand(read_log(lines(log(FAULTS))))
    costs = {}
    for planted in FAULTS:
        others = [fault for fault in FAULTS if fault is not planted]
        costs[planted.__name__] = now - computed_by_hand(read_log(lines(log(others))))
    expected = sorted(costs, key=lambda name: -costs[name])
    assert kinds_of(report, *WHAT.values()) == [WHAT[name] for name in expected]
    for finding, name in zip(report.findings, expected, strict=True):
        assert finding.cost == pytest.approx(costs[name], rel=0.05)
    assert report.now.computed == now
    assert all(finding.num_requests == 20 for finding in report.findings)  # of one application
    without = linted(log(()))
    assert without.findings == () and without.repaired == without.now


def test_a_fault_behind_another_costs_what_it_saves_as_the_last_one() -> None:
    rng = random.Random(1)
    static, tools = text(rng, 400), [synthetic_log.tool(rng, number) for number in range(4)]
    bodies = [
        {
            "tools": rng.sample(tools, 4),
            **chat(f"Request {number} of today.\n{static}", text(rng, 8)),
        }
        for number in range(30)
    ]
    report = linted(bodies)
    assert sorted(kinds_of(report, *WHAT.values())) == [WHAT["tool_order"], VALUE]
    (value,) = (finding for finding in report.findings if VALUE in finding.fault.what)
    assert "number that changes (Request)" in value.fault.what
    assert value.cost == pytest.approx(29 * 400, rel=0.05)


def test_conversations_that_drop_their_oldest_messages() -> None:
    rng = random.Random(2)
    system = {"role": "system", "content": text(rng, 30)}
    messages: list[Json] = []
    bodies = []
    for turn in range(20):
        messages.append({"role": "user", "content": text(rng, 60)})
        bodies.append({"messages": [system, *messages[-7:]]})
        messages.append({"role": "assistant", "content": text(rng, 60)})
        assert len(messages) == 2 * turn + 2
    report = linted(bodies)
    assert kinds_of(report, "leave out the oldest") == ["leave out the oldest"]
    # Without the fault, each turn computes the last answer and the new question.
    assert report.repaired.computed < 20 * 2 * 65 + 40
    whole = linted([{"messages": [system, *messages[: 2 * n + 1]]} for n in range(20)])
    assert whole.findings == ()


def test_tools_spelled_in_different_ways() -> None:
    rng = random.Random(3)
    tools = [synthetic_log.tool(rng, number) for number in range(3)]
    backward = [dict(reversed(tool.items())) for tool in tools]
    bodies = [
        {"tools": (tools, backward)[number % 2], **chat(text(rng, 50), text(rng, 5))}
        for number in range(2)
    ]
    report = linted(bodies)
    assert "JSON keys" in kinds_of(report, "JSON keys")


@pytest.mark.parametrize(
    "values",
    [
        lambda rng: f"{rng.getrandbits(128):032x}",
        lambda rng: f"user {rng.choice('ABCDEFGHIJ')}{rng.randint(0, 999)}",
        lambda rng: f"November {rng.randint(1, 28)}, 2026",
    ],
)
def test_values_of_many_kinds_are_found(values: Callable[[random.Random], str]) -> None:
    rng = random.Random(4)
    static = text(rng, 300)
    bodies = [chat(f"You help.\nFor {values(rng)}.\n{static}", text(rng, 8)) for _ in range(20)]
    report = linted(bodies)
    assert kinds_of(report, VALUE) == [VALUE]
    assert report.repaired.computed < report.now.computed / 5


@pytest.mark.parametrize(("num_others", "is_found"), [(30, True), (300, False)])
def test_a_fault_that_costs_0_percent_of_all_is_left_out(num_others: int, is_found: bool) -> None:
    rng = random.Random(5)
    others = [{"prompt": text(rng, 300)} for _ in range(num_others)]  # nothing in common
    static = text(rng, 20)
    stamped = [chat(f"Request {number} of today.\n{static}", text(rng, 5)) for number in range(10)]
    report = linted([*others, *stamped])
    assert kinds_of(report, VALUE) == [VALUE] * is_found
    assert all(finding.cost > report.now.total / 200 for finding in report.findings)
    assert (report.repaired == report.now) != is_found


@pytest.mark.parametrize("seed", range(20))
def test_the_replay_finds_the_longest_common_prefix(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [
        {"prompt": text(rng, rng.randint(0, 4)), "cache_salt": rng.choice("ab")} for _ in range(60)
    ]
    prompts = read_log(lines([body for body in bodies if body["prompt"]]))
    assert Replay(Words())(prompts).computed == computed_by_hand(prompts)


def test_lines_of_batch_files_are_read() -> None:
    body = chat("a", "b")
    wrapped = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert read_log(lines([wrapped])) == read_log(lines([body]))
    assert read_log(["", "\n"]) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "it is not a JSON object"),
        ('{"input": "x"}', "it has neither messages nor a prompt"),
        ('{"prompt": [1, 2]}', "its prompt is not text"),
        ('{"messages": [{"content": "x"}]}', "'role'"),
        ('{"messages": 3}', "line 2 is not the body of a completion or chat request"),
        ('{"messages": ["x"]}', "line 2 is not the body"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(line: str, problem: str) -> None:
    with pytest.raises(LogError, match="line 2") as caught:
        read_log([json.dumps({"prompt": "a"}), line])
    assert problem in str(caught.value)


def test_images_and_tool_calls_are_part_of_a_prompt() -> None:
    image: Any = [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]
    call = [{"id": "1", "function": {"name": "search", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": image},
        {"role": "assistant", "content": None, "tool_calls": call},
    ]
    (prompt,) = read_log(lines([{"messages": messages}]))
    assert "http://a/b.png" in prompt.parts[0].text
    assert "search" in prompt.parts[1].text
