"""The language: programs that write prompts, run against a server over HTTP.

Imports neither vLLM nor torch. Expressions are in `ir`, programs in `program`, their execution in
`interpreter`, select's arithmetic in `choices`, servers in `backends`.
"""
