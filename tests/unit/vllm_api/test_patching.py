"""Objects and functions of other packages that change in place."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_vllm.vllm_api.patching import add_method, adopt, wrap


class Stock:
    base = 1

    def __init__(self) -> None:
        self.kept = "state"

    def method(self, number: int) -> int:
        return number + self.base

    @classmethod
    def of_class(cls, number: int) -> tuple[type, int]:
        return cls, number

    @staticmethod
    def static(number: int) -> int:
        return number

    async def later(self, number: int) -> int:
        return number


class Ours(Stock):
    def method(self, number: int) -> int:
        return -super().method(number)


@pytest.fixture
def fresh() -> type[Stock]:
    return type("Fresh", (Stock,), {name: vars(Stock)[name] for name in vars(Stock)})


def test_an_adopted_object_stays_the_same_object():
    stock = Stock()
    ours = adopt(stock, Ours)
    assert ours is stock and ours.kept == "state" and ours.method(1) == -2


def test_only_a_subclass_can_adopt():
    with pytest.raises(TypeError, match="does not derive"):
        adopt(Ours(), Stock)


def test_a_wrapper_of_a_method_gets_the_original_and_self(fresh: type[Stock]):
    @wrap(fresh, "method")
    def twice(original, self, number):
        assert isinstance(self, fresh)
        return 2 * original(self, number)

    assert fresh().method(1) == 4


def test_class_methods_and_static_methods_stay_what_they_are(fresh: type[Stock]):
    @wrap(fresh, "of_class")
    def with_class(original, cls, number):
        return (*original(cls, number), "wrapped")

    @wrap(fresh, "static")
    def plus_one(original, number):
        return original(number) + 1

    derived: Any = type("Derived", (fresh,), {})
    assert derived.of_class(1) == (derived, 1, "wrapped")
    assert fresh.static(1) == 2 and fresh().static(1) == 2


def test_a_live_object_is_changed_alone():
    one, other = Stock(), Stock()

    @wrap(one, "method")
    def tenfold(original, number):
        return 10 * original(number)

    assert one.method(1) == 20 and other.method(1) == 2


def test_what_is_not_there_cannot_be_wrapped():
    with pytest.raises(AttributeError):
        wrap(Stock, "missing")(lambda original: None)


def test_an_added_method_replaces_nothing(fresh: type[Stock]):
    with pytest.raises(AttributeError, match="already has method"):
        add_method(fresh, "method", lambda self: None)
