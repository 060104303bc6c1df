"""Segments that a request marks, in the canonical order."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.protocol.segments import MAX_MARKS
from sgl_vllm.routing.placement import RequestPlacer
from sgl_vllm.routing.router import PrefixRouter
from sgl_vllm.routing.segments import in_canonical_order
from tests.unit.lang.scripted import ScriptedBackend

DOCUMENTS = ["Of hares. ", "Of an owl. ", "Of foxes and hens. ", "Of tortoises. "]
HEAD, QUESTION = "Read. ", "Which is slow?"


@sgl.function
def ask(s, documents):
    s += HEAD + sgl.any_order(*documents, seed=0) + QUESTION + sgl.gen("a", max_tokens=1)


def marks_of(texts, start: int) -> list[int]:
    ends = list(itertools.accumulate(map(len, texts), initial=start))
    return [mark for pair in itertools.pairwise(ends) for mark in pair]


def marked(texts) -> dict:
    extra = {"sgl_segments": marks_of(texts, len(HEAD)), "sgl_program": "p"}
    return {"prompt": HEAD + "".join(texts) + QUESTION, "vllm_xargs": extra}


def reordered(body) -> dict:
    changed = in_canonical_order(body)
    assert changed is not None
    return changed


def test_all_orders_become_the_one_of_any_order_with_a_seed():
    backend = ScriptedBackend()
    ask.run(DOCUMENTS, backend=backend)
    for texts in itertools.permutations(DOCUMENTS):
        changed = reordered(marked(texts))
        assert changed == {"prompt": backend.prompts[0], "vllm_xargs": {"sgl_program": "p"}}


def test_a_request_without_marks_stays_as_it_is():
    for body in ({"prompt": "a"}, {"prompt": "a", "vllm_xargs": {"sgl_program": "p"}}, {}):
        assert in_canonical_order(body) is None


def test_segments_with_a_gap_between_them_stay_on_their_sides():
    first, second = DOCUMENTS[:2], DOCUMENTS[2:]
    found = set()
    for a, b in itertools.product(itertools.permutations(first), itertools.permutations(second)):
        marks = marks_of(a, 0)
        marks += marks_of(b, marks[-1] + len(HEAD))
        body = {"prompt": "".join([*a, HEAD, *b]), "vllm_xargs": {"sgl_segments": marks}}
        found.add(reordered(body)["prompt"])
    (text,) = found
    before, after = text.split(HEAD)
    assert sorted(before) == sorted("".join(first)) and sorted(after) == sorted("".join(second))


class Message(BaseModel):
    role: str
    content: str


@pytest.mark.parametrize("make", [dict, Message])
def test_marks_of_a_chat_count_through_its_messages(make):
    """And no segment leaves its message. A content of parts is empty."""
    found = []
    for a, b in [DOCUMENTS[:2], DOCUMENTS[1::-1]]:
        messages = [
            make(role="user", content=HEAD + a),
            {"role": "user", "content": [{"type": "text", "text": "not counted"}]},
            make(role="user", content=a + b),
        ]
        marks = [*marks_of([a], len(HEAD)), *marks_of([a, b], len(HEAD) + len(a))]
        found.append(reordered({"messages": messages, "vllm_xargs": {"sgl_segments": marks}}))
    (one, _, two), (other, _, same) = (changed["messages"] for changed in found)
    assert type(one) is type(messages[0]) and two == same and one != other
    assert one == make(role="user", content=HEAD + DOCUMENTS[0])


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([1], "a start and an end by turns"),
        ("12", "a start and an end by turns"),
        ([1, 2.0], "a start and an end by turns"),
        ([True, 2], "a start and an end by turns"),
        ([3, 3], "has to go up"),
        ([-1, 2], "has to go up"),
        ([0, 5, 4, 6], "has to go up"),
        ([0, 99], "beyond the end of its text"),
        ([99, 100], "beyond the end of the prompt"),
        ([0] * (MAX_MARKS + 2), "more than 10,000"),
    ],
)
def test_marks_that_do_not_fit_are_refused(marks, message):
    with pytest.raises(ValueError, match=message):
        in_canonical_order({"prompt": "a short one", "vllm_xargs": {"sgl_segments": marks}})
    with pytest.raises(ValueError, match="a text, or for messages"):
        in_canonical_order({"prompt": [1, 2, 3], "vllm_xargs": {"sgl_segments": [0, 1]}})


class Request(SimpleNamespace):
    """Has what of Pydantic's models is used here."""

    def model_copy(self, update):
        return Request(**{**vars(self), **update})


@pytest.mark.parametrize("make", [dict, Request])
def test_a_replica_is_chosen_for_what_it_will_be_sent(make, caplog):
    caplog.set_level(logging.WARNING, "ray.serve")
    texts = [text * 60 for text in DOCUMENTS]

    def workers(is_ordered: bool) -> set:
        placer = RequestPlacer(PrefixRouter())
        placer.router.set_workers({"a": False, "b": False})
        chosen = []
        for number, order in enumerate(itertools.permutations(texts)):
            body = marked(order)
            del body["vllm_xargs"]["sgl_program"]  # a program stays at its replica anyway
            request = make(**body)
            if is_ordered:
                request = placer.in_canonical_order(request)
                assert isinstance(request, make)
            worker = placer.place(
                str(number), request, lora=None, open_workers=("a", "b"), num_running={}
            )
            chosen.append(worker)
            placer.finished(str(number))
        return set(chosen)

    assert len(workers(is_ordered=False)) == 2
    assert len(workers(is_ordered=True)) == 1
    assert not caplog.records


def test_wrong_marks_are_logged_once_and_without_the_prompt(caplog):
    caplog.set_level(logging.WARNING, "ray.serve")
    placer = RequestPlacer(PrefixRouter())
    wrong = {"prompt": "secret", "vllm_xargs": {"sgl_segments": [0, 99]}}
    assert placer.in_canonical_order(wrong) is placer.in_canonical_order(wrong)
    (record,) = caplog.records
    assert "beyond the end" in record.message and "secret" not in record.message
