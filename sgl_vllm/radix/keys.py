"""A request's key in the tree: its namespace, and its tokens as the tree compares them.

Two requests share cached tokens only if both are equal. vLLM mixes the same things into its block
hashes (`kv_cache_utils.generate_block_hash_extra_keys`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.node import Namespace
from sgl_vllm.radix.tokens import Tokens, pack

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

MAX_CONTENTS = 100_000
"""At most this many images and other inputs have a number. The one that was used least recently
loses it, so its cached tokens no longer match."""

_INSIDE = -(2**30)
"""Position `i` inside an input has the key `_INSIDE - i`, far below all numbers of contents."""


def is_salted(namespace: Namespace) -> bool:
    """Whether a namespace is that of a tenant with a `cache_salt`."""
    return isinstance(namespace, CacheNamespace) and namespace.salt is not None


def namespace_of(request: Request) -> CacheNamespace | None:
    """The tree's namespace for `request`; None if it has to stay out of the tree.

    Streaming sessions (`resumable`) stay out, because they may take back computed tokens.
    """
    if request.resumable:
        return None
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora is not None else None
    embeddings = None
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds.detach().cpu().contiguous()
        digest = hashlib.sha256(rows.view(torch.uint8).numpy().tobytes())
        digest.update(bytes(request.prompt_is_token_ids or ()))
        embeddings = digest.digest()
    return CacheNamespace(adapter, request.cache_salt or None, embeddings)


class TokenKeys:
    """Packs a request's tokens so that, from the first on, equal keys mean equal inputs.

    At an image or another input that is no text, the first position gets a number for its content,
    and the others their index in it. All of these are negative:

        tokens      7  9  <image> <image> <image>  4
        keys        7  9    -12   I - 1   I - 2    4        I = -2**30; content number 12

    A number is never used twice, so two contents cannot collide.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._num_given = 0

    def pack(self, request: Request, start: int = 0) -> Tokens:
        """The keys of `request` from token `start` on, which is 0 or past the prompt."""
        token_ids = request._all_token_ids
        if start:
            return pack(token_ids[start:])
        if not request.mm_features:
            return pack(token_ids)
        keys = np.array(token_ids, dtype=np.int32)
        for feature in request.mm_features:
            self._write_content(feature, keys)
        return keys.tobytes()

    def _write_content(self, feature: MultiModalFeatureSpec, keys: NDArray[np.int32]) -> None:
        """Write the keys of one input into `keys`, shape (tokens,)."""
        begin, length = feature.mm_position.offset, feature.mm_position.length
        # The first position may be no embedding but a token, which the number replaces.
        # A client may choose the identifier, of any length.
        digest = hashlib.sha256(feature.identifier.encode(errors="surrogatepass")).digest()
        number = self._number_of((digest, int(keys[begin])))
        is_embed = feature.mm_position.is_embed
        indices = np.arange(length) if is_embed is None else np.flatnonzero(is_embed.numpy())
        keys[begin + indices] = _INSIDE - indices
        keys[begin] = number

    def _number_of(self, content: tuple[bytes, int]) -> int:
        number = self._numbers.get(content)
        if number is None:
            self._num_given += 1
            number = self._numbers[content] = -self._num_given
            if len(self._numbers) > MAX_CONTENTS:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(content)
        return number
