"""`python -m benchmarks.ab`: the same programs on stock vLLM and the plugin, in alternating rounds.

__main__.py   the command: arguments, Ctrl-C
plan.py       what is to be compared
variants.py   stock vLLM, the plugin, and the plugin without one thing
rounds.py     whose turn it is, and what is done in a turn
servers.py    one arm's server: its flags, its empty cache; those that stay up
client.py     programs run against one server, timed
result.py     figures, medians, ratios, JSON; pure
table.py      the table
workloads/    what is asked: one small module each
"""
