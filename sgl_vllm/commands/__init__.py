"""The `sgl-vllm` command: one module per subcommand, put together by `cli`.

    cli.py          the list of commands, and `main`
    arguments.py    arguments that several commands have
    client.py       asks a server's routes under /v1/sgl/
    terminal.py     text that is safe and short enough for a terminal

A subcommand's module has `DESCRIPTION`, its help, and `command`, a function whose parameters are
its arguments and which returns the exit status. It is imported when the subcommand is invoked.
"""
