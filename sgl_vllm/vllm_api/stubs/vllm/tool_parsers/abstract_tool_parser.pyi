# [tools_and_format]
from enum import IntEnum
from typing import Any

class ToolStrictLevel(IntEnum):
    PARAMETER = ...

class ToolParser:
    def get_structural_tag(self, request: object, *, strict_level: ToolStrictLevel) -> Any: ...
