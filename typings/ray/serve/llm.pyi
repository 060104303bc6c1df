from collections.abc import Mapping
from typing import Any

from ray.serve import Application

def build_openai_app(builder_config: Mapping[str, Any]) -> Application: ...
