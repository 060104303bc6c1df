"""The automata behind vLLM's structured-output interface.

backend        vLLM's backend interface: ours where a format can be compiled, else vLLM's own
grammar        vLLM's grammar interface: where one request is in an automaton
formats        the kinds of constraints, declared once
stock          vLLM's own backends, within limits
limits         time and concurrency of compilation
sandbox        compilation in processes that can be killed (`xgrammar_worker` and
               `guidance_worker` are their sides)
resources      what is built once per vocabulary
executor       where vLLM compiles
forced_tokens  the tokens that a live grammar forces
"""
