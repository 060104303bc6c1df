"""`python -m benchmarks.segments` at its smallest size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import pytest

from benchmarks import segments
from benchmarks.ab.client import Record, TimedVLLM
from benchmarks.retrieval import Bm25, conversations, made_up
from sgl_vllm.lang.backends.base import GenAnswer, GenRequest, Usage
from tests.unit.lang.scripted import ScriptedBackend, text_of


def run(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "result.json"
    small = ("--questions", "60", "--paragraphs", "40", "--top", "4", "--json", str(path))
    segments.main([*small, *arguments])
    return json.loads(path.read_text())


def test_orders_share_more_than_those_of_retrieval_and_the_numbers_add_up(tmp_path, capsys):
    document = run(tmp_path)
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert list(arms) == ["retrieval", "one by one", "run_batch", "seed"]
    assert {arm["prompts"] for arm in arms.values()} == {60}
    assert len({arm["prompt_tokens"] for arm in arms.values()}) == 1
    hits = {name: arm["hit_tokens"] for name, arm in arms.items()}
    assert 0 < hits["retrieval"] < hits["one by one"] < hits["run_batch"]
    assert hits["run_batch"] <= document["oracle"]["most_hit_tokens"]
    assert 0.97 < document["oracle"]["batch"] <= 1
    assert 0.97 < document["oracle"]["one_by_one"] <= 1
    assert f"{hits['run_batch']:,}" in capsys.readouterr().out


def test_conversations_refer_back_to_what_they_hold(tmp_path):
    document = run(tmp_path, "--turns", "3")
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert {arm["prompts"] for arm in arms.values()} == {60}
    assert arms["refer back"]["prompt_tokens"] < arms["one by one"]["prompt_tokens"]
    computed = {name: arm["prompt_tokens"] - arm["hit_tokens"] for name, arm in arms.items()}
    assert computed["refer back"] < computed["one by one"] < computed["retrieval"]
    assert document["oracle"]["most_hit_tokens"] is None


def test_a_replay_counts_what_earlier_prompts_begin_with():
    arm = segments.replayed("x", ["one two three", "one two four five", "one two three"])
    assert (arm.prompts, arm.prompt_tokens) == (3, 10)
    assert arm.hit_tokens == 2 + 2  # the last token of a prompt is always computed


def num_common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Server(ScriptedBackend):
    """Counts as cached what an earlier prompt of the same connection begins with."""

    def __init__(self, salt: str, log: list[str]) -> None:
        super().__init__(reply=lambda prompt: str(len(prompt) % 7))
        self.salt, self.log, self.record = salt, log, Record()

    async def generate(self, request: GenRequest) -> GenAnswer:
        prompt = text_of(request.prompt)
        cached = max((num_common(prompt, one) for one in self.prompts), default=0)
        answer = await super().generate(request)
        self.log.append(self.salt)
        self.record.ttfts_s.append(len(prompt) - cached)
        return replace(answer, usage=Usage(len(prompt), cached, 1, 1))


def test_a_server_is_asked_by_turns_and_its_outputs_are_compared():
    corpus = made_up(12, 20, 1.0, seed=3)
    found = [Bm25(corpus.paragraphs).top(question, 3) for question in corpus.questions]
    load = segments.Load(corpus, found, conversations(found, 1))
    log: list[str] = []
    stock = ScriptedBackend(reply=lambda prompt: str(min(len(prompt) % 7, 4)))

    def connect(salt: str) -> TimedVLLM:
        return cast(TimedVLLM, Server(salt, log))

    arms = segments.on_server(load, connect, stock, 2)
    assert log[0] == "warm-up" and log[1:] == log[1:5] * 12 and len({*log[1:5]}) == 4
    by_name = {arm.name: arm for arm in arms}
    assert len({arm.prompt_tokens for arm in arms}) == 1
    assert by_name["retrieval"].hit_tokens < by_name["run_batch"].hit_tokens
    ttfts = {arm.name: arm.ttft_p50_s or 0 for arm in arms}
    assert ttfts["retrieval"] > ttfts["run_batch"] > 0
    lengths = [len(prompt) % 7 for prompt in stock.prompts]
    assert sum(arm.same_outputs or 0 for arm in arms) == sum(one < 5 for one in lengths) < 48


def test_data_of_another_form_and_too_many_paragraphs_are_refused(tmp_path, capsys):
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps([{"question": "Why?", "answer": "so"}]))
    for arguments, message in (
        (["--data", str(questions)], "hotpot_dev_distractor_v1.json"),
        (["--paragraphs", "3"], "only 3 paragraphs"),
    ):
        with pytest.raises(SystemExit):
            segments.main(arguments)
        assert message in capsys.readouterr().err


def test_hotpots_paragraphs_are_read(tmp_path, capsys):
    """Two entries that share a paragraph, in HotpotQA's form."""
    fox = ["Fox", ["The fox is quick.", " It jumps over the dog."]]
    entries = [
        {"question": "Who jumps?", "context": [fox, ["Dog", ["The dog is lazy."]]]},
        {"question": "Who is lazy?", "context": [["Owl", ["It flies."]], fox]},
    ]
    data = tmp_path / "hotpot.json"
    data.write_text(json.dumps(entries))
    document = run(tmp_path, "--data", str(data), "--top", "2")
    assert document["arms"][0]["prompts"] == 2
