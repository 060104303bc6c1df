"""Which waiting requests must be matched again because the tree has changed.

Owns the places that are watched. Does not own matching: the tree says where something changed.
Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Hashable

from sgl_vllm.radix.node import Match, Namespace, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

Place = Node | Namespace
"""Where a match ends: its deepest node, or the namespace if nothing matched."""


class Watchers:
    """Watchers by the place where their match ends and the token that would continue it.

    Watching, changing and notifying cost O(1) each, and O(1) for each watcher notified. Watchers
    of other places, and those that continue with another token, cost nothing.

    Invariant: a watcher watches one place, or waits to be returned by `take_changed`, or neither.
    """

    def __init__(self) -> None:
        self._at_places: dict[Place, dict[Tokens, set[Hashable]]] = {}
        self._watched: dict[Hashable, tuple[Place, Tokens]] = {}
        self._changed: dict[Hashable, None] = {}

    def __len__(self) -> int:
        """How many watchers watch a place."""
        return len(self._watched)

    def watch(self, watcher: Hashable, namespace: Namespace, tokens: Tokens, match: Match) -> None:
        """Notify `watcher` once, when the match of `tokens` may differ from `match`, which must be
        current. After that, match and call `watch` again."""
        self.unwatch(watcher)
        place = match.node if match.node is not None else namespace
        position = match.num_tokens * TOKEN_BYTES
        next_token = tokens[position : position + TOKEN_BYTES]
        self._watched[watcher] = place, next_token
        self._at_places.setdefault(place, {}).setdefault(next_token, set()).add(watcher)

    def unwatch(self, watcher: Hashable) -> None:
        """Remove `watcher`. Does nothing if it watches no place."""
        self._changed.pop(watcher, None)
        watched = self._watched.pop(watcher, None)
        if watched is None:
            return
        place, next_token = watched
        at_place = self._at_places[place]
        at_place[next_token].discard(watcher)
        if not at_place[next_token]:
            del at_place[next_token]
            if not at_place:
                del self._at_places[place]

    def take_changed(self) -> list[Hashable]:
        """The watchers notified since the last call, which must match again. They watch no place
        now."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def notify(self, place: Place, next_token: Tokens | None = None) -> None:
        """Notify all watchers of `place`, or only those that continue with `next_token`."""
        at_place = self._at_places.get(place)
        if at_place is None:
            return
        tokens = list(at_place) if next_token is None else [next_token]
        for token in tokens:
            for watcher in at_place.pop(token, ()):
                del self._watched[watcher]
                self._changed[watcher] = None
        if not at_place:
            del self._at_places[place]

    def notify_all(self) -> None:
        for place in list(self._at_places):
            self.notify(place)

    def check_invariants(self) -> None:
        """Raise AssertionError if the two maps disagree. Walks everything: for tests."""
        found = {
            watcher: (place, token)
            for place, at_place in self._at_places.items()
            for token, watchers in at_place.items()
            for watcher in watchers
        }
        assert found == self._watched and not found.keys() & self._changed.keys()
        assert all(watchers for at in self._at_places.values() for watchers in at.values())
