# [preview]
from contextlib import AbstractContextManager

def set_model_tag(tag: str) -> AbstractContextManager[None]: ...
