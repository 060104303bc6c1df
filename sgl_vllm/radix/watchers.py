"""Which waiting requests must be matched again because the tree has changed.

Owns the watchers and the points that they watch. A *watcher* is any hashable; the scheduler passes
requests. Does not own matching: the tree says where something changed. Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Hashable

from sgl_vllm.radix.node import Match, Namespace, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

WatchPoint = Node | Namespace
"""Where a match ends: its deepest node, or the namespace if nothing matched."""


class Watchers:
    """Watchers by the point where their match ends and the token that would continue it.

    Watching, changing and notifying cost O(1) each, and O(1) for each watcher notified. Watchers
    of other points, and those that continue with another token, cost nothing.

    Invariant: a watcher watches one point, or waits to be returned by `take_changed`, or neither.
    """

    def __init__(self) -> None:
        self._at_points: dict[WatchPoint, dict[Tokens, set[Hashable]]] = {}
        self._watched: dict[Hashable, tuple[WatchPoint, Tokens]] = {}
        self._changed: dict[Hashable, None] = {}

    def __len__(self) -> int:
        """How many watchers watch a point."""
        return len(self._watched)

    def watch(self, watcher: Hashable, namespace: Namespace, tokens: Tokens, match: Match) -> None:
        """Notify `watcher` once, when the match of `tokens` may differ from `match`, which must be
        current. After that, match and call `watch` again."""
        self.unwatch(watcher)
        point = match.node if match.node is not None else namespace
        position = match.num_tokens * TOKEN_BYTES
        next_token = tokens[position : position + TOKEN_BYTES]
        self._watched[watcher] = point, next_token
        self._at_points.setdefault(point, {}).setdefault(next_token, set()).add(watcher)

    def unwatch(self, watcher: Hashable) -> None:
        """Remove `watcher`. Does nothing if it watches no point."""
        self._changed.pop(watcher, None)
        watched = self._watched.pop(watcher, None)
        if watched is None:
            return
        point, next_token = watched
        at_point = self._at_points[point]
        at_point[next_token].discard(watcher)
        if not at_point[next_token]:
            del at_point[next_token]
            if not at_point:
                del self._at_points[point]

    def take_changed(self) -> list[Hashable]:
        """The watchers notified since the last call, which must match again. They watch no point
        now."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def notify(self, point: WatchPoint, next_token: Tokens | None = None) -> None:
        """Notify all watchers of `point`, or only those that continue with `next_token`."""
        at_point = self._at_points.get(point)
        if at_point is None:
            return
        tokens = list(at_point) if next_token is None else [next_token]
        for token in tokens:
            for watcher in at_point.pop(token, ()):
                del self._watched[watcher]
                self._changed[watcher] = None
        if not at_point:
            del self._at_points[point]

    def notify_all(self) -> None:
        for point in list(self._at_points):
            self.notify(point)

    def check_invariants(self) -> None:
        """Raise AssertionError if the two maps disagree. Walks everything: for tests."""
        found = {
            watcher: (point, token)
            for point, at_point in self._at_points.items()
            for token, watchers in at_point.items()
            for watcher in watchers
        }
        assert found == self._watched and not found.keys() & self._changed.keys()
        assert all(watchers for at in self._at_points.values() for watchers in at.values())
