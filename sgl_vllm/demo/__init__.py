"""What `sgl-vllm demo` runs: a program, and the model that ships with the project.

The command is `commands/demo.py`; docs/benchmarks.md describes the model.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"

TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""vLLM's flags for the notation in which the model calls tools."""
