"""SGLang's ideas in an unforked vLLM. This module is the language: ``import sgl_vllm as sgl``.

Its names are those of `lang.public`, which is imported when one is first used. So neither vLLM's
processes nor commands pay for the language if they do not use it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sgl_vllm.version import __version__ as __version__

if TYPE_CHECKING:
    from sgl_vllm.lang.public import *  # noqa: F403
    from sgl_vllm.lang.public import NAMES as __all__  # noqa: F401


def __getattr__(name: str) -> object:
    """A name of the language, or a module of this package."""
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    try:
        name_there = "NAMES" if name == "__all__" else name
        value = getattr(import_module(f"{__name__}.lang.public"), name_there)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(f"{__name__}.lang.public").NAMES})
