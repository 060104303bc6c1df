"""The attacked server: its processes, blocks and greedy answers; and another client of it.

Owns what is read from it before and after an attack, and how long it takes to end.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty
from typing import Any

import httpx
import psutil

from sgl_vllm.demo import MODEL_PATH, TOOL_FLAGS
from sgl_vllm.server_process import VllmServer
from tools.attack.hostile import completion

STOP_TIMEOUT_S = 60.0
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
NUM_BLOCKS = 2048
"""Of the KV cache: 256 MiB of the demo model's."""

CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # oneDNN keeps a compiled kernel for each number of tokens in a pass, 1,024 by default. Stock
    # vLLM grows by 450 MB in 1,200 prompts of different lengths, and hides what others grow by.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}

GREEDY: list[dict[str, Any]] = [
    {"prompt": "Once upon a time there was a hare"},
    {"prompt": [20 + number for number in range(300)]},
    {"prompt": [20 + number for number in range(170)], "cache_salt": "mine"},
    {"prompt": "The answer is", "structured_outputs": {"regex": "[a-z]{3,12} and [a-z]{2}"}},
    {
        "prompt": "A card: ",
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"name": {"enum": ["hare", "fox"]}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        },
    },
    {"prompt": "Well?", "structured_outputs": {"choice": ["yes, of course", "no, never"]}},
]


ARGUMENTS = (
    *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--scheduling-policy", "priority"),
    *TOOL_FLAGS,
)


def demo_server(plugin: bool = True) -> VllmServer:
    """A server of the demo model, not started."""
    return VllmServer(
        MODEL_PATH,
        plugin=plugin,
        served_model_name="demo",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        extra_args=ARGUMENTS,
        env=CPU_SETTINGS,
    )


def _ask(url: str, **fields: Any) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=completion(**fields), timeout=60)
    return json.dumps(answer.raise_for_status().json()["choices"][0]["text"])


def fill_cache(url: str) -> None:
    """Use every block of the KV cache once. Before that, the system has not given the engine its
    memory, which would seem to grow later."""
    rng = random.Random(0)
    length = MAX_MODEL_LEN - 48
    for _ in range(NUM_BLOCKS * BLOCK_SIZE // length + 2):
        _ask(url, prompt=[rng.randrange(10, 4000) for _ in range(length)], max_tokens=1)


def greedy_answers(url: str) -> list[str]:
    """The answers to fixed requests, one after another."""
    return [_ask(url, max_tokens=24, **fields) for fields in GREEDY]


@dataclass(frozen=True)
class Resident:
    """Resident bytes of a server's processes: that which answers HTTP, the engines', and those in
    which formats are compiled first."""

    api: int
    engine: int
    workers: int


def resident(server: VllmServer) -> Resident:
    """Memory of the processes that run now."""
    sizes = {"EngineCore": 0, "sgl_vllm.fsm": 0, "": 0}  # by what is in the command
    for process in server_processes(server):
        command = " ".join(process.cmdline())
        kind = next(name for name in sizes if name in command)
        sizes[kind] += process.memory_info().rss
    return Resident(sizes[""], sizes["EngineCore"], sizes["sgl_vllm.fsm"])


def server_processes(server: VllmServer) -> list[psutil.Process]:
    """`vllm serve`, and all that it has started."""
    return psutil.Process(server.pid).children(recursive=True)


def log_lines(server: VllmServer, text: str = "") -> list[str]:
    """Lines with `text` that the server has written so far."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [line for line in lines if text in line]


def parts(url: str) -> dict[str, str]:
    """The state of each part."""
    return dict(httpx.get(f"{url}/v1/sgl/stats", timeout=60).json()["parts"])


def wait_until_idle(url: str, timeout_s: float = 60) -> None:
    """Returns when nothing runs or waits.

    Raises:
        TimeoutError: something still does after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        page = httpx.get(f"{url}/metrics", timeout=30).text
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        lines = [line for line in page.splitlines() if line.startswith(names)]
        if lines and not any(float(line.rsplit(" ", 1)[1]) for line in lines):
            return
        time.sleep(1.1)
    raise TimeoutError(f"requests still run {timeout_s:.0f} s after the attack")


def unpin_all(url: str) -> None:
    """Remove every pin that the attack made."""
    with httpx.Client(base_url=f"{url}/v1/sgl", timeout=60) as client:
        for engine in client.get("/pins").json()["engines"]:
            for pin in engine["pins"]:
                client.post("/unpin", json={"pin_id": pin["pin_id"]}).raise_for_status()


def blocks_in_use(url: str) -> int:
    """KV blocks that are neither free nor can be evicted."""
    engines = httpx.get(f"{url}/v1/sgl/tree?max_nodes=1", timeout=60).json()["engines"]
    return sum(
        engine["total_blocks"] - engine["free_blocks"] - engine["num_evictable_blocks"]
        for engine in engines
    )


def flush(url: str) -> bool:
    """Whether the cache could be emptied: only while no block is in use."""
    return httpx.post(f"{url}/v1/sgl/flush_cache", json={}, timeout=60).status_code == 200


# -- another client


@contextmanager
def bystander(url: str) -> Iterator[Callable[[float, float], list[float]]]:
    """Another client, in a process of its own. Gives the times to first tokens, in seconds, of the
    requests that it sent between two moments of the monotonic clock."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_stream_short, args=(url, queue), daemon=True)
    process.start()
    seen: list[tuple[float, float]] = []

    def between(start: float, end: float) -> list[float]:
        with contextlib.suppress(Empty):
            while True:
                seen.append(queue.get_nowait())
        return [seconds for sent_at, seconds in seen if start <= sent_at < end]

    try:
        yield between
    finally:
        process.terminate()
        process.join()


def _stream_short(url: str, queue: Any) -> None:
    rng = random.Random(1)
    with httpx.Client(base_url=url, timeout=60) as client:
        while True:
            prompt = [rng.randrange(10, 4000) for _ in range(60)]
            body = completion(prompt=prompt, max_tokens=2, stream=True)
            sent_at = time.monotonic()
            has_begun = False
            try:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if not has_begun and line.startswith("data: {"):
                            has_begun = True
                            queue.put((sent_at, time.monotonic() - sent_at))
            except httpx.RemoteProtocolError:  # the server closes a connection that was idle
                if has_begun:
                    raise
            time.sleep(0.05)


# -- its end


def seconds_to_stop(server: VllmServer) -> float:
    """Send SIGTERM while clients poll and stream; seconds until all processes have ended.

    Infinite if one is left after `STOP_TIMEOUT_S`.
    """
    processes = server_processes(server)
    stopping = threading.Event()
    body = completion(max_tokens=1900, ignore_eos=True, stream=True)
    polls = [("GET", "/v1/sgl/stats", None)] * 4 + [("GET", "/metrics", None)]
    clients = [
        threading.Thread(target=_ask_until, args=(stopping, server.url, *request), daemon=True)
        for request in [*polls, *[("POST", "/v1/completions", body)] * 2]
    ]
    for client in clients:
        client.start()
    time.sleep(1.5)
    begun = time.monotonic()
    (main,) = psutil.Process(server.pid).children()
    main.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(processes, STOP_TIMEOUT_S)
    seconds = time.monotonic() - begun
    stopping.set()
    server.stop()
    for client in clients:
        client.join(10)
    return math.inf if left else seconds


def _ask_until(stopping: threading.Event, url: str, method: str, path: str, body: Any) -> None:
    while not stopping.is_set():
        try:
            httpx.request(method, f"{url}{path}", json=body, timeout=STOP_TIMEOUT_S)
        except httpx.HTTPError:  # the server has ended
            stopping.wait(0.1)
