# [preview]
from typing import Any, TypeVar

_Config = TypeVar("_Config")

def replace(dataclass_instance: _Config, /, **kwargs: Any) -> _Config: ...
