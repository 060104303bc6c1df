"""docs/reference.md says what the code says."""

from __future__ import annotations

import inspect

import sgl_vllm as sgl
from tools import reference


def test_the_reference_is_up_to_date() -> None:
    written = reference.page_text()
    assert reference.PAGE.read_text() == written, "run `make reference`"
    assert " at 0x" not in written


def test_every_public_name_is_in_it_once() -> None:
    lines = reference.page_text().splitlines()
    for name in sgl.__all__:
        if not inspect.ismodule(getattr(sgl, name)):
            assert lines.count(f"### `{name}`") == 1, name


def test_every_public_function_and_class_says_what_it_is() -> None:
    silent = [
        name
        for name in sgl.__all__
        if callable(getattr(sgl, name)) and not reference.doc_text(getattr(sgl, name))
    ]
    assert silent == []


def test_a_parameter_is_shown_as_it_is_called() -> None:
    def example(a: int, /, b: str = "x", *, c: float = 1.0, **rest: object) -> bool:
        return bool(a)

    shown = reference.signature_text("example", example)
    wanted = "example(a: int, /, b: str = 'x', *, c: float = 1.0, **rest: object) -> bool"
    assert shown == wanted
