"""Dictionaries of bounded size, least recently used first. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator
from typing import Generic, Protocol, TypeVar


class OfTenant(Protocol):
    """A key that says which tenant it belongs to. It is hashable."""

    @property
    def tenant(self) -> Hashable: ...


Key = TypeVar("Key", bound=OfTenant)
Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


def get_or_make(
    entries: OrderedDict[Name, Value], key: Name, make: Callable[[], Value], max_entries: int
) -> Value:
    """The entry of `key`, made if it is missing, and now the last one. If there are too many then,
    the first one is removed."""
    found = entries.get(key)
    if found is None:
        found = entries[key] = make()
        if len(entries) > max_entries:
            entries.popitem(last=False)
    entries.move_to_end(key)
    return found


class LruPerTenant(Generic[Key, Value]):
    """A dictionary of bounded size, in the order in which its entries were last put.

    When it is full, a new entry removes the first entry of the tenant with the most entries.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._num_of_tenant: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def items(self) -> ItemsView[Key, Value]:
        return self._entries.items()

    def get(self, key: Key) -> Value | None:
        return self._entries.get(key)

    def put(self, key: Key, value: Value) -> tuple[Key, Value] | None:
        """Returns the entry removed to make room, or None. O(entries) if one is removed."""
        if key not in self._entries:
            self._num_of_tenant[key.tenant] += 1
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) <= self._max_entries:
            return None
        num_of = self._num_of_tenant
        tenant = max(num_of, key=num_of.__getitem__)
        removed = next(key for key in self._entries if key.tenant == tenant)
        return removed, self.pop(removed)

    def pop(self, key: Key) -> Value:
        num_left = self._num_of_tenant[key.tenant] = self._num_of_tenant[key.tenant] - 1
        if not num_left:
            del self._num_of_tenant[key.tenant]
        return self._entries.pop(key)
