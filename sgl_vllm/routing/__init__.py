"""Which of several workers a request goes to, so that its prefix is already cached there.

`PrefixRouter` (`router.py`) decides. It is pure: it uses neither Ray nor vLLM nor a network, and
adapters report to it.

    router.py            the choice, and the workers
    costs.py             what a choice costs; loads and routes, and requests in flight per worker
    prefix_hashes.py     hashes of a prompt's prefixes
    approx_index.py      what workers have cached, guessed from the requests sent to them
    kv_event_index.py    what workers have cached, as their KV events report it
    prompts.py           reads request bodies

    kv_events.py         adapter: subscribes to vLLM's KV events over ZMQ
    ranks.py             adapter: data-parallel ranks of one vLLM server
    placement.py, ray/   adapter: replicas on Ray Serve
"""
