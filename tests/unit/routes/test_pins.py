"""Pins over HTTP, with fake engines behind them that keep them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from sgl_vllm.scheduler.control import ListedPin, PinAnswer, Pinned
from tests.fake_engines import FakeEngine, fake_server, tokens_of
from tests.unit.routes.test_routes import JSON, computed, connect, error


class PinningEngine(FakeEngine):
    """Keeps its pins, as an engine does; `error` is what it refuses the next with."""

    def __init__(self, name: str, error: str | None = None) -> None:
        self.pinned: dict[str, int] = {}
        self.name, self.error = name, error
        super().__init__(pin=self.pin, unpin=self.unpin, pins=self.pins)

    def pin(self, token_ids, cache_salt, lora_name, lora_path) -> PinAnswer:
        if self.error:
            return PinAnswer(error=self.error)
        pin_id = f"{self.name}{len(self.pinned)}"
        self.pinned[pin_id] = len(token_ids)
        return PinAnswer(Pinned(pin_id, len(token_ids), 1))

    def unpin(self, pin_id: str) -> bool:
        return self.pinned.pop(pin_id, None) is not None

    def pins(self) -> list[ListedPin]:
        return [ListedPin(pin_id, num, 1, age_s=0.5) for pin_id, num in self.pinned.items()]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "Once"}, "Once"),
        ({"prompt": tokens_of("Once")}, "Once"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "|Be kind."),
    ],
)
def test_a_prefix_is_computed_and_then_pinned(body: dict[str, Any], text: str) -> None:
    engine = PinningEngine("a")
    client = connect(engine)
    answer = client.post("/v1/sgl/pin", json=body).json()
    (run,) = computed(client)
    assert run["prompt"]["prompt_token_ids"] == tokens_of(text)
    assert (run["params"].max_tokens, run["params"].temperature) == (1, 0.0)
    assert run["data_parallel_rank"] is None, "an engine alone is asked without a rank"
    asked = {"token_ids": tokens_of(text), "cache_salt": None}
    assert engine.asked == [("pin", {**asked, "lora_name": None, "lora_path": None})]
    assert answer == {
        "pin_id": "a0",
        "num_prompt_tokens": len(text),
        "pins": [{"pin_id": "a0", "num_tokens": len(text), "num_blocks": 1}],
    }


def test_salt_and_adapter_are_those_of_the_requests_to_come() -> None:
    engine = PinningEngine("a")
    client = connect(engine)
    client.post("/v1/sgl/pin", json={"prompt": "x", "cache_salt": "mine", "model": "french"})
    (run,) = computed(client)
    assert run["prompt"]["cache_salt"] == "mine"
    assert run["lora_request"].lora_name == "french"
    ((_, asked),) = engine.asked
    assert asked is not None and asked["cache_salt"] == "mine"
    assert (asked["lora_name"], asked["lora_path"]) == ("french", "/nowhere")


def test_every_engine_computes_and_pins_it_and_one_id_lets_go_of_all() -> None:
    engines = [PinningEngine("a"), PinningEngine("b")]
    client = connect(*engines)
    answer = client.post("/v1/sgl/pin", json={"prompt": "Once"}).json()
    assert [run["data_parallel_rank"] for run in computed(client)] == [0, 1]
    assert [pin["pin_id"] for pin in answer["pins"]] == ["a0", "b0"]
    shown = client.get("/v1/sgl/pins").json()["engines"]
    assert [[pin["pin_id"] for pin in engine["pins"]] for engine in shown] == [["a0"], ["b0"]]

    unpin = {"pin_id": answer["pin_id"]}
    assert client.post("/v1/sgl/unpin", json=unpin).json() == {"unpinned": True}
    assert [engine.pinned for engine in engines] == [{}, {}]
    assert client.post("/v1/sgl/unpin", json=unpin).status_code == 404


def test_if_one_engine_cannot_pin_none_does() -> None:
    engines = [PinningEngine("a"), PinningEngine("b", error="pins may hold half of the cache")]
    answer = connect(*engines).post("/v1/sgl/pin", json={"prompt": "Once"})
    assert error(answer) == (409, "pins may hold half of the cache")
    assert engines[0].pinned == {}


PROMPT = "prompt: "
MESSAGES = "messages"
SALT = "cache_salt: "
HALF = "\ud800"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "the body must be a JSON object"),
        ({}, "give either a prompt or messages"),
        ({"prompt": "a", "messages": [user("a")]}, "give either a prompt"),
        *(({"prompt": prompt}, PROMPT) for prompt in ("", [], [1, "a"], [True], [-1], 5, HALF)),
        *(
            ({"messages": messages}, MESSAGES)
            for messages in (
                [],
                ["hi"],
                [{"role": "user"}],
                [{"content": "hi"}],
                [user([{"type": "image_url"}])],
                [user(HALF)],
            )
        ),
        *(({"prompt": "a", "cache_salt": salt}, SALT) for salt in ("", HALF)),
        ({"prompt": "a", "model": 3}, "model: Input should be a valid string"),
        ({"prompt": "a", "promt": "b"}, "unknown key 'promt'; did you mean prompt?"),
        ({"prompt": "a" * 1001}, "cannot be computed: the prompt is longer than 1000 tokens"),
    ],
)
def test_a_bad_body_is_refused_in_one_sentence_and_nothing_is_pinned(body, sentence) -> None:
    engine = PinningEngine("a")
    status, text = error(
        connect(engine).post("/v1/sgl/pin", content=json.dumps(body), headers=JSON)
    )
    assert status == 400
    assert sentence in text and "\n" not in text
    assert engine.asked == []


def test_an_unpin_of_a_million_ids_asks_no_engine() -> None:
    engine = PinningEngine("a")
    pin_id = ",".join(f"{number:x}" for number in range(1_000_000))
    status, text = error(connect(engine).post("/v1/sgl/unpin", json={"pin_id": pin_id}))
    assert status == 400 and len(text) < 200
    assert engine.asked == []


def test_prefixes_of_many_pins_are_computed_one_at_a_time() -> None:
    app = fake_server(PinningEngine("a"))
    client = app.state.engine_client
    at_once: list[int] = []
    running = 0

    async def generate(prompt: Any, *args: Any, **options: Any) -> AsyncIterator[None]:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        yield None

    client.generate = generate

    async def pin_many() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            bodies = [{"prompt": [number + 1]} for number in range(8)]
            answers = await asyncio.gather(
                *(http.post("/v1/sgl/pin", json=body) for body in bodies)
            )
            return [answer.status_code for answer in answers]

    assert asyncio.run(pin_many()) == [200] * 8
    assert at_once == [1] * 8
