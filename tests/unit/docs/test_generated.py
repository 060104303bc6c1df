"""The parts of pages that are written from declarations say what the declarations say."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from sgl_vllm.counters import Kind
from sgl_vllm.scheduler.stats import declared_counters
from tools import counters, options, source_tree, vllm_versions
from tools.clients import __main__ as clients
from tools.generated import GeneratedSection

SECTIONS = [one.SECTION for one in (clients, options, counters, source_tree, vllm_versions)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.command)
def test_a_part_is_up_to_date_and_leaves_the_text_around_it(section: GeneratedSection) -> None:
    page = section.page.read_text()
    assert section.written_into(page) == page, f"run `{section.command}`"
    outdated = re.sub(
        f"(?<={re.escape(section.begin)}\n).*?(?={re.escape(section.end)})",
        "outdated\n",
        page,
        flags=re.DOTALL,
    )
    assert outdated != page == section.written_into(outdated)


def test_every_package_says_what_it_is() -> None:
    silent = [package for package in source_tree.packages() if not source_tree.summary_of(package)]
    assert silent == []


def test_every_counter_has_a_unit_a_sentence_and_names_of_its_own() -> None:
    declared = list(declared_counters())
    for section, one in declared:
        if one.kind is not Kind.INFO:
            assert one.unit, (section, one.key)
            assert one.help[0].isupper() and one.help.endswith("."), one
    samples = Counter(
        (one.metric, one.labels, one.kind) for _, one in declared if one.metric is not None
    )
    keys = Counter((section, one.key) for section, one in declared)
    assert {*samples.values(), *keys.values()} == {1}
