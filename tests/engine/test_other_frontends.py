"""An engine behind a frontend that has no part of the plugin. As `vllm-rs serve` does, the test
starts it by `vllm serve --headless`, and sends requests as MessagePack over ZMQ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import zmq
from msgspec.msgpack import encode
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder

from sgl_vllm.server_process import VllmServer
from tests.engine.engine import MODEL, Ask, greedy, in_format, words

pytestmark = pytest.mark.slow

UNIT = {"type": "string", "enum": ["degrees celsius"]}
UNITS = {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"]}
SCHEMA = UNITS | {"additionalProperties": False}


class Headless(VllmServer):
    """An engine with the environment of the Rust frontend, and this process in its place."""

    def __init__(self) -> None:
        context = zmq.Context[zmq.Socket[bytes]]()
        self._handshake, self._inputs = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        self._outputs = context.socket(zmq.PULL)
        ports = []
        for socket in (self._handshake, self._inputs, self._outputs):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 120_000)
            ports.append(str(socket.bind_to_random_port("tcp://127.0.0.1")))
        self._addresses = {
            name: [f"tcp://127.0.0.1:{port}"]
            for name, port in zip(("inputs", "outputs"), ports[1:], strict=True)
        }
        flags = "--headless --block-size 32 --data-parallel-address 127.0.0.1"
        super().__init__(
            MODEL,
            plugin=True,
            plugin_config={"why_exact": False},
            max_model_len=1024,
            extra_args=[*flags.split(), "--data-parallel-rpc-port", ports[0]],
            env={"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": "/bin/true"},
        )

    def _wait_until_healthy(self) -> None:
        self._engine, _ = self._handshake.recv_multipart()
        init = encode({"addresses": self._addresses, "parallel_config": {}})
        self._handshake.send_multipart([self._engine, init])
        self._inputs.recv_multipart()  # from now on, the engine takes requests

    def ask(
        self, prompt: list[int], salt: str | None = None, **more: Any
    ) -> list[EngineCoreOutput]:
        """The outputs of one greedy request."""
        name, params = str(time.time()), {"temperature": 0.0, "max_tokens": 60, **more}
        request = [name, prompt, None, params, None, time.time(), None, salt, None]
        self._inputs.send_multipart([self._engine, b"\x00", encode(request)])
        found: list[EngineCoreOutput] = []
        while not (found and found[-1].finished):
            frames = self._outputs.recv_multipart()
            found += MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs
        return found


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_the_engines_parts_work_behind_a_frontend_without_the_plugin(start) -> None:
    prompts = [words(70) + words(9, seed) for seed in (1, 2, 3)]
    asks = [Ask(prompt, greedy(60)) for prompt in prompts]
    stock = start(structured_outputs_config={"backend": "guidance"})
    results = stock.run([*asks, Ask(prompts[0], in_format(60, {"json": SCHEMA}))])
    *plain, document = (result.outputs[0] for result in results)
    end = stock.tokenizer.eos_token_id
    ends = {"_eos_token_id": end, "_all_stop_token_ids": [end]}

    with Headless() as engine:
        answers = [engine.ask(prompt) for prompt in prompts]
        salted = [engine.ask(prompt, "a tenant's") for prompt in prompts]
        refused, jumped = (
            engine.ask(prompts[0], structured_outputs={"json": one, "_backend": "guidance"}, **ends)
            for one in ("no schema", SCHEMA)
        )
        log = engine.log_path.read_text()

    assert log.count("sgl-vllm: with vLLM's Rust frontend, there are no routes") == 1
    assert [tokens(one) for one in answers + salted] == [[*one.token_ids] for one in plain] * 2
    hits = [[a[0].prefill_stats.num_cached_tokens for a in group] for group in (answers, salted)]
    assert hits == [[0, 64, 64], [0, 70, 70]]  # to the token for requests with a salt
    assert refused[-1].finish_reason == FinishReason.ERROR and "JSON" in refused[-1].stop_reason
    assert stock.tokenizer.decode(tokens(jumped), skip_special_tokens=True) == document.text
    assert "celsius" in document.text and len(jumped) < len(tokens(jumped)) / 2
