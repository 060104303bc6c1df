"""`python -m benchmarks.ab`: the same programs on stock vLLM and on vLLM with the plugin, by turns.

__main__.py   the command: arguments, whose turn it is, Ctrl-C
servers.py    one arm's server: its flags, its empty cache
client.py     programs run against one server, timed
result.py     figures, medians, ratios, JSON and the table; pure
workloads/    what is asked: one small module each
"""
