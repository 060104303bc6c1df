"""The prefix cache: a radix tree over KV blocks (pure), inside vLLM's pool and cache manager.

How a request finds its hit:

    `manager.py`    vLLM asks `RadixKVCacheManager.get_computed_blocks`, which says how many tokens
                    the request may read at most, and asks `Lookup.find`
    `lookup.py`     gets the request's packed tokens (`request_record.py`, `keys.py`) and its match.
                    The pool (`pool.py`) first puts what this step has scheduled into the tree, so
                    that it can be shared
    `tree.py`       `match_prefix` goes down from the root of the request's namespace (`descend` in
                    `node.py`) to the longest cached prefix, a `Match`. `longest_hit` is the part of
                    it that can be read
    `components/`   each kind of KV-cache group cuts that: window groups at a missing block,
                    recurrent groups at their last state
    `HitPlan`       has the hit's blocks of every group. If it ends inside a block, `lookup.py`
                    decides whether that block is copied, the hit is cut, or the request waits
    vLLM            takes references to the blocks (`pool.touch` locks them in the tree), allocates
                    the rest, and copies the partial block before the forward pass

    `manager.py`    vLLM calls `record_prefix_cache_stats` when it admits the request: `record_hit`
                    in `lookup.py` then counts what is used, which splits a node used in part

And how it leaves one: whole blocks that a step is to compute enter the tree at the next lookup or
step (`pool.cache_full_blocks`), the rest of a prompt when it is computed, and other tokens when the
request ends (`retention.py` asks `pool.index`, which asks `PrefixTree.insert`). When too few blocks
are empty, the tree evicts some that no request holds (`pool.get_new_blocks`, `tree.evict`), in the
order of `eviction_order.py`.

Beside this way: `pins.py` (prefixes that stay), `checkpoints.py` (states for other requests),
`loads.py` (what a connector is still loading), `evicted_prefixes.py` and `misses.py` (why tokens
were missed), `watchers.py` (which waiting requests to match again), `snapshot.py` (what is shown),
and `part.py` (which models are served).
"""
