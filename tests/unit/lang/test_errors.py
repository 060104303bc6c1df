"""Every failure is a clear error, immediately, and nothing waits forever."""

from __future__ import annotations

import asyncio
import functools
import gc
import time

import pytest
from fastapi.responses import JSONResponse

import sgl_vllm as sgl
from tests.unit.lang.http_server import refusing
from tests.unit.lang.scripted import appending


def fails_on(text):
    """A fault: completions whose prompt contains `text` are errors."""
    return refusing(lambda path, body: text in body.get("prompt", ""), 500, "the engine is dead")


two_gens = appending(
    "x" + sgl.gen("first"), " bad " + sgl.gen("second"), " more " + sgl.gen("third")
)


def test_run_raises_the_first_failed_operation_and_chains_its_cause(server, backend):
    server.fault = fails_on("bad")
    with pytest.raises(sgl.ProgramError) as caught:
        two_gens.run()
    assert caught.value.operation == "gen 'second'"
    assert "gen 'second' failed" in str(caught.value)
    assert "the engine is dead" in str(caught.value)
    assert isinstance(caught.value.__cause__, sgl.BackendError)
    assert caught.value.__cause__.status == 500
    assert len(server.bodies("/v1/completions")) == 2  # the third gen did not run


def test_reading_raises_too_and_what_was_there_before_stays_readable(server, backend):
    server.fault = fails_on("bad")
    seen = {}

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("first") + " bad " + sgl.gen("second") + sgl.gen("third")
        seen["error"] = s.error()
        seen["first"] = s["first"]
        meta = functools.partial(s.get_meta_info, "second")
        for read in (lambda: s["second"], lambda: s["third"], s.text, s.messages, s.sync, meta):
            with pytest.raises(sgl.ProgramError, match="gen 'second'"):
                read()
        s += "too late" + sgl.gen("fourth")
        with pytest.raises(sgl.ProgramError, match="gen 'second'"):
            s["fourth"]

    state = program.run()  # raises nothing, because the program has read the error
    assert seen["error"].operation == "gen 'second'"
    assert seen["first"] == state["first"] == "[1]"
    with pytest.raises(sgl.ProgramError, match="gen 'second'"):
        state.text()


def test_an_error_in_a_branch_names_it_and_is_raised_by_join_and_run(server, backend):
    server.fault = fails_on("bad")
    seen = {}

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(3)
        forks += ["ok", "bad", "ok"]
        forks += sgl.gen("b")
        forks.join()
        seen["others"] = [forks[0]["b"], forks[2]["b"]]
        s["b"]

    with pytest.raises(sgl.ProgramError, match=r"gen 'b' in fork\[1\] failed"):
        program.run()
    assert len(seen["others"]) == 2


def test_branches_of_a_failed_prompt_fail_with_it(server, backend):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        s += "bad" + sgl.gen("a")
        early = s.fork(2)
        early += sgl.gen("b")
        assert early[0].error().operation == "gen 'a'"
        late = s.fork(2)  # of a prompt that is known to have failed
        late += sgl.gen("c")
        with pytest.raises(sgl.ProgramError, match="gen 'a'"):
            late[1].copy().text()

    program.run()


def test_a_missing_api_key_and_a_wrong_one_are_different_errors(server):
    server.api_key = "secret"
    with pytest.raises(sgl.ProgramError, match=r"needs an api_key.*VLLM\(..., api_key="):
        two_gens.run(backend=sgl.VLLM(server.url))
    with pytest.raises(sgl.ProgramError, match="rejected the api_key"):
        two_gens.run(backend=sgl.VLLM(server.url, api_key="wrong"))
    assert two_gens.run(backend=sgl.VLLM(server.url, api_key="secret"))["third"]


def test_flush_cache_needs_the_plugin_and_says_so(server, backend):
    with pytest.raises(sgl.UnsupportedError, match=r"flush_cache .* --plugin sgl_vllm"):
        sgl.flush_cache()
    server.plugin = True
    backend = sgl.VLLM(server.url, max_retries=0)
    sgl.flush_cache(backend)
    assert len(server.bodies("/v1/sgl/flush_cache")) == 1
    in_use = JSONResponse({"detail": "the cache is in use"}, 409)
    server.fault = lambda path, body: in_use if path.endswith("flush_cache") else None
    with pytest.raises(sgl.BackendError, match="409: the cache is in use"):
        sgl.flush_cache(backend)


def test_flushing_where_that_would_block_everything_is_refused_before_it_begins(server, backend):
    server.plugin = True

    @sgl.function
    async def program(s):
        with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread"):
            sgl.flush_cache()
        assert server.bodies("/v1/sgl/flush_cache") == []
        await asyncio.to_thread(sgl.flush_cache)

    program.run()
    assert len(server.bodies("/v1/sgl/flush_cache")) == 1


def test_programs_run_while_the_server_does_not_say_whether_it_has_the_plugin(server, backend):
    server.plugin = True
    server.logprob = lambda token, position: -0.1 if chr(token) in "yes" else -3.0
    server.fault = refusing(lambda path, body: path == "/v1/sgl/stats", 503, "busy")
    program = appending("x" + sgl.gen("a", max_tokens=5) + sgl.select("pick", ["no", "yes"]))
    assert program.run()["pick"] == "yes"
    assert {path for path, _ in server.requests} == {
        *("/v1/models", "/v1/sgl/stats", "/v1/completions", "/tokenize")
    }
    with pytest.raises(sgl.BackendError, match="answered 503: busy"):
        sgl.get_server_info()


@pytest.mark.parametrize("plugin", [False, True])
def test_get_server_info_tells_a_stock_server_from_ours(server, backend, plugin):
    server.plugin = plugin
    info = sgl.get_server_info()
    assert (info.model, info.max_model_len, info.vllm_version) == ("fake", 4096, "0.32.0")
    assert info.plugin is plugin
    assert info.stats == ({"hit_tokens": 7} if plugin else None)


def test_a_backend_that_is_dropped_closes_its_connections(running, server):
    backend = sgl.VLLM(server.url)
    two_gens.run(backend=backend)
    assert running.num_connections > 0
    del backend
    gc.collect()
    ends = time.monotonic() + 4  # before the server itself would close them
    while running.num_connections and time.monotonic() < ends:
        time.sleep(0.01)
    assert running.num_connections == 0


# --- errors that the program handles -----------------------------------------------------------


def test_a_program_may_do_without_a_branch_that_failed(server, backend):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(3)
        forks += ["ok", "bad", "fine"]
        forks += sgl.gen("b")
        found = []
        for branch in forks:
            try:
                found.append(branch["b"])
            except sgl.ProgramError as error:
                assert error.where == "fork[1]"
        s += " so " + sgl.gen("end")
        return found

    state = program.run()
    assert (state.ret_value, state["end"]) == (["[3]", "[5]"], "[5]")
    (in_batch,) = program.run_batch([{}])
    assert in_batch["end"] == "[5]"


@pytest.mark.parametrize("read", ["get", "error", "iterate"])
def test_a_program_may_do_without_a_generation_that_failed(server, backend, read):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        s += "bad" + sgl.gen("a") + "never " + sgl.gen("b")
        if read == "error":
            return str(s.error())
        try:
            return s["a"] if read == "get" else list(s.text_iter())
        except sgl.ProgramError as error:
            return str(error)

    state = program.run()
    assert state.ret_value.startswith("gen 'a' failed")
    assert len(server.calls) == 1
    error = state.error()
    assert error is not None and error.operation == "gen 'a'"


def test_the_error_that_nobody_has_read_is_the_one_that_run_raises(server, backend):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += ["bad 0", "bad 1", "ok"]
        forks += sgl.gen("b")
        assert forks[0].error() is not None

    with pytest.raises(sgl.ProgramError, match=r"gen 'b' in fork\[1\] failed"):
        program.run()


def test_what_is_appended_to_a_failed_prompt_afterwards_is_not_lost_silently(server, backend):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        s += "bad" + sgl.gen("a")
        assert s.error() is not None
        s += " goes on " + sgl.gen("b")

    with pytest.raises(sgl.ProgramError, match="gen 'a' failed"):
        program.run()


def test_the_end_of_a_block_appends_nothing_that_could_be_lost(server, backend):
    server.fault = refusing(lambda path, body: "messages" in body)

    @sgl.function
    def program(s):
        with s.assistant(), s.var_scope("turn"):
            s += sgl.gen("a")
            return s.error().operation

    assert program.run().ret_value == "gen 'a'"


def test_if_all_branches_failed_first_raises_and_that_handles_all_of_them(server, backend):
    server.fault = fails_on("bad")

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "bad" + sgl.gen("b")
        try:
            forks.first(lambda branch: True)
        except sgl.ProgramError as error:
            return error.operation

    assert program.run().ret_value == "gen 'b'"


def test_a_time_limit_ends_a_run_whatever_it_catches(server, backend):
    server.latency_s = 30

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s.error() is not None

    with pytest.raises(sgl.ProgramError, match="did not finish within"):
        program.run(timeout_s=0.05)
