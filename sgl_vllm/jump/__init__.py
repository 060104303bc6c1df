"""Jump-forward: forced tokens enter a request in one forward pass.

jump.py             appends forced tokens after each step
openings.py         forced text at the start: when it is sent, and what a KV connector sees
short_runs.py       forced runs that are decoded instead
full_graphs.py      full CUDA graphs for passes with jumps
forced_source.py    asks for forced tokens, and contains errors
refused.py          forced tokens that a request's sampling parameters would change
unique.py           forced tokens by a grammar's bitmask alone (jump_mode=exact)
forced_logprobs.py  log-probabilities of forced tokens
report.py           which part of an output was forced
part.py             when jump-forward is off, in an engine or for a request
"""
