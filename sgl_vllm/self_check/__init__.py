"""Test requests on the user's device, before the first real one: a faulty part is switched off.

plan.py          whether an engine is checked, and what is off if it cannot be
marker.py        the file that shows that a check killed the engine
canaries.py      the requests
language.py      the reference for formats, by listing their texts
driver.py        runs requests through the engine core's own steps
comparison.py    when two answers are the same (pure)
stages.py        what is compared of each part
engine_state.py  nothing of a check is seen outside it, or left behind
runner.py        all of it, in order
report.py        what was found (pure)
offline.py       `sgl-vllm verify`: the same on an engine that serves nothing
"""
