# [routes]
from prometheus_client import CollectorRegistry

def get_prometheus_registry() -> CollectorRegistry: ...
