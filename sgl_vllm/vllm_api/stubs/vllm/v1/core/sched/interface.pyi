# [jump_forward]
import enum

class PauseState(enum.IntEnum):
    PAUSED_ALL = ...
