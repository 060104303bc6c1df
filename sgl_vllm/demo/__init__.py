"""The demo: the model that ships with the project, and a program run on stock and on the plugin."""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
