"""The inside of tracing: evaluating a program's source without executing it.

`source` finds it, `evaluation` and `expressions` walk it over values that are known or `deferred`,
`purity` says what may be called. What comes out is a graph: `trace.py` and `graph.py` beside.
"""
