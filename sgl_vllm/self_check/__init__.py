"""Test requests on the user's device, before the first real one: a faulty part is switched off.

plan.py          whether an engine is checked, and what is off if it cannot be
canaries.py      the requests
language.py      the reference for formats, by listing their texts (pure)
grammar.py       the same as vLLM's grammar interface
driver.py        runs requests through the engine core's own steps
comparison.py    when two answers are the same (pure)
stages.py        what is compared of each part
unseen.py        no connector stores the requests, and no KV event announces them
engine_state.py  removes all traces of the canaries
marker.py        the file that shows that a check killed the engine
report.py        what was found (pure)
runner.py        all of it, in order
offline.py       `sgl-vllm verify`: the same on an engine that serves nothing
"""
