"""Random lives of a cache: the tree against what every block holds (`lives.py`)."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import HOLE, holder_of, path_to
from sgl_vllm.radix.prompt_logprobs import Rows, joined, num_tokens_in
from sgl_vllm.radix.snapshot import take_snapshot
from sgl_vllm.radix.tokens import pack
from tests.effort import examples
from tests.unit.radix.lives import STATE, Content, LifeOfATree, Running

NAMESPACES = st.sampled_from("xy")


def logprobs_of(namespace, tokens, top_k):
    """A row for each token that depends on all tokens up to it."""
    rows = [
        [hash((namespace, *tokens[: end + 1], number)) % 2**20 for number in range(1 + top_k)]
        for end in range(len(tokens))
    ]
    return Rows(np.array(rows), np.array(rows, np.float32), np.arange(len(tokens)))


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class TreeAgainstModel(LifeOfATree):
    """Requests arrive, hold what they hit and go on from there in blocks of their own. What they
    compute and some of their states enter the tree before they give them back."""

    # -- what a cache does --------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES, first_chunk=st.integers(0, 30))
    def admit(self, data, namespace, tokens, first_chunk):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        limit = len(tokens)
        if data.draw(st.booleans(), "computes more than it must"):
            limit = data.draw(st.integers(0, len(tokens)))
        num_cached = self.tree.longest_hit(match, limit)
        hit = [self.tree.block_ids(match, num_cached), *self.tree.window_ids(match, num_cached)]
        state = self.tree.state_ids(match, num_cached)
        if num_cached:
            all_of_it = data.draw(st.booleans(), "counts as a hit of the whole match")
            used = self.tree.record_hit(match if all_of_it else holder_of(match, num_cached))
            self.tree.record_state_use(used, num_cached)
        request = Running(namespace, tokens[:num_cached], hit)
        if num_cached:
            request.states[num_cached] = state
        for size, ids in zip(self.sizes, hit, strict=True):
            if num_cached % size and ids[-1] != HOLE:  # a copy of the partial last block
                ids[-1] = self.copy(ids[-1], num_cached)
        if num_cached % self.size:  # and of the state
            request.states[num_cached] = [self.copy(block, num_cached) for block in state]
        self.hold(request.held())
        self.running.append(request)
        if data.draw(st.booleans(), "block by block"):
            self.compute_by_blocks(request, tokens)
        else:
            self.compute(request, tokens[: num_cached + first_chunk])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def compute_more(self, data, more):
        request = self.draw_running(data)
        tokens = [*request.tokens, *more]
        if data.draw(st.booleans(), "block by block"):
            self.compute_by_blocks(request, tokens)
            return
        if data.draw(st.booleans(), "gives back what it does not need for that"):
            self.leave_behind(request)
        self.compute(request, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert_running(self, data):
        """Less than before, perhaps, as of an aborted request, and not all states."""
        request = self.draw_running(data)
        length = len(request.tokens)
        if data.draw(st.booleans(), "not all tokens"):
            length = data.draw(st.integers(0, length))
        self.insert(request, length, self.draw_states(data, request, length))

    @precondition(lambda self: self.running and self.recurrent)
    @rule(data=st.data(), insert_before=st.booleans())
    def leave_checkpoint(self, data, insert_before):
        """A copy of its running state, which it holds only until the copy is made."""
        request = self.draw_running(data)
        position = len(request.tokens)
        if not position:
            return
        if insert_before:
            self.insert(request, position, {})
        copies = [self.copy(block, position) for block in request.states[position]]
        self.hold(copies)
        self.insert(request, position, {position: copies})
        self.tree.mark_state(copies[0], data.draw(st.sampled_from(Kind)))
        self.release(copies)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data):
        self.leave_behind(self.draw_running(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        request = self.draw_running(data)
        if keep:
            length = len(request.tokens)
            self.insert(request, length, self.draw_states(data, request, length))
        self.running.remove(request)
        for ids in request.blocks:
            self.release(reversed(ids))
        self.release_states(request, request.states)

    @rule(num_blocks=st.integers(1, 9), data=st.data())
    def evict(self, num_blocks, data):
        if not data.draw(st.booleans(), "in the same step as the last eviction"):
            self.wanted = set()
            if self.inserted and data.draw(st.booleans(), "some are wanted"):
                namespace, tokens = data.draw(st.sampled_from(self.inserted))
                node = self.tree.match_prefix(namespace, pack(tokens)).node
                self.wanted = set() if node is None else {node}
        num_evictable = self.tree.num_evictable_blocks
        assert num_evictable == sum(not self.holders[block] for block in self.blocks_in_tree())
        ahead = data.draw(st.integers(0, 2), "blocks ahead")
        paths, evicted = self.evicting(lambda: self.tree.evict(num_blocks, self.wanted, ahead))
        free = [block for block in evicted if not self.holders[block]]
        assert len(free) >= min(num_blocks, num_evictable)
        if not self.tree.components and len(evicted) == len(free):
            assert len(free) - min(num_blocks, num_evictable) in range(ahead + 1)
        if not self.has_full_attention:
            assert not any(self.holders[i] for i in evicted if self.content[i].group == 1)
        # A held block is evicted only because one before it, which no request holds, was.
        for blocks in paths:
            gone = [bool(self.holders[block]) for block in blocks if block in evicted]
            assert True not in gone or gone[0] is False

    @rule(age=st.integers(0, 40))
    def expire(self, age):
        _, evicted = self.evicting(lambda: self.tree.expire(self.now - age))
        first_group = int(not self.has_full_attention)
        of_first_group = [i for i in evicted if self.content[i].group == first_group]
        assert not any(self.holders[block] for block in of_first_group)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def evict_one(self, data):
        """Of a window group beside full attention, that is a hole and no more; of a recurrent one,
        its state; of full attention or else a window group, what continues it."""
        beside = sorted(b for b, held in self.content.items() if held.group and b in self.tree)
        of_full_attention = sorted(self.blocks_in_tree().difference(beside))
        blocks = data.draw(st.sampled_from([beside, of_full_attention])) or sorted(self.content)
        block = data.draw(st.sampled_from(blocks))
        before, gone = self.blocks_in_tree(), self.content[block]
        begin = 0  # without full attention, where what goes begins
        if not self.has_full_attention:
            begin = gone.number * self.sizes[gone.group] // self.size * self.size
        _, evicted = self.evicting(lambda: self.tree.evict_block(block), begin)
        assert block not in self.tree
        if block in before and gone.number == STATE:
            assert set(evicted) == self.state_in_tree(gone.namespace, gone.tokens, before)
        elif block in before and gone.group and self.has_full_attention:
            assert evicted == [block]
        elif block in before and gone.group:
            assert all(begin < len(self.content[other].tokens) for other in evicted)
        for other in map(self.content.__getitem__, evicted):
            if gone.group == 0 and other.number == STATE:
                assert len(other.tokens) > gone.number * self.size, "it was before the block"

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.tree.clear()
        self.inserted.clear()
        assert self.tree.num_blocks == self.tree.num_nodes == self.tree.num_tokens == 0

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES, top_k=st.integers(0, 2))
    def log_probabilities_are_those_of_the_same_prefix(self, data, namespace, tokens, top_k):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        found = self.tree.logprobs.find(match, top_k)
        want = logprobs_of(namespace, tokens, top_k)
        if found:
            got = joined(found)
            assert got.num_tokens <= match.num_tokens
            assert got.logprobs.tolist() == want.logprobs[: got.num_tokens].tolist()
        self.tree.logprobs.max_bytes = data.draw(st.sampled_from([300, 1 << 20]))
        num_known = data.draw(st.integers(num_tokens_in(found), len(tokens)))
        self.tree.logprobs.keep(match, want.part(0, num_known, top_k))
        # Rows of more tokens are not given up for others that have more likely ones.
        rows = [node.logprobs for node in path_to(match.node)]
        have_fewer = any(one is not None and one.top_k < top_k for one in rows)
        if self.tree.logprobs.max_bytes > 300 and not have_fewer:
            known = num_tokens_in(self.tree.logprobs.find(match, top_k))
            assert known >= min(num_known, match.num_tokens)

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def watch(self, data, namespace, tokens):
        """A new watcher, or one that watches something else already."""
        self.watch_from_now(
            data.draw(st.integers(0, 7)), *self.draw_continuation(data, namespace, tokens)
        )

    @rule(watcher=st.integers(0, 7))
    def unwatch(self, watcher):
        self.tree.watchers.unwatch(watcher)
        self.watching.pop(watcher, None)

    # -- what must hold -----------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, tokens=SEQUENCES)
    def a_hit_is_as_long_as_the_blocks_in_the_tree_allow(self, data, namespace, tokens):
        namespace, tokens = self.draw_continuation(data, namespace, tokens)
        match = self.tree.match_prefix(namespace, pack(tokens))
        limit = data.draw(st.integers(0, len(tokens)), "at most so many")
        num_tokens = self.tree.longest_hit(match, limit)
        assert num_tokens == self.longest_by_the_model(namespace, tokens, match.num_tokens, limit)
        lists = [self.tree.block_ids(match, num_tokens), *self.tree.window_ids(match, num_tokens)]
        if not self.has_full_attention:
            assert lists.pop(0) == [HOLE] * -(-num_tokens // self.size)
        for group, ids in enumerate(lists, int(not self.has_full_attention)):
            size = self.sizes[group]
            assert len(ids) == -(-num_tokens // size)
            num_skipped = self.num_skipped(group, num_tokens) // size
            assert ids[:num_skipped] == [HOLE] * num_skipped
            for number, block in enumerate(ids[num_skipped:], num_skipped):
                held = self.content[block]
                end = min((number + 1) * size, num_tokens)
                assert (held.namespace, held.group, held.number) == (namespace, group, number)
                assert held.tokens[:end] == tokens[:end]
        state = self.tree.state_ids(match, num_tokens)
        expected = [Content(namespace, i, STATE, tokens[:num_tokens]) for i in self.recurrent]
        assert [self.content[block] for block in state] == (expected if num_tokens else [])

    @precondition(lambda self: self.inserted)
    @rule()
    def a_snapshot_says_what_is_kept(self):
        sequences: list[list[int]] = []
        nodes = take_snapshot(self.tree, max_tokens=10_000)["nodes"]
        for node in nodes:
            before = [] if node["parent"] is None else sequences[node["parent"]]
            tokens = [*before, *node["tokens"]]
            sequences.append(tokens)
            if self.recurrent:
                held = self.held_of(list(self.tree.roots)[node["namespace"]], tokens)
                positions = sorted({-number for _, number in held if number < -len(before)})
                assert node["states"]["positions"] == [one - len(before) for one in positions]
        assert sum(node["num_blocks"] for node in nodes) == len(self.blocks_in_tree())

    @invariant()
    def the_tree_agrees_with_itself_and_with_the_requests(self):
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        in_tree = self.blocks_in_tree()
        assert self.tree.num_blocks == len(in_tree)
        assert self.tree.num_locked_blocks == sum(bool(self.holders[block]) for block in in_tree)

    @invariant()
    def what_was_inserted_last_can_be_read_as_far_as_the_model_says(self):
        for namespace, tokens in getattr(self, "inserted", [])[-1:]:
            match, hit = self.hit_of(namespace, tokens)
            expected = self.longest_by_the_model(namespace, tokens, match.num_tokens, len(tokens))
            assert hit == expected

    @invariant()
    def watchers_are_notified_when_a_hit_changes(self):
        """Beside windows, when it becomes as long as its match, or no longer is."""
        if not hasattr(self, "tree"):
            return
        changed = self.tree.watchers.take_changed()
        assert len(changed) == len(set(changed)) and self.watching.keys() >= set(changed)
        assert self.tree.watchers.take_changed() == []
        for watcher, (namespace, tokens, (match, hit)) in self.watching.items():
            if watcher not in changed:
                match_now, hit_now = self.hit_of(namespace, tokens)
                assert match_now == match
                assert (hit_now == match.num_tokens) == (hit == match.num_tokens)
                assert self.kinds or hit_now == hit
        for watcher in self.watching.keys() & changed:
            namespace, tokens, _ = self.watching[watcher]
            self.watch_from_now(watcher, namespace, tokens)
        assert len(self.tree.watchers) == len(self.watching)

    def teardown(self):
        if hasattr(self, "tree"):
            for watcher in self.watching:
                self.tree.watchers.unwatch(watcher)
            assert len(self.tree.watchers) == 0
            self.tree.watchers.check_invariants()


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None
)
