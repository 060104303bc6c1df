"""API speculative execution against stock vLLM: the same variables, fewer calls and tokens."""

from __future__ import annotations

import pytest

import sgl_vllm as sgl

COUNTRIES = ["Peru", "Italy", "Egypt", "Canada", "Brazil", "Spain"]


def text(s, country):
    s += f"{country} is a country in" + sgl.gen("continent", stop=".", max_tokens=8)
    s += ". Its capital is" + sgl.gen("capital", stop=[".", "!"], max_tokens=8)
    s += ". People there speak" + sgl.gen("language", stop=" and", max_tokens=8)
    s["found"] = [s["continent"], s["capital"], s["language"]]
    s += " and eat" + sgl.gen("dish", stop=".", max_tokens=8)
    s += ". Nobody knows" + sgl.gen("what_it_would_not_have_written", max_tokens=4)


def card(s, country):
    s += sgl.user(f"Fill in a card for the country {country} as JSON.")
    with s.assistant():
        s += '{"name": "' + sgl.gen("name", stop='"', max_tokens=12)
        s += '", "capital": "' + sgl.gen("capital", stop='"', max_tokens=12)
        s += '", "continent": "' + sgl.gen("continent", stop='"', max_tokens=12)
        s += '", "language": "' + sgl.gen("language", stop='"', max_tokens=12) + '"}'


def variables(state):
    return {name: state[name] for name in state._stream.variables}


def total(states):
    return sum((state.usage for state in states), sgl.Usage())


@pytest.mark.parametrize("function", [text, card])
def test_variables_are_the_same_and_calls_and_prompt_tokens_fewer(stock, function):
    items = [{"country": country} for country in COUNTRIES]
    plain = sgl.function(function).run_batch(items, temperature=0.0, backend=stock)
    without = total(plain)
    # A server that is behind sends several tokens at once. If an answer ends inside of them, it is
    # asked for again, and from then on the backend asks for nothing ahead. So the programs run one
    # at a time, and a backend to which that happens is replaced. Variables are the same with each.
    for _ in range(5):
        ahead = sgl.function(function, num_api_spec_tokens=40).run_batch(
            items, temperature=0.0, backend=sgl.VLLM(stock.url), num_threads=1
        )
        assert [variables(state) for state in ahead] == [variables(state) for state in plain]
        assert [state.text() for state in ahead] == [state.text() for state in plain]
        for before, after in zip(plain, ahead, strict=True):
            num_calls = after.usage.calls + after.usage.saved_calls
            assert before.usage.calls <= num_calls <= before.usage.calls + 1
        usage = total(ahead)
        print(f"\n{function.__name__}: calls {without.calls} -> {usage.calls}, ", end="")
        print(f"prompt tokens {without.prompt_tokens} -> {usage.prompt_tokens}, ", end="")
        print(f"completion tokens {without.completion_tokens} -> {usage.completion_tokens}")
        if usage.calls + usage.saved_calls == without.calls:
            break
    assert usage.calls <= without.calls / 1.5
    assert usage.prompt_tokens <= without.prompt_tokens / 1.5
    assert abs(usage.prompt_tokens + usage.saved_prompt_tokens - without.prompt_tokens) <= (
        3 * len(items)
    )
