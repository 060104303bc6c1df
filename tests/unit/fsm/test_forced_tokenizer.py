"""Canonical tokenization of forced text, on byte-level BPEs trained here."""

import json
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sgl_vllm.fsm import forced_tokenizer
from sgl_vllm.fsm.forced_tokenizer import ForcedTokenizer

ANY_BYTE = (1 << 256) - 1
ALPHABETS = ('{}":, nameAgBobcfé0123\n', "01 ", "ab's\"", ' \n{"x', 'é東a "')
PATTERNS = {
    "GPT-4's": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "GPT-4o's": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]+[\p{Ll}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def bits(text: str) -> int:
    return sum(1 << byte for byte in set(text.encode()))


def trained(pattern: str | None = None, *, adds_space: bool = False, splits: bool = True):
    """A tokenizer whose texts are split by a pattern, as GPT-2 splits them, or not at all."""
    tokenizer = Tokenizer(models.BPE())
    of_bytes = pre_tokenizers.ByteLevel(
        add_prefix_space=adds_space, use_regex=splits and pattern is None
    )
    tokenizer.pre_tokenizer = of_bytes
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    corpus = [
        json.dumps({"name": n, "age": a, "café": True}) for n in ("Ann", "Bob") for a in (7, 31)
    ]
    noise = ["".join(rng.choices(letters, k=15)) for letters in ALPHABETS for _ in range(100)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 50 + noise, trainer)
    return tokenizer


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text).ids


def bytes_of_tokens(tokenizer: Tokenizer) -> list[bytes]:
    byte_of = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shift = 0
    for byte in range(256):
        if byte in printable:
            byte_of[chr(byte)] = byte
        else:
            byte_of[chr(256 + shift)] = byte
            shift += 1
    pieces = [str(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    return [b"" if piece.startswith("<|") else bytes(byte_of[c] for c in piece) for piece in pieces]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained()


@pytest.fixture(scope="module")
def forced(tokenizer) -> ForcedTokenizer:
    return ForcedTokenizer(encoder(tokenizer), bytes_of_tokens(tokenizer))


def test_a_run_is_tokenized_as_part_of_the_text_it_continues(tokenizer, forced):
    whole = tokenizer.encode('{"name": "Ann", "age": 31}').ids
    for cut in range(1, len(whole)):
        rest = tokenizer.decode(whole[cut:])
        assert [*forced.run(whole[:cut], rest).tokens] == whole[cut:]


def test_special_tokens_are_no_context(tokenizer, forced):
    end = tokenizer.token_to_id("<|end|>")
    assert [*forced.run([end], '{"name').tokens] == tokenizer.encode('{"name').ids


def test_what_may_change_once_more_text_follows_is_held_back(tokenizer, forced):
    run = forced.run([], '{"name": "')
    settled = run.settled(ANY_BYTE)
    assert len(settled) < len(run.tokens)
    assert tokenizer.decode(run.tokens[len(settled) :]).strip() == '"'


def test_a_token_that_no_legal_byte_can_lengthen_is_settled(forced):
    run = forced.run([], '{"name": "')
    assert run.settled(bits("\x00")) == run.tokens


def test_at_the_end_of_the_grammar_everything_is_settled(forced):
    run = forced.run([], '"}')
    assert run.settled(0) == run.tokens


def test_a_run_is_tokenized_once_whatever_word_is_before_it(tokenizer):
    asked: list[str] = []
    encode = encoder(tokenizer)

    def recorded(text: str) -> list[int]:
        asked.append(text)
        return encode(text)

    forced = ForcedTokenizer(recorded, bytes_of_tokens(tokenizer))
    del asked[:]
    runs = [
        forced.run(encode('{"name": "' + name), '", "age": 3').settled(bits("1}"))
        for name in ("Ann", "Bob", "Caff")
    ]
    num_asked = len(asked)
    assert runs[0] == runs[1] == runs[2] != ()
    forced.run(encode('{"name": "Zoe'), '", "age": 3').settled(bits("}1"))
    assert len(asked) == num_asked
    forced.run(encode('{"name": "Zoe'), '", "age": 4').settled(bits("}1"))
    assert len(asked) > num_asked


def test_remembered_runs_are_forgotten_before_they_take_much_memory(tokenizer, monkeypatch):
    monkeypatch.setattr(forced_tokenizer, "MAX_REMEMBERED_BYTES", 20_000)
    forced = ForcedTokenizer(encoder(tokenizer), bytes_of_tokens(tokenizer))
    for number in range(1_000):
        run = forced.run([], f'"age": {number}')
        assert [*run.tokens] == tokenizer.encode(f'"age": {number}').ids
        assert len(forced._runs) <= 20


KINDS = {
    "GPT-2's": trained(),
    **{name: trained(pattern) for name, pattern in PATTERNS.items()},
    "a space is added": trained(adds_space=True),
    "not split": trained(splits=False),
}
PIECES = {name: bytes_of_tokens(kind) for name, kind in KINDS.items()}
FORCED = {name: ForcedTokenizer(encoder(kind), PIECES[name]) for name, kind in KINDS.items()}
"""They remember the runs of all examples."""


@st.composite
def texts(draw: st.DrawFn, number: int) -> list[str]:
    alphabet = draw(st.sampled_from(ALPHABETS))
    return [draw(st.text(alphabet, max_size=15)) for _ in range(number)]


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=texts(5))
def test_a_run_is_spelled_as_after_the_whole_context(kind, drawn):
    *words, run = drawn
    encode, pieces = encoder(KINDS[kind]), PIECES[kind]
    context = [token for word in words for token in encode(word)]  # not canonical
    text = b"".join([pieces[token] for token in context[-16:]])
    before = text.decode(errors="replace").rpartition("\N{REPLACEMENT CHARACTER}")[2]
    spellings = [
        tokens[start:]
        for tokens in (encode(before + run), encode(run))
        for start in range(len(tokens) + 1)
        if b"".join([pieces[token] for token in tokens[start:]]) == run.encode()
    ]
    assert not run or [*FORCED[kind].run(context, run).tokens] == [*spellings, []][0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a space is added"])
@given(drawn=texts(2).filter(all))
def test_a_settled_token_is_canonical_whatever_follows(kind, drawn):
    """The promise behind the jump: what was appended is how the whole text would be tokenized."""
    run, more = drawn
    settled = FORCED[kind].run([], run).settled(1 << more.encode()[0])
    assert encoder(KINDS[kind])(run + more)[: len(settled)] == [*settled]


def merging(
    merges: list[tuple[str, str]], pattern: str = ""
) -> tuple[Callable[[str], list[int]], ForcedTokenizer]:
    """How a tokenizer with these merges, and no others, encodes, and what it spells."""
    single = sorted({*"".join(map("".join, merges)), *"abx'"})
    vocabulary = [*single, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(vocabulary)}, merges))
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern or ".+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    encode = encoder(tokenizer)
    return encode, ForcedTokenizer(encode, bytes_of_tokens(tokenizer))


@pytest.mark.parametrize(
    "merges",
    [["01", "10"], ["10", "01"], ["01", "10", "00"], ["10", "00", "01"], ["00", "01", "11", "10"]],
    ids="<".join,
)
def test_a_merge_that_changes_the_merges_before_it_is_foreseen(merges):
    """`01100` is `01|1|00`, and with a `1` after it `01|10|01`."""
    encode, forced = merging([(left, right) for left, right in merges])
    for length in range(1, 9):
        for number in range(1 << length):
            run = f"{number:0{length}b}"
            for more in ("0", "1"):
                settled = forced.run([], run).settled(bits(more))
                canonical = [
                    encode(run + more + end)[: len(settled)]
                    for end in ("", "0", "1", "00", "01", "10", "11")
                ]
                assert canonical == [[*settled]] * len(canonical), (run, more)


@pytest.mark.parametrize("more", [[], [("Ã©", "Ã")]], ids=["", "or at one"])
def test_a_token_that_begins_inside_a_character_is_foreseen(more):
    """Byte pairs: the second byte of `é` goes first to the `é` after it, then the first to `a`."""
    encode, forced = merging([("©", "Ã"), ("Ã", "©"), ("a", "Ã"), *more])
    run = forced.run([], "aé")
    assert len(run.tokens) == 2 and encode("aéé")[0] not in run.tokens
    assert run.settled(bits("é")) == ()
    assert run.settled(bits("a")) == run.tokens


def test_no_time_is_lost_on_the_end_of_a_long_run(forced):
    _, of_one_letter = merging([("a" * length, "a") for length in range(1, 100)])
    one_word = of_one_letter.run([], "a" * 4_000)
    words = forced.run([], '{"name": "Ann", "age": 3' * 200)
    began = time.thread_time()
    assert one_word.settled(bits("a")) == ()
    assert len(words.tokens) > len(words.settled(ANY_BYTE)) > len(words.tokens) - 8
    assert time.thread_time() - began < 0.05


def test_an_apostrophe_may_belong_to_the_word_before_it():
    encode, forced = merging([("s", "a")], PATTERNS["GPT-4o's"])
    before, run = encode("xb"), "'sab"
    assert [*forced.run(before, run).tokens] == encode("xb" + run)[2:] != encode(run)
