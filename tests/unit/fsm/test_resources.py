"""What is read of a tokenizer once per vocabulary."""

from __future__ import annotations

import pytest
from xgrammar import TokenizerInfo, VocabType

from sgl_vllm.fsm.vllm import resources

WORDS = {
    VocabType.RAW: [b"plain", "é".encode(), b'"\\\n', b"\xff\x00", b"", "日本".encode()],
    VocabType.BYTE_FALLBACK: ["▁plain", "<0x1B>", "<0xFF>", "é", "日本", '"\\'],
    VocabType.BYTE_LEVEL: ["Ġplain", "Ã©", "Ċ", "ÿ", "æĹ¥", '"\\'],
}


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.name)
def test_a_vocabulary_is_what_xgrammar_decodes_and_read_in_one_call(
    kind: VocabType, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TokenizerInfo(WORDS[kind], kind)
    expected = list(info.decoded_vocab)
    monkeypatch.delattr(TokenizerInfo, "decoded_vocab")
    assert resources.decoded_vocabulary(info) == expected
    assert any(byte > 127 for text in expected for byte in text)
