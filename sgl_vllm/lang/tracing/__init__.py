"""Tracing: a program as a graph, found by evaluating its source instead of calling it.

`trace.py` is the way in. `source.py` finds the source, `evaluation.py`, `expressions.py` and
`calls.py` follow it over known and deferred values, `prompts.py` and `branches.py` record the
operations on prompts.
"""
