"""Test requests on the user's device, before the first real one: a faulty part is switched off.

plan.py       whether an engine is checked, and what is off if it cannot be
marker.py     the file that shows that a check killed the engine
canaries.py   the requests
language.py   the reference for formats, by listing their texts
driver.py     runs requests through the engine core's own steps, and leaves nothing of them
check.py      all of it, in order: what is compared of each part, and what is switched off
report.py     when two answers are the same, and what was found (pure)
offline.py    `sgl-vllm verify`: the same on an engine that serves nothing
"""
