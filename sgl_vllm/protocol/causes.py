"""Why prompt tokens were not read from the cache, in a few words each.

The engine tells the causes (`radix/misses.py`); commands and the language show them to people.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    "new": "never cached here",
    "differs": "the prompt differs from what is cached",
    "evicted": "evicted to make room",
    "expired": "expired (radix_ttl_s)",
    "flushed": "removed when the cache was emptied",
    "not_cached": "not cached",
    "whole_blocks": "cached; the hit was cut to whole blocks",
    "component": "cached; a window or a recurrent state is missing",
    "drafter": "cached; the drafter reads one token ahead",
    "scored": "cached; computed for scores",
    "last_token": "cached; the last token has to run",
    "skipped": "the request does not read the cache",
    "part_off": "the part radix is off",
}
