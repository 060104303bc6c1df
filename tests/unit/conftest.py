"""An example of a pure part may take as long as a busy machine takes for it; the rest is quick."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """No garbage collection need look again at what stays: with torch and vLLM among it, that takes
    half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every HTTP client reads all the world's certificates, which takes it 0.1 s; here one."""
    import certifi

    end = "-----END CERTIFICATE-----"
    first, *_ = Path(certifi.where()).read_text().split(end)
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield
