"""The index of segments, against dictionaries that record what every block holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from sgl_vllm.approximate.segment_index import Donor, SegmentIndex
from sgl_vllm.radix.eviction_policies import POLICIES
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.effort import examples
from tests.unit.radix.test_tree_against_model import NAMESPACES, SEQUENCES, TreeAgainstModel
from tests.unit.radix.trees import letters, put


class SegmentsAgainstModel(TreeAgainstModel):
    """The random life of a tree, in which blocks are used again, and segments of what is inserted
    are added to an index and found."""

    @initialize(
        block_size=st.integers(1, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        max_segments=st.sampled_from([3, 100]),
        data=st.data(),
    )
    def start(self, block_size, policy, max_segments, data):
        super().start(block_size, 0, policy, [], 0, True, data)
        self.index = SegmentIndex(self.tree, max_segments)
        self.max_segments = max_segments
        self.segments: list[tuple[str, list[int]]] = []
        self.fresh = self.fresh_or_unused(self.fresh)

    def fresh_or_unused(self, fresh):
        while True:
            unused = [b for b, n in self.holders.items() if not n and b not in self.tree]
            yield unused[0] if unused else next(fresh)

    @precondition(lambda self: self.inserted)
    @rule(data=st.data())
    def add(self, data):
        namespace, tokens = data.draw(st.sampled_from(self.inserted))
        edges = sorted(data.draw(st.sets(st.integers(0, len(tokens)), min_size=2, max_size=4)))
        segments = list(zip(edges[::2], edges[1::2], strict=False))
        self.index.add(namespace, pack(tokens), segments)
        self.segments += [(namespace, tokens[start:end]) for start, end in segments]
        assert len(self.index) <= self.max_segments
        num_cached = self.tree.match_prefix(namespace, pack(tokens)).num_tokens
        for start, end in segments[-1:]:
            if end <= num_cached:
                found = self.index.find(namespace, pack(tokens[start:end]))
                assert found is not None and found.num_tokens == end - start

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def what_is_found_holds_the_segment(self, data, namespace, tokens):
        if self.segments and data.draw(st.booleans()):
            namespace, tokens = data.draw(st.sampled_from(self.segments))
        self.check(namespace, tokens)

    def check(self, namespace, tokens):
        donor = self.index.find(namespace, pack(tokens))
        if donor is None:
            return
        assert (namespace, tokens) in self.segments
        assert 0 < donor.num_tokens <= len(tokens)
        first = donor.start // self.size
        assert len(donor.block_ids) == -(-(donor.start + donor.num_tokens) // self.size) - first
        for index, token in enumerate(tokens[: donor.num_tokens]):
            number, offset = divmod(donor.start + index, self.size)
            block = donor.block_ids[number - first]
            held = self.content[block]
            assert block in self.tree and (held.namespace, held.number) == (namespace, number)
            assert held.tokens[number * self.size + offset] == token

    def teardown(self):
        if hasattr(self, "index"):
            for namespace, tokens in self.segments:
                self.check(namespace, tokens)
        super().teardown()


TestSegmentsAgainstModel = SegmentsAgainstModel.TestCase
TestSegmentsAgainstModel.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)


def test_a_segment_survives_splits_and_loses_what_is_evicted() -> None:
    tree = RadixTree(4)
    put(tree, "headAAAAAAAAend", [1, 2, 3, 4])
    index = SegmentIndex(tree)
    index.add("", letters("headAAAAAAAAend"), [(4, 12)])
    put(tree, "headAAxx", [1, 5])
    assert index.find("", letters("AAAAAAAA")) == Donor(4, 8, (2, 3))
    tree.evict_block(3)
    assert index.find("", letters("AAAAAAAA")) == Donor(4, 4, (2,))
    tree.evict_block(2)
    assert index.find("", letters("AAAAAAAA")) == Donor(4, 2, (5,))  # of the other prompt
    tree.evict_block(5)
    assert index.find("", letters("AAAAAAAA")) is None and len(index) == 0
