"""A program has the same outcome however it is run, on a deterministic endpoint."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from tests.unit.lang.conftest import words as by_words
from tests.unit.lang.programs import RUN, ScriptedBackend, markov, programs

pytestmark = pytest.mark.timeout(60)


@settings(deadline=None, max_examples=60)
@given(program=programs(), seed=st.integers(0, 9), words=st.booleans())
def test_a_random_program_has_one_outcome_however_it_is_run(program, seed, words):
    backend = ScriptedBackend(markov(seed), by_words if words else list)
    plain = sgl.function(program.sync_function)
    native = sgl.function(program.async_function)
    with_arguments = {**program.args, **RUN, "backend": backend}
    expected = program.outcome(plain.run(**with_arguments))

    def is_expected(state):
        assert program.outcome(state) == expected

    def is_expected_in_pieces(state):
        assert "".join(state.text_iter()) == expected[1]
        is_expected(state)
        for name, value in expected[0].items():
            if isinstance(value, str):
                assert "".join(state.text_iter(name)) == value

    async def both():
        return await asyncio.gather(
            plain.run_async(**with_arguments), native.run_async(**with_arguments)
        )

    is_expected(native.run(**with_arguments))
    for state in asyncio.run(both()):
        is_expected(state)
    for function in (plain, native):
        for state in function.run_batch([program.args] * 2, backend=backend, **RUN):
            is_expected(state)
        is_expected_in_pieces(function.run(**with_arguments, stream=True))
    for function in (program.sync_function, program.async_function):
        ahead = sgl.function(num_api_spec_tokens=8)(function)
        is_expected(ahead.run(**with_arguments))
        is_expected_in_pieces(ahead.run(**with_arguments, stream=True))


@settings(deadline=None, max_examples=80)
@given(
    program=programs(),
    seed=st.integers(0, 9),
    words=st.booleans(),
    num_tokens=st.integers(1, 20),
    tokens_per_chunk=st.sampled_from([1, 1, 1, 2, 3]),
    tells_tokens=st.sampled_from([True, True, True, False]),
)
def test_speculation_changes_nothing_but_what_it_costs(
    program, seed, words, num_tokens, tokens_per_chunk, tells_tokens
):
    backend = ScriptedBackend(
        markov(seed),
        by_words if words else list,
        tokens_per_chunk=tokens_per_chunk,
        tells_tokens=tells_tokens,
    )

    def run(**speculation):
        backend.calls.clear()
        function = sgl.function(**speculation)(program.sync_function)
        state = function.run(**program.args, **RUN, backend=backend)
        assert state.usage.calls == len(backend.calls)
        return program.outcome(state), state.usage

    expected, plain = run()
    outcome, ahead = run(num_api_spec_tokens=num_tokens)
    assert outcome == expected
    if tokens_per_chunk == 1 and tells_tokens:
        assert ahead.calls + ahead.saved_calls == plain.calls
        assert ahead.prompt_tokens + ahead.saved_prompt_tokens <= plain.prompt_tokens
        assert backend.tells_tokens
    # That a server does not report tokens is found out once.
    outcome, again = run(num_api_spec_tokens=num_tokens)
    assert outcome == expected
    if not backend.tells_tokens:
        assert again.calls <= plain.calls


@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=programs(), seed=st.integers(0, 9))
def test_and_so_it_has_over_http(server, backend, program, seed):
    server.document, server.tokens_of = markov(seed), by_words
    with_arguments = {**program.args, **RUN}
    script = ScriptedBackend(markov(seed), by_words)
    function = sgl.function(num_api_spec_tokens=8)(program.sync_function)
    expected = function.run(**with_arguments, backend=script)
    assert program.outcome(function.run(**with_arguments)) == program.outcome(expected)
    streamed = sgl.function(program.async_function).run(**with_arguments, stream=True)
    assert program.outcome(streamed) == program.outcome(expected)
