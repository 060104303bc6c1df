"""The language on an engine in process: the same as on a server, and nothing left of it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.loop import background_loop
from tests.engine.engine import KV_CACHE_BYTES, MODEL
from tests.unit.lang.scripted import appending

LONG = "Once upon a time there was a hare who lived at the edge of a large and dark forest. " * 4
MAX_MODEL_LEN = 1024


def engine_of(**options) -> sgl.Engine:
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    return sgl.Engine(MODEL, **{**defaults, **options})


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def children_of_others():
    """Of earlier modules, such as the workers that torch's compiler keeps."""
    return children()


@pytest.fixture(scope="module")
def engine(children_of_others):
    with engine_of(plugin={"fsm": False, "jump_forward": False}) as engine:
        yield engine


@sgl.function
def text_program(s):
    s += LONG + "It said:" + sgl.gen("said", max_tokens=12, return_logprob=True, top_logprobs_num=2)
    for name, method in (
        ("mean", sgl.token_length_normalized),
        ("greedy", sgl.greedy_token_selection),
        ("gain", sgl.unconditional_likelihood_normalized),
    ):
        s += " and then a" + sgl.select(name, [" cat", " dogs", " very old owl"], 0.0, method)
    s += ". In the year " + sgl.gen("year", regex="[12][0-9]{3}")
    forks = s.fork(2)
    forks += [" the wind", " the rain"]
    forks += sgl.gen("weather", max_tokens=6, stop=".")
    forks.join()


@sgl.function
def chat_program(s):
    s += sgl.system("You are an owl.") + sgl.user("Who are you?")
    s += sgl.assistant(sgl.gen("free", max_tokens=10))
    s += sgl.user("A name, please.")
    with s.assistant():
        s += "My name is" + sgl.gen("name", max_tokens=6)
        s += ", and I am" + sgl.select("am", [" wise", " hungry"])


empty_program = appending(sgl.gen("opening", max_tokens=5))


prompt_logprobs_program = appending(
    "The old owl" + sgl.gen("more", max_tokens=2, return_logprob=True, logprob_start_len=1)
)


def test_programs_run_as_on_a_server(engine):
    """It is one, so that what programs get is tested in `tests/unit/lang` and `tests/server`."""
    state = text_program.run(backend=engine, temperature=0.0)
    assert re.fullmatch("[12][0-9]{3}", state["year"])
    assert state["mean"] in (" cat", " dogs", " very old owl")
    assert len(state.get_meta_info("gain")["scores"]) == 3
    told = state.get_meta_info("said")["output_token_logprobs"]
    assert "".join(token["text"] for token in told).startswith(state["said"])
    state = chat_program.run(backend=engine, temperature=0.0)
    assert [message["role"] for message in state.messages()][-1] == "assistant"
    assert state.text().endswith(state["am"]) and state["am"] in (" wise", " hungry")
    more = prompt_logprobs_program.run(backend=engine).get_meta_info("more")
    assert "".join(token["text"] for token in more["prompt_token_logprobs"]).endswith("owl")
    with pytest.raises(sgl.ProgramError, match="no beginning-of-text token"):
        empty_program.run(backend=engine)


def test_a_stop_pattern_ends_the_text_and_the_request(engine):
    program = appending(
        "The hare" + sgl.gen("a", max_tokens=500, ignore_eos=True, stop_regex=r"\s\w+\s\w+\s")
    )
    state = program.run(backend=engine, temperature=0.0)
    assert state.usage.completion_tokens < 100
    assert unfinished(engine) == 0


def test_the_prefix_is_found_in_the_cache_until_it_is_emptied(engine):
    program = appending(LONG + sgl.gen("a", max_tokens=2))
    program.run(backend=engine)
    assert (program.run(backend=engine).usage.cached_prompt_tokens or 0) >= 32
    sgl.flush_cache(engine)
    assert program.run(backend=engine).usage.cached_prompt_tokens == 0
    info = sgl.get_server_info(engine)
    assert (info.model, info.max_model_len) == (engine.model, MAX_MODEL_LEN)
    assert info.plugin and info.stats is not None and info.stats["parts"]["radix"] == "on"
    assert info.stats["parts"]["jump_forward"] != "on"


def unfinished(engine) -> int:
    """Requests that the engine still works on, once the aborts under way have arrived."""
    running, *_ = background_loop().run_blocking(engine._running.answer)
    ends_s = time.monotonic() + 5
    while running.get_num_unfinished_requests() and time.monotonic() < ends_s:
        time.sleep(0.01)
    return running.get_num_unfinished_requests()


endless = appending("The hare" + sgl.gen("a", max_tokens=900, ignore_eos=True))


def test_a_program_that_times_out_aborts_its_request(engine):
    with pytest.raises(sgl.ProgramError, match=r"did not finish within timeout_s=0\.2"):
        endless.run(backend=engine, timeout_s=0.2)
    assert unfinished(engine) == 0


def test_a_request_that_fails_in_the_engine_is_an_error(engine):
    no_text = appending("x" + sgl.gen("a", json_schema={"type": "string", "pattern": r"[^\s\S]"}))
    with pytest.raises(sgl.ProgramError, match="answered 500"):
        no_text.run(backend=engine)
    assert text_program.run(backend=engine, temperature=0.0)["year"]  # it still works


def test_a_wrong_argument_is_an_error_at_the_start():
    with pytest.raises(sgl.BackendError, match="did not start"), engine_of(dtype="float7"):
        pass
    says = "did not start: .* 'max_modle_len'; did you mean max_model_len"
    with pytest.raises(sgl.BackendError, match=says), engine_of(max_modle_len=64):
        pass


# -- the end


async def tasks() -> list[str]:
    """What is left on the loop, but for this."""
    await asyncio.sleep(0.1)
    return [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.slow
def test_closing_leaves_no_process_and_later_use_starts_it_again(
    engine, children_of_others, monkeypatch
):
    """Last, as it ends the engine of this module."""
    new = children() - children_of_others
    workers = [p for p in new if "resource_tracker" not in " ".join(p.cmdline())]
    assert workers
    engine.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []
    assert background_loop().run_blocking(tasks) == []
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with engine_of(plugin=True) as with_all_parts:
        assert os.environ["VLLM_PLUGINS"] == "another"
        state = text_program.run(backend=with_all_parts, temperature=0.0)
        assert state["year"] and state["mean"] and state.usage.cached_prompt_tokens


FORGETFUL = """
import sgl_vllm as sgl

if __name__ == "__main__":
    options = dict(enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 24)
    engine = sgl.Engine({model!r}, **options)
    engine.start()
    print("started", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_program_that_never_closes_its_engine_ends(tmp_path):
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL.format(model=MODEL))
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=180)
    assert "started" in ended.stdout and ended.returncode == 0, ended.stderr
