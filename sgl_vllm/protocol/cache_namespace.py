"""The cache isolation key: which requests may share cached tokens.

Pure. The radix tree inside an engine and the routers in front of several engines use the same key.
"""

from __future__ import annotations

from typing import NamedTuple


class CacheNamespace(NamedTuple):
    """Two requests share cached tokens only if their namespaces are equal.

    Attributes:
        adapter: the LoRA adapter. Inside an engine its name and path; in a router, which does not
            know paths, its name.
        salt: the tenant's `cache_salt`.
        content: what the token ids do not show: a digest of the prompt's embeddings, or in a router
            the identifiers of its images.
    """

    adapter: str | tuple[str, str] | None = None
    salt: str | None = None
    content: bytes | None = None


SHARED = CacheNamespace()
"""The namespace of requests without an adapter, salt or other content."""
