"""Automata are kept as long as they fit into the bounds, in number, states and bytes."""

from sgl_vllm.fsm import cache as cache_module
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.cache import AutomatonCache, RefusedFormats
from sgl_vllm.fsm.schema import compile_schema
from tests.unit.fsm.texts import after


def automaton() -> Automaton:
    return Automaton(compile_schema({"type": "array"}))


def kept(cache: AutomatonCache, names: str) -> str:
    return "".join(name for name in names if name in cache)


def test_the_least_recently_used_goes_first(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_GRAMMARS", 2)
    cache = AutomatonCache()
    cache.insert("a", automaton())
    cache.insert("b", automaton())
    assert cache.get("a") is not None and cache.get("z") is None
    cache.insert("c", automaton())
    assert kept(cache, "abc") == "ac"


def test_long_formats_make_room_for_each_other(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_CHARACTERS", 100)
    cache = AutomatonCache()
    for name, length in ("a", 50), ("b", 40), ("c", 30), ("a", 20):
        cache.insert(name, automaton(), num_characters=length)
    assert kept(cache, "abc") == "abc"
    cache.insert("d", automaton(), num_characters=1_000)
    assert kept(cache, "abcd") == "d"


def test_automata_that_grow_while_they_are_used_are_counted(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_BYTES", 60_000)
    cache = AutomatonCache()
    cache.insert("a", automaton())
    cache.insert("b", automaton())
    assert kept(cache, "ab") == "ab"
    grown = cache.get("b")
    assert grown is not None
    assert after(grown.start, 80 * "[") is not None
    assert grown.num_bytes > 60_000
    for _ in range(40):
        cache.get("b")
    assert kept(cache, "ab") == "b"


def test_refused_formats_are_forgotten_after_a_while_and_beyond_a_number(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cache_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cache_module, "MAX_REFUSED", 2)
    refused = RefusedFormats()
    for key in "aba":
        refused.add(key)
    refused.add("c")
    assert [key for key in "abc" if key in refused] == ["a", "c"]
    now[0] = cache_module.RETRY_AFTER_S - 1
    refused.add("c")
    now[0] = cache_module.RETRY_AFTER_S
    assert [key for key in "abc" if key in refused] == ["c"]
