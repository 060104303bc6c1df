"""Tracing: a program as a graph, recorded by calling its function with stand-ins.

`trace.py` is the way in. `standin.py` has the values that only a run knows, `recording.py` records
what the function appends, `guard.py` stops it before it has an effect elsewhere. `graph.py` is what
comes out, and `graph_run.py` runs it.
"""
