"""The trie of a vocabulary, compared with one of dicts, and walks over it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.regex import full_match
from sgl_vllm.fsm.vocabulary import MAX_SIZE, Vocabulary, walk
from tests.effort import examples
from tests.unit.fsm.texts import bits_of

pieces = st.lists(
    st.binary(max_size=4) | st.text("ab", max_size=5).map(str.encode) | st.just(b""), max_size=30
)


def dict_trie(token_bytes) -> dict:
    """Node -> (children by byte, ids that end there), each node named by its bytes."""
    nodes: dict[bytes, set[int]] = {b"": set()}
    for token, piece in enumerate(token_bytes):
        for size in range(1, len(piece) + 1):
            nodes.setdefault(piece[:size], set())
        if piece:
            nodes[piece].add(token)
    return nodes


@settings(max_examples=examples(30), deadline=None)
@given(pieces)
def test_a_trie_holds_every_beginning_once_in_depth_first_order(token_bytes):
    v = Vocabulary(token_bytes, len(token_bytes) + 3)
    expected = dict_trie(token_bytes)
    spelled: list[bytes] = [b""]
    for node in range(1, len(v.byte)):
        parent = spelled[node - 1][: v.depth[node] - 1]
        spelled.append(parent + bytes([v.byte[node]]))
    assert spelled == sorted(expected)
    for node, name in enumerate(spelled):
        below = [i for i, other in enumerate(spelled) if other.startswith(name)]
        assert below == list(range(node, v.end[node]))
        assert v.depth[node] == len(name)
        ids = v.tokens[v.first_token[node] : v.first_token[node + 1]]
        assert sorted(ids) == sorted(expected[name])


@settings(max_examples=examples(30), deadline=None)
@given(pieces, st.data())
def test_steps_of_sets_are_steps_of_all_their_nodes(token_bytes, data):
    v = Vocabulary(token_bytes, len(token_bytes))
    expected = dict_trie(token_bytes)
    names, here = {b""}, v.root
    while True:
        children = {name for name in expected if name[:-1] in names and name}
        assert here.first == sum({1 << name[-1] for name in children})
        assert sorted(here.ids) == sorted(set().union(*[expected[name] for name in names]))
        if not children:
            return
        byte = data.draw(st.sampled_from(list(bits_of(here.first))))
        if data.draw(st.booleans()):
            names, here = {name for name in children if name[-1] == byte}, here.step(byte)
        else:  # all the nodes of one depth at once
            nodes = [node for node in range(len(v.byte)) if v.depth[node] == len(min(children))]
            names = {name for name in expected if len(name) == len(min(children))}
            here = v.trie_set(np.array(nodes, np.int32))


@settings(max_examples=examples(60), deadline=None)
@given(pieces, st.sampled_from(["a*b", "(?:ab|b)+", ".*", "[^a]{1,2}", "a{0,3}b?"]), st.data())
def test_a_walk_from_any_nodes_finds_what_walks_from_each_of_them_find(token_bytes, pattern, data):
    """Also where some of the nodes are below others."""
    v = Vocabulary(token_bytes, len(token_bytes) + 40)
    names = sorted(dict_trie(token_bytes))  # node i spells names[i]
    chosen = data.draw(st.sets(st.sampled_from(range(len(names))), min_size=1))
    dfa = full_match(pattern)
    words, ids, leaving, _ = walk(
        v.trie_set(np.array(sorted(chosen), np.int32)),
        *(dfa.by_class, dfa.classes, dfa.accepting, dfa.start, 10**6),
    )
    reached: dict[int, set[int]] = {}
    for node, name in enumerate(names):
        for above in (names[i] for i in chosen):
            if name.startswith(above) and name != above:
                reached.setdefault(node, set()).add(state_after(dfa, name[len(above) :]))
    legal = {names[node] for node, states in reached.items() if states - {-1}}
    assert words is None
    assert sorted(ids) == [i for i, piece in enumerate(token_bytes) if piece in legal]
    assert leaving.tolist() == [
        node
        for node, states in sorted(reached.items())
        if any(dfa.accepting[state] for state in states - {-1})
        and any(other.startswith(names[node]) and other != names[node] for other in names)
    ]


def state_after(dfa, data: bytes) -> int:
    state = dfa.start
    for byte in data:
        state = int(dfa.row(state)[byte])
        if state < 0:
            break
    return state


def test_vocabularies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError):
        Vocabulary([b"a"], MAX_SIZE + 1)
    with pytest.raises(ValueError):
        Vocabulary([b"a", b"b"], 1)
