"""What the radix tree finds, protects and gives up."""

import sys

import pytest

from sgl_vllm.radix.eviction import POLICIES
from sgl_vllm.radix.tree import RadixTree, pack, unpack


def found(tree: RadixTree, namespace, *tokens: int) -> tuple[int, list[int]]:
    """How many of the tokens are cached, and in which blocks."""
    match = tree.match(namespace, pack(tokens))
    return match.num_tokens, tree.block_ids(match, match.num_tokens)


def put(tree: RadixTree, tokens: str, blocks: list[int], namespace="", **more):
    """Insert one token per letter and let go of the blocks."""
    inserted = tree.insert(namespace, pack([ord(c) for c in tokens]), blocks, **more)
    tree.unlock(blocks)
    return inserted


def holds(tree: RadixTree, tokens: str) -> int:
    return tree.match("", pack([ord(c) for c in tokens])).num_tokens


def hit(tree: RadixTree, tokens: str, **more) -> None:
    tree.hit(tree.match("", pack([ord(c) for c in tokens])), **more)


class Clock:
    """Seconds that pass when a test says so, and a little with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def test_packing_keeps_tokens_below_zero_too():
    assert unpack(pack([0, 1, -1, 2**31 - 1, -(2**31)])) == [0, 1, -1, 2**31 - 1, -(2**31)]


class TestLookUp:
    def test_a_prefix_that_ends_inside_a_block_is_found_to_the_token(self):
        tree = RadixTree(block_size=4)
        tree.insert("a", pack([1, 2, 3, 4, 5, 6]), [10, 11])
        assert found(tree, "a", 1, 2, 3, 4, 5, 9) == (5, [10, 11])
        assert found(tree, "a", 1, 2, 9) == (2, [10])

    def test_namespaces_share_nothing(self):
        tree = RadixTree(block_size=4)
        tree.insert("tenant a", pack([1, 2, 3]), [10])
        assert found(tree, "tenant b", 1, 2, 3) == (0, [])

    def test_a_look_up_does_the_same_work_whatever_other_tenants_have_cached(self):
        def work(tree: RadixTree) -> int:
            calls = 0

            def count(frame, event, arg):
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                tree.match("me", pack(range(100)))
            finally:
                sys.setprofile(None)
            return calls

        alone, crowded = RadixTree(block_size=4), RadixTree(block_size=4)
        for tree in (alone, crowded):
            tree.insert("me", pack([*range(50), 7]), list(range(13)))
        for number in range(30):
            blocks = list(range(100 + 50 * number, 125 + 50 * number))
            crowded.insert(f"tenant {number}", pack(range(100 - number)), blocks)
        assert work(crowded) == work(alone) > 0

    def test_tokens_that_share_bytes_but_not_values_are_not_mixed_up(self):
        tree = RadixTree(block_size=4)
        tree.insert("", pack([0x01020304, 0x05060708]), [10])
        assert found(tree, "", 0x01020304, 0x05060709) == (1, [10])
        assert found(tree, "", 0x02030405) == (0, [])

    def test_sequences_that_part_inside_a_block_read_their_own_copies(self):
        tree = RadixTree(block_size=4)
        tree.insert("", pack([1, 2, 3, 4, 5, 6]), [10, 11])
        tree.insert("", pack([1, 2, 3, 4, 5, 7, 8]), [10, 12])
        assert found(tree, "", 1, 2, 3, 4, 5, 6) == (6, [10, 11])
        assert found(tree, "", 1, 2, 3, 4, 5, 7) == (6, [10, 12])
        assert found(tree, "", 1, 2, 3, 4, 5)[0] == 5
        tree.check_invariants()

    def test_looking_changes_nothing(self):
        tree = RadixTree(block_size=4)
        tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11])
        before = tree.describe(), tree.version
        found(tree, "", 1, 2, 3)
        after = tree.describe(), tree.version
        assert after[1] == before[1] and after[0]["num_nodes"] == before[0]["num_nodes"]
        assert after[0]["nodes"][0]["hits"] == 0

    def test_a_hit_is_counted_where_it_was_and_not_beyond(self):
        """Of three chats under one system prompt, nobody has found the first one's end."""
        tree = RadixTree(block_size=4)
        put(tree, "system, first", [10, 11, 12, 13])
        hit(tree, "system, second")
        put(tree, "system, second", [10, 11, 22, 23])
        hit(tree, "system, third")
        shown = [(node["num_tokens"], node["hits"]) for node in tree.describe()["nodes"]]
        assert shown == [(8, 2), (5, 0), (6, 0)]
        tree.check_invariants()


class TestInsert:
    def test_a_second_copy_of_the_same_tokens_is_not_taken(self):
        tree = RadixTree(block_size=2)
        tree.insert("", pack([1, 2, 3, 4]), [10, 11])
        inserted = tree.insert("", pack([1, 2, 3, 4, 5]), [20, 21, 22])
        assert inserted.taken == [22]
        assert found(tree, "", 1, 2, 3, 4, 5) == (5, [10, 11, 22])

    def test_a_longer_copy_of_a_tail_replaces_the_shorter_one(self):
        tree = RadixTree(block_size=4)
        tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11])
        assert tree.insert("", pack([1, 2, 3, 4, 5, 6]), [10, 12]).forgotten == [11]
        assert found(tree, "", 1, 2, 3, 4, 5) == (5, [10, 12])
        assert 11 not in tree

    def test_a_request_that_grows_keeps_its_own_tail_block_and_its_node(self):
        tree = RadixTree(block_size=4)
        first = tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11])
        second = tree.insert("", pack(range(1, 10)), [11, 12], own=first.own)
        assert (second.taken, second.forgotten) == ([12], [])
        assert found(tree, "", *range(1, 10)) == (9, [10, 11, 12])
        assert tree.num_nodes == 1

    def test_what_others_read_of_a_node_is_not_grown_by_them(self):
        """Only the maker of a leaf extends it; everybody else gets a node of their own."""
        tree = RadixTree(block_size=4)
        tree.insert("", pack([1, 2, 3, 4]), [10])
        assert tree.insert("", pack([1, 2, 3, 4]), [20]).own is None
        tree.insert("", pack([1, 2, 3, 4, 5]), [10, 21])
        assert tree.num_nodes == 2

    def test_too_few_blocks_are_refused(self):
        with pytest.raises(ValueError, match="do not fit"):
            RadixTree(block_size=2).insert("", pack([1, 2, 3]), [10])

    def test_a_block_cannot_be_in_two_places(self):
        tree = RadixTree(block_size=2)
        tree.insert("", pack([1, 2]), [10])
        with pytest.raises(ValueError, match="another place"):
            tree.insert("", pack([7, 8]), [10])
        tree.check_invariants()


class TestEviction:
    def test_what_is_in_use_stays(self):
        tree = RadixTree(block_size=2)
        tree.insert("", pack([1, 2, 3, 4]), [10, 11])
        assert (tree.num_protected_blocks, tree.num_evictable_blocks) == (2, 0)
        assert tree.evict(2) == []
        tree.unlock([11])
        assert tree.evict(2) == [11]
        assert found(tree, "", 1, 2, 3, 4) == (2, [10])

    def test_the_end_of_a_leaf_goes_first_and_no_more_than_asked_for(self):
        tree = RadixTree(block_size=2)
        put(tree, "abcdef", [10, 11, 12])
        assert tree.evict(1) == [12]
        assert holds(tree, "abcdef") == 4
        assert tree.num_evictable_blocks == 2

    def test_a_parent_goes_after_its_children(self):
        tree = RadixTree(block_size=2)
        put(tree, "abcd", [10, 11])
        put(tree, "abxy", [10, 12])
        hit(tree, "abcd")
        assert [tree.evict(1) for _ in range(4)] == [[12], [11], [10], []]
        assert tree.num_nodes == 0

    @pytest.mark.parametrize(
        ("policy", "order"),
        [
            ("lru", "bcda"),  # by last use
            ("lfu", "cdba"),  # c and d were never hit, b once, a twice
            ("slru", "cdba"),
            ("priority", "cdab"),  # b and a served somebody important
        ],
    )
    def test_policies_choose_the_leaf(self, policy, order):
        tree = RadixTree(block_size=1, policy=POLICIES[policy], clock=Clock())
        for block, name in enumerate("abcd"):
            put(tree, name, [block])
        hit(tree, "b", priority=-2)
        hit(tree, "a", priority=-1)
        tree.use(tree.match("", pack([ord("c")])).node)
        tree.use(tree.match("", pack([ord("d")])).node)
        hit(tree, "a")
        assert "".join("abcd"[tree.evict(1)[0]] for _ in range(4)) == order

    def test_what_waiting_requests_want_goes_last(self):
        tree = RadixTree(block_size=1)
        for block, name in enumerate("abc"):
            put(tree, name, [block])
        wanted = {tree.match("", pack([ord("a")])).node}
        assert tree.evict(1, wanted) == [1]
        assert tree.evict(2, wanted) == [2, 0]

    def test_a_block_above_one_in_use_can_be_had_as_the_last(self):
        """Two computed the same at once; the one whose copy was taken has gone."""
        tree = RadixTree(block_size=1)
        tree.insert("", pack([1, 2]), [10, 11])
        tree.insert("", pack([1, 2, 3]), [20, 21, 22])
        tree.unlock([10, 11])
        assert tree.num_evictable_blocks == 2
        forgotten = tree.evict(2)
        assert {10, 11} <= set(forgotten)
        assert 22 in forgotten, "what continues a forgotten block cannot be found any more"
        assert (tree.num_blocks, tree.num_protected_blocks) == (0, 0)

    def test_what_nobody_used_for_long_expires(self):
        clock = Clock()
        tree = RadixTree(block_size=1, policy=POLICIES["lfu"], clock=clock)
        for name in "abc":
            put(tree, name, [ord(name)])
        clock.now = 10
        hit(tree, "b")
        tree.lock([ord("c")])
        assert tree.expire(unused_since=5) == [ord("a")]
        tree.unlock([ord("c")])
        assert tree.expire(unused_since=5) == [ord("c")]
        assert (holds(tree, "a"), holds(tree, "b"), holds(tree, "c")) == (0, 1, 0)

    def test_dropping_a_block_forgets_what_continues_it_and_nothing_else(self):
        tree = RadixTree(block_size=2)
        tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11, 12])
        tree.insert("", pack([1, 2, 7]), [10, 13])
        assert sorted(tree.drop_block(11)) == [11, 12]
        assert found(tree, "", 1, 2, 3, 4, 5)[0] == 2
        assert found(tree, "", 1, 2, 7)[0] == 3
        tree.check_invariants()

    def test_a_part_that_only_a_dropped_block_held_is_gone(self):
        tree = RadixTree(block_size=4)
        tree.insert("", pack([1, 2, 3]), [10])
        tree.insert("", pack([1, 2, 3, 5]), [11])
        assert tree.drop_block(11) == [11]
        assert found(tree, "", 1, 2, 3) == (0, [])
        assert tree.num_tokens == 0
        tree.check_invariants()

    def test_the_queue_does_not_grow_with_use(self):
        tree = RadixTree(block_size=1)
        for block in range(10):
            put(tree, chr(97 + block), [block])
        for _ in range(1000):
            tree.lock([3])
            tree.unlock([3])
        for block in range(100, 3000):
            put(tree, "xy" + chr(block), [10, 11, block])
            tree.drop_block(block)
        assert len(tree._leaves._heap) < 200


class TestDescription:
    def test_it_holds_no_token_and_no_namespace(self):
        tree = RadixTree(block_size=2)
        tree.insert("secret salt", pack([987654]), [1])
        assert "987654" not in str(tree.describe())
        assert "secret" not in str(tree.describe())
        assert tree.describe(max_tokens=9)["nodes"][0]["tokens"] == [987654]

    def test_it_lists_parents_before_children(self):
        tree = RadixTree(block_size=2)
        tree.insert("a", pack([1, 2, 3]), [1, 2])
        tree.insert("a", pack([1, 2, 4]), [1, 3])
        tree.insert("b", pack([1]), [4])
        nodes = tree.describe()["nodes"]
        assert [node["parent"] for node in nodes] == [None, None, 0, 0]
        assert [node["namespace"] for node in nodes] == [0, 1, 0, 0]
        short = tree.describe(max_nodes=2)
        assert (len(short["nodes"]), short["nodes_left_out"]) == (2, 2)

    def test_an_isolated_namespace_is_one_total(self):
        tree = RadixTree(block_size=2)
        tree.insert("mine", pack([1, 2, 3]), [1, 2])
        tree.insert("theirs", pack([4]), [3])
        shown = tree.describe(is_isolated=lambda namespace: namespace == "theirs")
        assert len(shown["nodes"]) == 1
        assert shown["isolated"] == {
            "namespaces": 1,
            "num_tokens": 1,
            "num_nodes": 1,
            "num_blocks": 1,
        }

    def test_it_says_what_is_locked_pinned_and_wanted(self):
        tree = RadixTree(block_size=1)
        tree.insert("", pack([1, 2]), [1, 2])
        tree.unlock([2])
        wanted = {tree.match("", pack([1])).node}
        (node,) = tree.describe(pinned={2}, wanted=wanted)["nodes"]
        assert (node["num_locked_blocks"], node["num_pinned_blocks"]) == (1, 1)
        assert node["wanted"]
