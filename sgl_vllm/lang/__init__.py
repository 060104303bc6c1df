"""The language: programs that write prompts, and run against a server over HTTP.

Imports neither vLLM nor torch. From a program to the server, the modules are::

    program               @function, and trace, compile, reordered
    runnable, options     run, run_batch, and their async variants; their options
    api, ir, constraints  gen, select, ...: the expressions that a program appends
    state, group          the prompt `s`, its variables, and the branches of a fork
    batch, body, run      calling the function, once or for many items; what a run's streams share
    stream                the operations of one prompt, and its task
    operation_queue       what is queued, and what each operation waits for
    waiting               no tool waits for itself
    execution, generation what each operation does to the prompt, on the background loop
    transcript            what a prompt holds, as immutable values
    backends              servers and services
    tracing, graph_run    programs as graphs, and runs of graphs
    view, views           looking at a state
"""
