"""What `sgl-vllm demo` runs: a program, and the model that ships with the project.

The command is `commands/demo.py`; docs/benchmarks.md describes the model.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
