"""The command `sgl-vllm`, a module per subcommand."""
