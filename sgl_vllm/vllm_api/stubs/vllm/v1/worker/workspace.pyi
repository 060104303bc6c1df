# [preview]
import torch

def init_workspace_manager(device: torch.device) -> None: ...
