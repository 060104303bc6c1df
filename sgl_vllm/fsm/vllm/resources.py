"""What is built once per vocabulary, and shared by all grammars.

Owns the reading of the tokenizer (by xgrammar, as in stock vLLM), the trie of its tokens, and the
tokenizer of forced text.

Since 0.33, vLLM has two vocabularies. In that of structural tags a special token is text, so that a
tag can begin with one; in the other one, no special token is ever legal. Before, there is only the
former.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import numpy as np
import torch
from tokenizers import Tokenizer
from vllm.config import VllmConfig
from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from xgrammar import GrammarCompiler, TokenizerInfo

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.expressions import Seq, literal
from sgl_vllm.fsm.forced_tokenizer import ForcedTokenizer
from sgl_vllm.fsm.json_string import COUNTED_STRING, RAW_STRING, STRING, JsonString
from sgl_vllm.fsm.masks import Bitmasks
from sgl_vllm.fsm.vocabulary import Vocabulary, Words

XGRAMMAR_CACHE_MB = 96
"""Compiled grammars that xgrammar keeps, unless VLLM_XGRAMMAR_CACHE_MB says otherwise. vLLM's
default is 512; here xgrammar compiles only what has no automaton."""

MAX_XGRAMMAR_THREADS = 8

_KNOWN_SERIALIZATIONS = frozenset({"v16"})
"""Versions of xgrammar's JSON whose strings hold a byte in each character."""


class TokenizerResources:
    """One tokenizer as the grammars need it. Construction takes about a second for 131,000 tokens.

    Args:
        compiler: xgrammar's, for this vocabulary.
        num_tokens: the model's vocabulary size, which may be larger than the tokenizer's.

    Attributes:
        token_bytes: the bytes of each token, empty for special ones.
        end_token: the token that ends a text by default.
    """

    def __init__(
        self, compiler: GrammarCompiler, tokenizer: TokenizerLike, num_tokens: int
    ) -> None:
        self.token_bytes, self.end_token = bytes_of_tokens(compiler)
        self.vocabulary = Vocabulary(self.token_bytes, max(num_tokens, len(self.token_bytes)))
        self.bitmasks = Bitmasks(self.vocabulary)
        strings = [JsonString.of(body) for body in (STRING, COUNTED_STRING, RAW_STRING)]
        strings += [JsonString.of(body, low=1) for body in (COUNTED_STRING, RAW_STRING)]
        for rest in strings:  # most formats have one of them
            self.bitmasks.of(Automaton(rest).start)
            self.bitmasks.of(Automaton(Seq(literal(b'"'), rest)).start)
        self.forced_tokenizer = ForcedTokenizer(_encoder(tokenizer), self.token_bytes)
        self._viewed: torch.Tensor | None = None
        self._view: Words = np.zeros((0, 0), np.uint32)

    def words(self, bitmask: torch.Tensor, index: int) -> Words:
        """One request's words of vLLM's bitmask, which is one tensor for the engine's lifetime."""
        if self._viewed is not bitmask:
            self._view = bitmask.numpy().view(np.uint32)
            assert self._view.shape[1] >= self.vocabulary.num_words, "loops write so many words"
            self._viewed = bitmask
        words: Words = self._view[index]
        return words


def _encoder(tokenizer: TokenizerLike) -> Callable[[str], list[int]]:
    """From text to tokens, without those that begin or end a text. Calls the Rust tokenizer behind
    one of transformers directly, in half the time, unless it cuts or pads what it is given."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer) and backend.truncation is backend.padding is None:
        return lambda text: backend.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def make_xgrammar(config: VllmConfig, tokenizer: TokenizerLike, vocab_size: int) -> XgrammarBackend:
    """vLLM's default backend, with smaller caches, and threads for at most half the cores."""
    xgrammar = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocab_size)
    stock = xgrammar.compiler
    xgrammar.compiler = _smaller_compiler(_info_of(stock))
    if hasattr(xgrammar, "full_vocab_compiler"):
        of_tags = xgrammar.full_vocab_compiler
        xgrammar.full_vocab_compiler = (
            xgrammar.compiler if of_tags is stock else _smaller_compiler(_info_of(of_tags))
        )
    return xgrammar


def compiler_of(
    xgrammar: XgrammarBackend, request_type: StructuredOutputOptions
) -> GrammarCompiler:
    """What compiles a kind of format. Each compiler has a vocabulary."""
    if request_type == StructuredOutputOptions.STRUCTURAL_TAG:
        return getattr(xgrammar, "full_vocab_compiler", xgrammar.compiler)
    return xgrammar.compiler


def tokenizer_info(xgrammar: XgrammarBackend) -> TokenizerInfo:
    """xgrammar's description of the vocabulary of all formats but structural tags."""
    return _info_of(xgrammar.compiler)


def _info_of(compiler: GrammarCompiler) -> TokenizerInfo:
    return compiler.compile_grammar('root ::= "a"').tokenizer_info


def _smaller_compiler(info: TokenizerInfo) -> GrammarCompiler:
    cache_mb = int(os.environ.get("VLLM_XGRAMMAR_CACHE_MB", XGRAMMAR_CACHE_MB))
    return GrammarCompiler(
        info,
        max_threads=max(1, min(MAX_XGRAMMAR_THREADS, (os.cpu_count() or 1) // 2)),
        cache_enabled=True,
        cache_limit_bytes=cache_mb << 20,
    )


def bytes_of_tokens(compiler: GrammarCompiler) -> tuple[list[bytes], int]:
    """The bytes of each token, empty for special ones, and the token that ends a text."""
    info = _info_of(compiler)
    token_bytes = decoded_vocabulary(info)
    for token in {*info.special_token_ids, *info.stop_token_ids}:
        token_bytes[token] = b""
    return token_bytes, int(info.stop_token_ids[0])


def decoded_vocabulary(info: TokenizerInfo) -> list[bytes]:
    """`info.decoded_vocab`, read in one call.

    The property itself makes several calls into xgrammar for each token, and each of them gives up
    the interpreter. Beside a busy engine loop, which keeps the interpreter for milliseconds at a
    time, a small vocabulary then takes minutes.
    """
    described = json.loads(info.serialize_json())
    if described["__VERSION__"] not in _KNOWN_SERIALIZATIONS:
        return list(info.decoded_vocab)
    return [text.encode("latin-1") for text in described["decoded_vocab"]]
