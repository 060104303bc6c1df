"""Retrieval for benchmarks: BM25, conversations, and the best orders by exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

from benchmarks.oracle_orders import most_continued, most_shared
from benchmarks.retrieval import Bm25, conversations, made_up

TEXTS = ["The fox and the hen.", "A fox, a fox, a fox!", "The hen sleeps.", "Nothing"]


def score(query: str, number: int) -> float:
    """Okapi BM25 from its definition."""
    texts = [[word.strip(".,!") for word in text.lower().split()] for text in TEXTS]
    mean = sum(map(len, texts)) / len(texts)
    total = 0.0
    for word in query.split():
        having = sum(word in text for text in texts)
        count = texts[number].count(word)
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        norm = 1.2 * (1 - 0.75 + 0.75 * len(texts[number]) / mean)
        total += idf * count * 2.2 / (count + norm)
    return total


def test_bm25_ranks_by_its_definition():
    index = Bm25(TEXTS)
    for query in ("fox", "the hen", "fox hen sleeps", "a nothing", "unknown"):
        ranked = sorted(range(len(TEXTS)), key=lambda number: -score(query, number))
        assert index.top(query, 4) == ranked, query
    assert index.top("FOX?", 1) == [1]


def test_made_up_questions_find_the_paragraphs_that_they_name():
    corpus = made_up(30, 50, 1.0, seed=1)
    index = Bm25(corpus.paragraphs)
    for question in corpus.questions:
        titles = [corpus.paragraphs[i].split(":")[0] for i in index.top(question, 2)]
        assert all(title in question for title in titles), question


def test_a_conversation_goes_on_with_what_it_has_most_in_common_with():
    found = [[1, 2], [7, 8], [2, 3], [8, 9], [3, 4]]
    assert conversations(found, 1) == [[0], [1], [2], [3], [4]]
    assert conversations(found, 3) == [[0, 2, 4], [1, 3]]


def test_the_best_orders_are_those_of_all_orders():
    rng = random.Random(2)
    weights = {segment: 1 + segment % 4 for segment in range(7)}
    for _ in range(30):
        sets = [rng.sample(range(7), 3) for _ in range(3)]
        best = 0
        for orders in itertools.product(*(itertools.permutations(one) for one in sets)):
            beginnings = {order[:n] for order in orders for n in (1, 2, 3)}
            of_trie = sum(weights[beginning[-1]] for beginning in beginnings)
            best = max(best, sum(weights[s] for one in sets for s in one) - of_trie)
        assert most_shared(sets, weights) == best


def test_the_best_continuation_is_a_beginning_of_an_earlier_order():
    weights = {1: 1, 2: 2, 3: 3}
    assert most_continued([3, 2, 1], [[1, 2, 9], [3, 8]], weights) == 3
    assert most_continued([3, 2, 1], [[2, 3], [3, 8]], weights) == 5
    assert most_continued([3, 2], [], weights) == 0
