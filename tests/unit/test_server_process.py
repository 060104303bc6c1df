"""`VllmServer` with a small HTTP server in vLLM's place: the process and its counters."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sgl_vllm.server_process import Counters, ServerFailed, VllmServer

# Stands for vLLM: it has a worker process, answers /health, and shows one running request in the
# first two readings of /metrics. It writes the ids of both processes to PIDS.
FAKE_SERVER = """
import http.server, json, os, signal, subprocess, sys, time
port, pids, behaviour = int(sys.argv[1]), sys.argv[2], sys.argv[3]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(pids + ".new", "w") as file:
    json.dump([os.getpid(), worker.pid], file)
os.rename(pids + ".new", pids)
if behaviour == "fails":
    sys.exit("ValueError: no such model")
if behaviour == "hangs":
    time.sleep(600)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
readings = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global readings
        readings += self.path == "/metrics"
        running = 1 if readings < 3 else 0
        body = f'''# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {min(readings, 3)}
vllm:iteration_tokens_total_count{{engine="0"}} {min(readings, 3)}
vllm:iteration_tokens_total_sum{{engine="0"}} 100
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0"}} 70
vllm:prompt_tokens_total{{engine="1"}} 30
# TYPE vllm:prompt_tokens_cached counter
vllm:prompt_tokens_cached_total{{engine="0"}} 64
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} 12
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 0
'''
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

MakeServer = Callable[..., VllmServer]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(behaviour: str = "serves", **options: float) -> VllmServer:
        server = VllmServer("model", log_path=tmp_path / "log", **options)  # type: ignore[arg-type]
        server.command = fake_command(server.port, tmp_path, behaviour)
        return server

    return make


def fake_command(port: object, folder: Path, behaviour: str) -> list[str]:
    pids = str(folder / "pids")
    return [sys.executable, "-S", "-c", FAKE_SERVER, str(port), pids, behaviour]


def pids_of(folder: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline, "the fake server never started"
        time.sleep(0.02)
    return list(json.loads((folder / "pids").read_text()))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_all_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def test_the_server_and_its_worker_live_inside_the_block_only(
    make_server: MakeServer, tmp_path: Path
) -> None:
    with make_server() as server:
        pids = pids_of(tmp_path)
        assert server.running
        assert all(alive(pid) for pid in pids)
    assert not server.running
    assert_all_gone(pids, within_s=2)


def test_a_server_that_ignores_sigterm_is_killed_after_its_time(
    make_server: MakeServer, tmp_path: Path
) -> None:
    begun = time.monotonic()
    with make_server("stubborn", stop_timeout_s=1):
        pass
    assert_all_gone(pids_of(tmp_path), within_s=2)
    assert time.monotonic() - begun < 15


def test_a_server_that_ends_at_once_fails_with_the_end_of_its_log(
    make_server: MakeServer, tmp_path: Path
) -> None:
    with pytest.raises(ServerFailed, match="ended before it was ready") as failure:
        make_server("fails").start()
    assert "ValueError: no such model" in str(failure.value)
    assert_all_gone(pids_of(tmp_path), within_s=2)  # its worker too


def test_a_server_that_never_answers_fails_in_time(make_server: MakeServer, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="was not ready after 1 s"):
        make_server("hangs", start_timeout_s=1).start()
    assert_all_gone(pids_of(tmp_path), within_s=2)


def test_no_other_process_is_given_the_port_before_the_server_has_it(make_server: MakeServer):
    server = make_server()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))
    with server:  # the server itself can bind it
        assert server.running
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.port))


@contextmanager
def owner_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that has a server up, as the demo or a test run has."""
    command = fake_command("PORT", folder, "serves")
    script = f"""
import sys, time
from sgl_vllm.server_process import VllmServer
server = VllmServer("model")
server.command = [part.replace("PORT", str(server.port)) for part in {command!r}]
server.start()
print("up", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        yield owner
    finally:
        owner.kill()
        owner.wait()


def test_the_server_goes_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner_process(tmp_path) as owner:
        pids = pids_of(tmp_path)
        assert all(alive(pid) for pid in pids)
        owner.kill()
        owner.wait(10)
        assert_all_gone(pids, within_s=10)


def test_counters_are_read_when_the_server_is_idle_and_summed_over_engines(
    make_server: MakeServer,
) -> None:
    with make_server() as server:
        counters = server.counters()
    assert counters == Counters(
        forward_passes=3,  # the readings before were of a server with a running request
        prompt_tokens=100,
        cached_prompt_tokens=64,
        output_tokens=12,
        forced_tokens=0,
        preemptions=0,
    )
    assert counters.computed_prompt_tokens == 36
