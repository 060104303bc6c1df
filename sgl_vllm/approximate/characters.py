"""From intervals of characters to intervals of tokens, by the texts of the tokens.

Owns the mapping. Does not own the intervals (`protocol/segments.py`) nor the tokens' texts, which
structured output has read from the tokenizer. Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenTexts:
    """How many characters each token of a vocabulary writes.

    A character of several bytes may be written by several tokens. It counts for the one that has
    its first byte.

    Args:
        token_bytes: the UTF-8 bytes of each token. Building takes about 0.3 us for each.
        special: how the tokens without bytes are written in a prompt, such as ``<|im_start|>``.
            Others write nothing.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Mapping[int, str]) -> None:
        counts = [len(text) - sum(0x80 <= byte < 0xC0 for byte in text) for text in token_bytes]
        pairs = zip(token_bytes, counts, strict=True)
        continues = [bool(text) and not count for text, count in pairs]
        self._only_continues: NDArray[np.bool_] = np.array([*continues, False])
        no_bytes = [not text for text in token_bytes]
        self._writes_no_bytes: NDArray[np.bool_] = np.array([*no_bytes, True])
        for token, text in special.items():
            counts[token] = len(text)
        self._num_chars: NDArray[np.int64] = np.array([*counts, 0], dtype=np.int64)

    def token_intervals(
        self,
        token_ids: Sequence[int],
        char_intervals: Sequence[tuple[int, int]],
        num_chars: int | None = None,
    ) -> list[tuple[int, int]]:
        """The whole tokens inside each interval of characters of the text of `token_ids`.

        An interval without a whole token is left out. Linear in tokens, without a Python loop.

        Args:
            char_intervals: half-open, in ascending order.
            num_chars: of the text. If the tokens write more, the tokenizer has added the first of
                them; if they write less, it has cut the text at its start. If it is not known, a
                special token at the start counts as added.
        """
        ids = np.minimum(np.asarray(token_ids, dtype=np.int64), len(self._num_chars) - 1)
        ends = np.concatenate(([0], np.cumsum(self._num_chars[ids])))
        if num_chars is not None:
            ends -= int(ends[-1]) - num_chars
        elif len(ids) and self._writes_no_bytes[ids[0]]:
            ends -= ends[1]
        intervals = []
        for first_char, end_char in char_intervals:
            # The first token that begins at or after `first_char`, without those that write nothing
            # or the end of a character before it.
            start = int(np.searchsorted(ends, first_char, "left"))
            if start < len(ends):
                start = int(np.searchsorted(ends, ends[start], "right")) - 1
            end = int(np.searchsorted(ends, end_char, "left"))
            if end == len(ends) or ends[end] > end_char:
                end -= 1
            while end < len(ids) and self._only_continues[ids[end]]:
                end += 1  # the rest of the last character
            if start < end:
                intervals.append((start, end))
        return intervals
