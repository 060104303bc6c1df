"""The table of metrics in docs/operations.md lists the counters that the parts declare."""

from __future__ import annotations

from collections import Counter

from sgl_vllm.counters import Kind
from sgl_vllm.scheduler.stats import declared_counters
from tools import counters


def test_the_table_is_up_to_date() -> None:
    page = counters.SECTION.page.read_text()
    assert page == counters.SECTION.written_into(page), "run `make counters`"


def test_writing_the_table_leaves_the_text_around_it() -> None:
    page = f"Before.\n\n{counters.SECTION.begin}\noutdated\n{counters.SECTION.end}\nAfter.\n"
    written = counters.SECTION.written_into(page)
    assert written.startswith("Before.\n\n") and written.endswith("\nAfter.\n")
    assert "| `prefix_hit_tokens` | counter | tokens |" in written and "outdated" not in written


def test_every_counter_has_a_unit_and_one_sentence_or_more() -> None:
    for section, declared in declared_counters():
        if declared.kind is not Kind.INFO:
            assert declared.unit, (section, declared.key)
            assert declared.help[0].isupper() and declared.help.endswith("."), declared


def test_two_counters_are_never_one_sample_of_a_metric() -> None:
    names = Counter(
        (declared.metric, declared.labels, declared.kind)
        for _, declared in declared_counters()
        if declared.metric is not None
    )
    assert set(names.values()) == {1}


def test_two_counters_never_have_one_key() -> None:
    keys = Counter((section, declared.key) for section, declared in declared_counters())
    assert set(keys.values()) == {1}
