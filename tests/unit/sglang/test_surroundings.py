"""What surrounds the programs in SGLang's benchmarks, examples and notebooks: the command line,
files of data and results, servers, images and tokenizers."""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import sgl_vllm.sglang as sgl
from sgl_vllm.sglang import utils
from tests.unit.lang.conftest import FakeServer

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-questions", type=int, default=2)
    return utils.add_common_sglang_args_and_parse(parser)


# --- a benchmark, from its command line to its files ---------------------------------------------


@sgl.function
def count(s, question):
    s += "Q: " + question + "\nA: "
    s += sgl.gen("answer", max_tokens=8, stop="Q:")


def test_a_benchmark_runs_from_its_command_line_to_its_files(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.reply = lambda prompt: "2"
    (tmp_path / "questions.jsonl").write_text(
        '# a header\n{"q": "1+1"}\n{"q": "2+0"}\n{"q": "x"}\n'
    )
    url, _, port = server.url.rpartition(":")
    args = parsed(monkeypatch, "--host", url, "--port", port, "--parallel", "2")
    backend = utils.select_sglang_backend(args)
    sgl.set_default_backend(backend)

    lines = utils.read_jsonl(str(tmp_path / "questions.jsonl"))[: args.num_questions]
    states = count.run_batch(
        [{"question": line["q"]} for line in lines],
        temperature=0,
        num_threads=args.parallel,
        progress_bar=True,
    )
    preds = [state["answer"] for state in states]
    utils.dump_state_text(str(tmp_path / "states.txt"), [*states, "a text"])
    raw = tmp_path / "raw.jsonl"
    utils.dump_bench_raw_result(str(raw), states, preds, ["2", "3"])

    utils.dump_bench_raw_result(None, [], [], [])  # writes nothing

    assert preds == ["2", "2"]
    assert backend.model_info["model_path"] == "fake"  # type: ignore[attr-defined]
    assert all(state.get_meta_info("answer")["completion_tokens"] > 0 for state in states)
    written = (tmp_path / "states.txt").read_text()
    assert re.findall("(?m)^=+ ([0-9]) =+\n(.*)", written) == [
        ("0", "Q: 1+1"),
        ("1", "Q: 2+0"),
        ("2", "a text"),
    ]
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    assert [(row["prompt"], row["correct"]) for row in rows] == [
        ("Q: 1+1\nA: ", True),
        ("Q: 2+0\nA: ", False),
    ]


def test_the_backend_of_a_benchmark_is_named_on_its_command_line(monkeypatch) -> None:
    args = parsed(monkeypatch, "--backend", "gpt-4")
    assert isinstance(utils.select_sglang_backend(args), sgl.OpenAI)
    with pytest.raises(ValueError, match="must begin with srt or gpt-"):
        utils.select_sglang_backend(parsed(monkeypatch, "--backend", "other"))


# --- files and requests --------------------------------------------------------------------------


def test_a_file_is_downloaded_once(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    for _ in range(2):
        assert utils.download_and_cache_file(f"{server.url}/v1/models", str(path)) == str(path)
    assert json.loads(path.read_text())["data"][0]["id"] == "fake"
    assert len(server.bodies("/v1/models")) == 1


# --- servers -------------------------------------------------------------------------------------


def test_a_command_that_starts_sglangs_server_starts_vllms(monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(utils.subprocess, "Popen", lambda words, text: started.append(words))
    _, port = utils.launch_server_cmd("python3 -m sglang.launch_server \\\n --model-path m")
    assert started == [
        [
            *(sys.executable, "-m", "sgl_vllm.sglang.launch_server"),
            *("--model-path", "m", "--port", str(port)),
        ]
    ]


def test_a_started_process_is_waited_for_and_ended(server: FakeServer) -> None:
    process, _ = utils.launch_server_cmd("sleep 60", port=1)
    utils.wait_for_server(server.url)
    utils.terminate_process(process)
    assert process.returncode is not None


def test_waiting_for_a_server_ends() -> None:
    with pytest.raises(TimeoutError, match="no server answered at http://127"):
        utils.wait_for_server("http://127.0.0.1:9", timeout=0)


# --- images, patterns and tokenizers -------------------------------------------------------------


def test_an_image_is_loaded_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "pixel.png"
    path.write_bytes(PIXEL)
    for source in (str(path), PIXEL, f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"):
        image, size = utils.load_image(source)
        assert size == image.size == (1, 1)


class Wizard(BaseModel):
    name: str
    age: int


def test_a_pattern_of_a_model_matches_its_documents() -> None:
    pattern = utils.build_regex_from_object(Wizard)
    assert re.fullmatch(pattern, '{"name": "Ged", "age": 13}')
    assert not re.fullmatch(pattern, '{"name": "Ged"}')


# --- programs of examples ------------------------------------------------------------------------


def test_a_parameter_named_n_is_the_programs_own(server: FakeServer, endpoint) -> None:
    @sgl.function
    def sample(s, question, n):
        forks = s.fork(n)
        forks += question + sgl.gen("answer")
        forks.join()

    server.reply = lambda prompt: "x"
    assert sample.run(question="?", n=3)["answer"] == ["x", "x", "x"]
    (state,) = sample.run_batch([{"question": "?", "n": 2}])
    assert state["answer"] == ["x", "x"]
