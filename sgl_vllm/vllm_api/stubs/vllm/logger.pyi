import logging
from collections.abc import Hashable

class _VllmLogger(logging.Logger):
    def info_once(self, msg: str, *args: Hashable) -> None: ...  # [prefix_attention]

def init_logger(name: str) -> _VllmLogger: ...
