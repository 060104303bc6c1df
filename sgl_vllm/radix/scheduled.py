"""What a step computes and the tree does not have yet, for requests that share it in the same step.

Owns which blocks these are, and whether a lookup needs them. Does not own how they enter the tree
(`pool.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Scheduled(NamedTuple):
    """The tokens `[begin, end)` of a request, in whole blocks, which a step computes.

    Attributes:
        blocks: of full attention, those before included.
    """

    record: RequestRecord
    blocks: list[KVCacheBlock]
    begin: int
    end: int


def is_continued(
    record: RequestRecord, num_tokens: int, scheduled: Mapping[str, Scheduled]
) -> bool:
    """Whether a step computes more of a request than its first `num_tokens`, which the tree has.
    O(scheduled), each a comparison at memory speed."""
    prefix, namespace = record.tokens[: TOKEN_BYTES * (num_tokens + 1)], record.namespace
    return any(
        end > num_tokens and one.tokens.startswith(prefix) and one.namespace == namespace
        for one, _, _, end in scheduled.values()
    )
