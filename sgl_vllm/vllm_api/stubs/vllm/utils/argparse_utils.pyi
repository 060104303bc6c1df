import argparse
from collections.abc import Sequence

class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = ..., namespace: argparse.Namespace | None = ...
    ) -> argparse.Namespace: ...
