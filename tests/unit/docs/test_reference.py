"""docs/reference.md says what the code says."""

from __future__ import annotations

import sgl_vllm as sgl
from tools import reference


def test_the_reference_is_up_to_date() -> None:
    written = reference.page_text()
    assert reference.PAGE.read_text() == written, "run `make reference`"
    assert " at 0x" not in written


def test_every_public_function_and_class_says_what_it_is() -> None:
    silent = [
        name
        for name in sgl.__all__
        if callable(getattr(sgl, name)) and not reference.doc_text(getattr(sgl, name))
    ]
    assert silent == []
