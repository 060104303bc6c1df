"""The attacked server: its processes, blocks and greedy answers.

Owns what is read from it before and after an attack, and how long it takes to end.
"""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.server_process import VllmServer
from tools.attack.figures import Resident
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

ENGINE = "EngineCore"
"""In the title of an engine's process."""

WORKER = "sgl_vllm.fsm"
"""In the command of a process that compiles formats (`sgl_vllm/fsm/worker.py`)."""

GREEDY: list[dict[str, object]] = [
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


def demo_server() -> VllmServer:
    """A server of the demo model with the plugin, not started."""
    return VllmServer(
        MODEL_PATH,
        plugin=True,
        served_model_name="demo",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        extra_args=["--num-gpu-blocks-override", str(NUM_BLOCKS)],
        env=CPU_SETTINGS,
    )


def fill_cache(url: str) -> None:
    """Use every block of the KV cache once. Before that, the system has not given the engine its
    memory, which would seem to grow later."""
    rng = random.Random(0)
    length = MAX_MODEL_LEN - 48
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(NUM_BLOCKS * BLOCK_SIZE // length + 2):
            prompt = [rng.randrange(10, 4000) for _ in range(length)]
            body = completion(prompt=prompt) | {"max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()


def greedy_answers(url: str) -> list[str]:
    """The answers to fixed requests, one after another."""
    answers = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for fields in GREEDY:
            answer = client.post("/v1/completions", json=completion(**fields) | {"max_tokens": 24})
            answers.append(json.dumps(answer.raise_for_status().json()["choices"][0]["text"]))
    return answers


def resident(server: VllmServer) -> Resident:
    """Memory of the processes that run now."""
    api = engine = workers = 0
    for process in server_processes(server):
        size, command = process.memory_info().rss, " ".join(process.cmdline())
        if ENGINE in command:
            engine += size
        elif WORKER in command:
            workers += size
        else:
            api += size
    return Resident(api, engine, workers)


def server_processes(server: VllmServer) -> list[psutil.Process]:
    """`vllm serve`, and all that it has started."""
    return psutil.Process(server.pid).children(recursive=True)


def _main_process(server: VllmServer) -> psutil.Process:
    (process,) = psutil.Process(server.pid).children()
    return process


def num_log_lines(server: VllmServer) -> int:
    """Lines that the server has written so far."""
    return server.log_path.read_bytes().count(b"\n")


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


class Bystander:
    """Another client, in a process of its own, whose times to the first token are kept."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tools.attack.bystander", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._seen: list[tuple[float, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sent_at, seconds = map(float, line.split())
            self._seen.append((sent_at, seconds))

    def between(self, start: float, end: float) -> list[float]:
        """Seconds to the first token, of requests sent in that time of the monotonic clock."""
        return [seconds for sent_at, seconds in list(self._seen) if start <= sent_at < end]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join(10)


@contextmanager
def bystander(url: str) -> Iterator[Bystander]:
    client = Bystander(url)
    try:
        yield client
    finally:
        client.stop()


def seconds_to_stop(server: VllmServer) -> float:
    """Send SIGTERM while clients poll and stream; seconds until all processes have ended.

    Infinite if one is left after `STOP_TIMEOUT_S`.
    """
    processes = server_processes(server)
    stopping = threading.Event()
    clients = [
        threading.Thread(target=work, args=(server.url, stopping), daemon=True)
        for work in (_poll, _poll, _poll, _poll, _scrape, _stream, _stream)
    ]
    for client in clients:
        client.start()
    time.sleep(1.5)
    begun = time.monotonic()
    _main_process(server).send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(processes, STOP_TIMEOUT_S)
    seconds = time.monotonic() - begun
    stopping.set()
    server.stop()
    for client in clients:
        client.join(10)
    return math.inf if left else seconds


def _until(stopping: threading.Event, url: str, path: str) -> None:
    while not stopping.is_set():
        try:
            httpx.get(f"{url}{path}", timeout=STOP_TIMEOUT_S)
        except httpx.HTTPError:  # the server has ended
            stopping.wait(0.1)


def _poll(url: str, stopping: threading.Event) -> None:
    _until(stopping, url, "/v1/sgl/stats")


def _scrape(url: str, stopping: threading.Event) -> None:
    _until(stopping, url, "/metrics")


def _stream(url: str, stopping: threading.Event) -> None:
    body = completion(max_tokens=1900, ignore_eos=True, stream=True)
    while not stopping.is_set():
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=STOP_TIMEOUT_S
            ) as answer:
                for _ in answer.iter_lines():
                    pass
        except httpx.HTTPError:
            stopping.wait(0.1)
