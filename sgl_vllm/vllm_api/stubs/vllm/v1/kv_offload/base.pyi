# [tiers]
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
