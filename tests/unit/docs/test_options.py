"""docs/options.md lists the options that sgl_vllm/config.py declares."""

from __future__ import annotations

from tools import options


def test_the_tables_are_up_to_date() -> None:
    page = options.SECTION.page.read_text()
    assert page == options.SECTION.written_into(page), "run `make options`"


def test_writing_the_tables_leaves_the_text_around_them() -> None:
    written = options.SECTION.written_into(
        f"Before.\n\n{options.SECTION.begin}\noutdated\n{options.SECTION.end}\nAfter.\n"
    )
    assert written.startswith("Before.\n\n") and written.endswith("\nAfter.\n")
    assert "| `radix_policy` | `lru` |" in written and "outdated" not in written
