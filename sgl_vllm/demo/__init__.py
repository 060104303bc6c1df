"""What `sgl-vllm demo` runs: the program (`program.py`) and the model that ships with the project
(`model/`; see docs/demo-model.md). The command is `commands/demo.py`."""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
