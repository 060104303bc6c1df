"""The radix tree against a model that simply remembers what every block holds."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_vllm.radix.tree import Match, RadixTree


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_prefix_that_ends_inside_a_block_is_found_to_the_token():
    tree = RadixTree(block_size=4)
    tree.insert("a", tokens_of(1, 2, 3, 4, 5, 6), [10, 11])
    assert tree.match("a", tokens_of(1, 2, 3, 4, 5, 9)) == Match(5, [10, 11])
    assert tree.match("a", tokens_of(1, 2, 9)) == Match(2, [10])


def test_namespaces_share_nothing():
    tree = RadixTree(block_size=4)
    tree.insert("tenant a", tokens_of(1, 2, 3), [10])
    assert tree.match("tenant b", tokens_of(1, 2, 3)) == Match(0, [])


def test_sequences_that_part_inside_a_block_read_their_own_copies():
    tree = RadixTree(block_size=4)
    tree.insert("", tokens_of(1, 2, 3, 4, 5, 6), [10, 11])
    tree.insert("", tokens_of(1, 2, 3, 4, 5, 7, 8), [10, 12])
    assert tree.match("", tokens_of(1, 2, 3, 4, 5, 6)).block_ids == [10, 11]
    assert tree.match("", tokens_of(1, 2, 3, 4, 5, 7)).block_ids == [10, 12]
    assert tree.match("", tokens_of(1, 2, 3, 4, 5)).num_tokens == 5
    tree.check_invariants()


def test_a_longer_copy_of_a_tail_replaces_the_shorter_one():
    tree = RadixTree(block_size=4)
    tree.insert("", tokens_of(1, 2, 3, 4, 5), [10, 11])
    assert tree.insert("", tokens_of(1, 2, 3, 4, 5, 6), [10, 12]) == [11]
    assert tree.match("", tokens_of(1, 2, 3, 4, 5)) == Match(5, [10, 12])
    assert 11 not in tree


def test_a_request_that_grows_keeps_its_own_tail_block():
    tree = RadixTree(block_size=4)
    tree.insert("", tokens_of(1, 2, 3, 4, 5), [10, 11])
    assert tree.insert("", tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9), [10, 11, 12]) == []
    assert tree.match("", tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9)).block_ids == [10, 11, 12]


def test_dropping_a_block_forgets_what_continues_it_and_nothing_else():
    tree = RadixTree(block_size=2)
    tree.insert("", tokens_of(1, 2, 3, 4, 5), [10, 11, 12])
    tree.insert("", tokens_of(1, 2, 7), [10, 13])
    tree.drop_block(11)
    assert tree.match_length("", tokens_of(1, 2, 3, 4, 5)) == 2
    assert tree.match_length("", tokens_of(1, 2, 7)) == 3
    tree.check_invariants()


def test_a_part_that_only_a_dropped_block_held_is_gone():
    tree = RadixTree(block_size=4)
    tree.insert("", tokens_of(1, 2, 3), [10])
    tree.insert("", tokens_of(1, 2, 3, 5), [11])
    tree.drop_block(11)
    assert tree.match("", tokens_of(1, 2, 3)) == Match(0, [])
    assert tree.num_tokens == 0
    tree.check_invariants()


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        RadixTree(block_size=2).insert("", tokens_of(1, 2, 3), [10])


def test_the_description_holds_no_token_and_no_namespace():
    tree = RadixTree(block_size=2)
    tree.insert("secret salt", tokens_of(987654), [1])
    assert "987654" not in str(tree.describe())
    assert "secret" not in str(tree.describe())


def test_the_description_lists_parents_before_children():
    tree = RadixTree(block_size=2)
    tree.insert("a", tokens_of(1, 2, 3), [1, 2])
    tree.insert("a", tokens_of(1, 2, 4), [1, 3])
    tree.insert("b", tokens_of(1), [4])
    nodes = tree.describe()["nodes"]
    assert [node["parent"] for node in nodes] == [None, None, 0, 0]
    assert [node["namespace"] for node in nodes] == [0, 1, 0, 0]
    assert len(tree.describe(max_nodes=2)["nodes"]) == 2


class TreeAgainstModel(RuleBasedStateMachine):
    """Requests come, match, take fresh blocks for what is theirs, are inserted; blocks are reused.

    The model: what every block was filled with, and every sequence inserted since the last drop.
    """

    @initialize(block_size=st.integers(1, 5))
    def start(self, block_size):
        self.size = block_size
        self.tree = RadixTree(block_size)
        self.content: dict[int, tuple[int, ...]] = {}
        self.inserted: list[tuple[str, tuple[int, ...]]] = []
        self.next_block = 0
        self.live: list[tuple[str, list[int], list[int]]] = []

    sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14)

    @rule(namespace=st.sampled_from("xy"), sequence=sequences)
    def run_request(self, namespace, sequence):
        match = self.tree.match(namespace, tokens_of(*sequence))
        num_shared = match.num_tokens // self.size  # full blocks are read in place
        blocks = match.block_ids[:num_shared]
        while len(blocks) * self.size < len(sequence):
            begin = len(blocks) * self.size
            self.content[self.next_block] = tuple(sequence[begin : begin + self.size])
            blocks.append(self.next_block)
            self.next_block += 1
        self.tree.insert(namespace, tokens_of(*sequence), blocks)
        self.inserted.append((namespace, tuple(sequence)))
        self.live.append((namespace, sequence, blocks))
        assert self.tree.match_length(namespace, tokens_of(*sequence)) == len(sequence)

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def grow_request(self, data, more):
        """A request that was inserted while it ran decodes on into its own last block."""
        if not self.live:
            return
        namespace, sequence, blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        last = blocks[-1]
        if len(sequence) % self.size and len(self.content[last]) > len(sequence) % self.size:
            return  # another request wrote further into this block: it was not this one's own
        grown = [*sequence, *more]
        for number in range(len(sequence) // self.size, -(-len(grown) // self.size)):
            if number >= len(blocks):
                blocks = [*blocks, self.next_block]
                self.next_block += 1
            self.content[blocks[number]] = tuple(
                grown[number * self.size : (number + 1) * self.size]
            )
        self.tree.insert(namespace, tokens_of(*grown), blocks)
        self.inserted.append((namespace, tuple(grown)))

    @rule(data=st.data())
    def reuse_block(self, data):
        if not self.content:
            return
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.tree.drop_block(block)
        del self.content[block]
        self.inserted.clear()
        self.live = [entry for entry in self.live if block not in entry[2]]
        assert block not in self.tree

    @rule()
    def reset(self):
        self.tree.clear()
        self.content.clear()
        self.inserted.clear()
        self.live.clear()

    @rule(namespace=st.sampled_from("xy"), sequence=sequences)
    def every_hit_reads_the_right_tokens(self, namespace, sequence):
        version = self.tree.version
        match = self.tree.match(namespace, tokens_of(*sequence))
        assert match.num_tokens == self.tree.match_length(namespace, tokens_of(*sequence))
        assert len(match.block_ids) == -(-match.num_tokens // self.size)
        for number, block in enumerate(match.block_ids):
            want = sequence[number * self.size : min((number + 1) * self.size, match.num_tokens)]
            assert list(self.content[block][: len(want)]) == want
        for other_namespace, other in self.inserted:
            if other_namespace == namespace:
                shared = 0
                while shared < min(len(other), len(sequence)) and other[shared] == sequence[shared]:
                    shared += 1
                assert match.num_tokens >= shared
        assert self.tree.version == version

    @invariant()
    def consistent(self):
        if hasattr(self, "tree"):
            self.tree.check_invariants()


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
