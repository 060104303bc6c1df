"""What `sgl-vllm doctor MODEL` foresees for models that are no more than a `config.json`.

Owns the process in which it is asked, one per device. Does not own the answers, nor which models
and flags are asked about.

    python -m tools.support.outlooks DEVICE FILE    # prints the answers to the questions in a file
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any  # Any: JSON

from pydantic import TypeAdapter

from sgl_vllm.preview.outlook import Outlook
from tools.generated import ROOT

CPU, GPU = "cpu", "gpu"
MODELS_FOLDER = "{models}"
"""In a flag, stands for the folder with the models."""

_MARK = "tools.support.outlooks "

Configs = Mapping[str, Mapping[str, Any]]
"""The `config.json` of each model, by its name."""


@dataclass(frozen=True)
class Answer:
    """What is foreseen, and how many parameters the layers had that vLLM built for it."""

    outlook: Outlook
    num_parameters: int


def write_models(models: Configs, folder: Path) -> None:
    """A folder for each model."""
    for name, config in models.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def ask(device: str, models: Configs, questions: Iterable[Sequence[str]]) -> list[Answer]:
    """The answer to each question.

    Args:
        device: `CPU` or `GPU`, which is the one that `sgl_vllm/preview/gpu.py` pretends to have.
        questions: a model's name, and flags of `vllm serve`.

    Raises:
        subprocess.CalledProcessError: there is no answer. What is printed says why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models"
        write_models(models, folder)
        asked = [
            [str(folder / name), *(flag.replace(MODELS_FOLDER, str(folder)) for flag in flags)]
            for name, *flags in questions
        ]
        (Path(scratch) / "asked.json").write_text(json.dumps(asked))
        hidden = ("VLLM_", "SGL_VLLM_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environment |= {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "SGL_VLLM_CACHE": scratch,
            "HF_HUB_OFFLINE": "1",
        }
        answer = subprocess.run(
            [sys.executable, "-m", "tools.support.outlooks", device, f"{scratch}/asked.json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    if answer.returncode:
        print(answer.stdout, answer.stderr, file=sys.stderr)
        answer.check_returncode()
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_MARK)]
    return [TypeAdapter(Answer).validate_json(line.removeprefix(_MARK)) for line in lines]


# -- in the process that answers -----------------------------------------------------------------


def _answer(device: str, asked: Path) -> None:
    if device == GPU:
        from sgl_vllm.preview import gpu

        gpu.pretend()
    from sgl_vllm.preview import layers
    from sgl_vllm.preview.engine import preview
    from sgl_vllm.vllm_api.patching import wrap

    num_parameters = 0

    @wrap(layers, "initialize_model")
    def count(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal num_parameters
        model = original(*arguments, **options)
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
        return model

    _inspect_here(asked.parent.rglob("config.json"))
    for model, *flags in json.loads(asked.read_text()):
        num_parameters = 0
        outlook = preview(model, flags, is_prediction=device == GPU)
        print(_MARK + json.dumps(asdict(Answer(outlook, num_parameters))))


def _inspect_here(configs: Iterable[Path]) -> None:
    """Load the classes of the models in this process. vLLM would start one for each class that it
    has not inspected on this machine, which takes about 7 s."""
    registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
    _allow_image_processors()
    for name in {one for path in configs for one in json.loads(path.read_text())["architectures"]}:
        if name in registry.models:  # if not, vLLM takes the class of Transformers
            registry.register_model(name, registry.models[name].load_model_cls())


def _allow_image_processors() -> None:
    """The module of Qwen3.5's text model imports an image processor, which needs torchvision. That
    is not installed here, and nothing of it is called."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        name = "torchvision"
        for part in ("", ".transforms", ".v2", ".functional"):
            name += part
            sys.modules[name] = module = types.ModuleType(name)
            module.__path__ = []  # a package
            vars(module)["__getattr__"] = lambda _: None


if __name__ == "__main__":
    _answer(sys.argv[1], Path(sys.argv[2]))
