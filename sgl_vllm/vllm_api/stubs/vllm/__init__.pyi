# [routes]
from vllm.sampling_params import SamplingParams as SamplingParams

__version__: str
