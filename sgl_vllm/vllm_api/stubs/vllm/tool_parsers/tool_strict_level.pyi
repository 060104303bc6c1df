# [tools_and_format]
from enum import IntEnum

class ToolStrictLevel(IntEnum):
    PARAMETER = ...
