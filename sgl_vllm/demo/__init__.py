"""`sgl-vllm demo`: one program, on stock vLLM and on vLLM with the plugin, side by side.

`program.py` is the program, `run.py` runs it on both and shows the result, `model/` is the model
that ships with the project (`docs/demo-model.md`).
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
