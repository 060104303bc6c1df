# [preview]
from contextlib import AbstractContextManager

import torch

def set_default_torch_dtype(dtype: torch.dtype) -> AbstractContextManager[None]: ...
