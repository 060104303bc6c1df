"""What is told of the misses of a request, over a real tree without a manager."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sgl_vllm.counters import declarations
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.misses import CAUSES, MAX_REQUESTS, MissCounters, Misses, not_read
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree

SIZE = 4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
SECRET = [20 + place for place in range(15)]
ADAPTER = ("french", "/french")


class Cache:
    """Reads all that it may of each prompt, and caches it as a whole."""

    def __init__(self, *, is_exact: bool = True, shows_text: bool = False) -> None:
        self.tree = RadixTree(SIZE, max_evicted_bytes=1 << 20)
        self.misses = Misses(SIZE, is_exact=is_exact, shows_text=shows_text)
        self._blocks = itertools.count()
        self.names = map(str, itertools.count())

    def serve(
        self,
        prompt: list[int],
        salt: str | None = None,
        adapter: tuple[str, str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The explanation, without the name and the age of the request."""
        tree, length = self.tree, len(prompt)
        namespace, tokens = CacheNamespace(adapter, salt), pack(prompt)
        match = tree.match_prefix(namespace, tokens)
        num_read = min(match.num_tokens, length - 1)
        ends = ((match.num_tokens, "last_token"),) if num_read < match.num_tokens else ()
        missed = not_read(num_read, ends)
        self.misses.looked_up(missed, tree, namespace, tokens, match, length)
        name = name or next(self.names)
        self.misses.admitted(name, salt, length, num_read, 0)
        blocks = tree.block_ids(match, num_read)[: num_read // SIZE]
        blocks += [next(self._blocks) for _ in range(-(-length // SIZE) - len(blocks))]
        tree.insert(namespace, tokens, blocks)
        tree.unlock(blocks)
        *_, answer = self.misses.explain(name, salt, now=0.0)
        del answer["request"], answer["age_s"]
        return answer


def causes(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(one["cause"], one["start"], one["end"]) for one in answer["causes"]]


def test_every_cause_has_a_counter():
    labels = {declared.key: declared.labels for declared in declarations(MissCounters)}
    assert labels.pop("missed_prompt_tokens") == ()
    assert labels == {cause: (("cause", cause),) for cause in CAUSES}


def test_the_texts_where_a_prompt_differs_are_there_only_if_they_may_be_shown():
    for shows_text, salt in ((True, None), (True, "s"), (False, None)):
        cache = Cache(shows_text=shows_text)
        cache.serve(PROMPT, salt)
        answer = cache.serve([*PROMPT[:7], 1, 2], salt)
        assert causes(answer) == [("differs", 7, 9)]
        sides = [answer.get("prompt"), answer.get("cached")]
        shown = [{"tokens": [1, 2]}, {"tokens": [12, 13, 14]}]
        assert sides == (shown if shows_text and not salt else [None, None])


def test_the_last_requests_are_remembered():
    cache = Cache()
    for _ in range(MAX_REQUESTS + 1):
        cache.serve(PROMPT)
    assert cache.misses.explain("0", None, now=0.0) == []
    assert cache.misses.of_request("0") is None
    assert cache.misses.of_request("1") == cache.serve(PROMPT)


# -- what a client can learn of others -------------------------------------------------------------


def with_secret(*, is_evicted: bool = False, salt: str | None = None) -> Cache:
    """A cache that tells whole blocks only, and has a secret, or had it."""
    cache = Cache(is_exact=False)
    cache.serve(SECRET, salt)
    if is_evicted:
        cache.tree.evict(100)
        assert cache.tree.num_tokens == 0
    return cache


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("num_known", range(1, 15))
def test_no_guess_of_a_token_in_a_block_is_told_apart(num_known, is_evicted):
    """As in `cached_tokens`: only a whole block is told of, and only while it is cached."""
    for tail in ([], [1], [1, 2, 3, 4, 5]):
        right, wrong = (
            with_secret(is_evicted=is_evicted).serve([*SECRET[:num_known], token, *tail])
            for token in (SECRET[num_known], 9)
        )
        if (num_known + 1) % SIZE or is_evicted:
            assert right == wrong
        elif tail:
            assert right["num_cached_tokens"] == wrong["num_cached_tokens"] + SIZE


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("asking", [None, "mine"])
def test_nothing_is_told_of_what_another_salt_has_cached(asking, adapter, is_evicted):
    guess = [*SECRET, 1]
    beside_secret = with_secret(is_evicted=is_evicted, salt="theirs")
    alone = Cache(is_exact=False)
    assert beside_secret.serve(guess, asking, adapter) == alone.serve(guess, asking, adapter)


def test_a_request_of_another_salt_cannot_be_asked_for():
    cache = Cache()
    cache.serve(PROMPT, "theirs", name="7")
    assert [len(cache.misses.explain("7", salt, 0.0)) for salt in (None, "mine", "theirs")] == [
        0,
        0,
        1,
    ]
